"""Samples with evidence boxes, and what a stock model attends to while it answers them: eager attention over the whole
sequence, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import reference
from helpers import picture
from realvr.backbone.samples import conversation
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.diagnostics.model import Model
from realvr.evaluation.model_responder import ModelResponder
from realvr.imaging.types import Grid
from realvr.latent.sampling import Sampling

NEW = 5
"""Tokens of an answer."""


def samples(folder: Path) -> list[Sample]:
    """A picture with one box, a taller one with two, both pictures with a box on the second."""
    refs = []
    for number in (4, 1):
        picture(number).save(folder / f"{number}.png")
        refs.append(ImageRef.from_path(folder / f"{number}.png"))
    one = Sample.ask("one", refs[:1], "What color is it?", "red", boxes=[Box(0, (0.0, 0.0, 0.3, 0.4))])
    boxes = [Box(0, (0.0, 0.0, 0.4, 0.2)), Box(0, (0.5, 0.2, 1.0, 0.3))]
    two = Sample.ask("two", refs[1:], "Which of the two shapes is larger?", "A", boxes=boxes, choices=["one", "two"])
    both = Sample.ask("both", refs, "What differs?", "size", boxes=[Box(1, (0.0, 0.7, 0.5, 1.0))])
    return [one, two, both]


def model_of(backbone: Any, latents: int) -> Model:
    return Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=NEW), path="tiny"), latents)


@dataclass(frozen=True)
class Seen:
    """One sample: eager attention (L, H, T, T), and which columns are what."""

    sample: Sample
    grids: list[Grid]
    attention: Tensor
    image: list[int]
    slots: list[int]
    reply: list[int]
    ids: list[int]

    def mean(self) -> Tensor:
        """(L, T, T) over heads."""
        return self.attention.mean(1)


@torch.no_grad()
def seen(pair: Any, sample: Sample, latents: int) -> Seen:
    """The stock model reads, thinks and answers; every token re-runs the whole sequence."""
    ours = pair.ours
    prompt = ours.prompt(conversation(sample, [image.open() for image in sample.images]))
    sequence = pair.begin([prompt])
    if latents:
        sequence, _ = pair.think(sequence, latents)
    end = sequence.ids.shape[1]
    for _ in range(NEW):
        logits = pair.stock.lm_head(reference.hidden(pair.stock, sequence)[:, -1])
        logits[:, ours.forbidden_ids()] = -torch.inf
        token = logits.argmax(-1)
        if int(token) in ours.eos_ids:
            break
        sequence = reference.append(pair.stock, sequence, token[:, None])
    attention = reference.attentions(pair.stock, sequence)[:, 0]
    length = sequence.ids.shape[1]
    slots = list(range(end - 1 - latents, end - 1)) if latents else []
    image = sequence.image[0].nonzero()[:, 0].tolist()
    grids = [image.grid for image in prompt.images]
    return Seen(sample, grids, attention, image, slots, list(range(end, length)), sequence.ids[0].tolist())


def uniform(backbone: Any) -> None:
    """Every query looks at all keys that it may see alike: queries of zeros."""
    for layer in backbone.decoder.layers:
        for parameter in layer.self_attn.q_proj.parameters():
            parameter.data.zero_()


def cells(boxes: Sequence[Box], image: int, rows: int, columns: int) -> set[tuple[int, int]]:
    """Tokens of one picture that share area with a box on it."""
    found = set()
    for row in range(rows):
        for column in range(columns):
            for box in boxes:
                x0, y0, x1, y1 = box.xyxy
                wide = min(x1, (column + 1) / columns) - max(x0, column / columns) > 1e-9
                high = min(y1, (row + 1) / rows) - max(y0, row / rows) > 1e-9
                if box.image == image and wide and high:
                    found.add((row, column))
    return found


def places(grid: Grid) -> dict[tuple[int, int], int]:
    """Number of the token in each cell: tile by tile, row by row."""
    found = {}
    number = 0
    for tile_row in range(grid.tile_rows):
        for tile_column in range(grid.tile_cols):
            for row in range(grid.rows):
                for column in range(grid.cols):
                    found[tile_row * grid.rows + row, tile_column * grid.cols + column] = number
                    number += 1
    return found


def ratio(one: Seen, a_N: Tensor, boxes: Sequence[Box] | None = None) -> tuple[float, float] | None:
    """Mass on the evidence and its mean over all windows of the same shape beside it, by loops; None without one."""
    target = around = 0.0
    start = 0
    for image, grid in enumerate(one.grids):
        rows, columns = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols
        inside = cells(one.sample.boxes if boxes is None else boxes, image, rows, columns)
        token = {place: start + number for place, number in places(grid).items()}
        start += grid.tokens
        if not inside:
            continue
        moved = [
            {(r + down, c + right) for r, c in inside}
            for down in range(-rows, rows)
            for right in range(-columns, columns)
        ]
        windows = [window for window in moved if window <= token.keys() and not window & inside]
        if not windows:
            return None
        target += sum(float(a_N[token[place]]) for place in inside)
        around += sum(float(a_N[token[place]]) for window in windows for place in window) / len(windows)
    return target, around


def asked_about(sample: Sample, *images: int) -> Sample:
    """The sample whose question shows these of its pictures."""
    return replace(sample, turns=[Message("user", sample.question, images)])
