"""Where on the picture a model looks: attention of its latents and of its answer to the visual tokens, layer by layer.

Everything is the mean over heads. The tokens of all pictures that the prompt shows stand one after the other, those of
thumbnails included; regions and their background lie on the tiles alone, as evidence boxes do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realvr.backbone.attention import Probe
from realvr.data.boxes import canvas_size, on_canvas, prompt_boxes, token_mask
from realvr.data.sample import Box, Sample
from realvr.diagnostics.measuring.attending import Attending, Generated, answer
from realvr.diagnostics.model import Model
from realvr.imaging.types import Grid
from realvr.maths.attention import background, enrichment, region_mass, token_attention
from realvr.widgets.browser import MOST_LAYERS, pooled, short

NO_WINDOW = "no window of the same shape fits beside the evidence"
NO_REGION = "no box covers a visual token"
NO_CONTENT = "the reply is empty"


@dataclass(frozen=True)
class Look:
    """One sample: what it answered, and the attention (float64, CPU) that was paid on the way."""

    sample: Sample
    grids: tuple[Grid, ...]
    said: Generated
    latents_LKN: Tensor
    """Of z_1 … z_K, at the slots they are fed into, to the visual tokens."""
    answer_LN: Tensor | None
    """Of the generated content positions, their mean; None for an empty reply."""
    predicting_LN: Tensor | None
    """Of the query that predicts the first content token."""
    predicting_LK: Tensor | None
    """The same query's, to the slots."""


@torch.no_grad()
def look(model: Model, samples: Sequence[Sample]) -> tuple[list[Look], list[tuple[Sample, str]]]:
    """Read, answer and probe one batch; samples that cannot be read come with the reason."""
    backbone = model.backbone
    reading = model.read(samples)
    if not reading.samples:
        return [], reading.errors
    answers = answer(backbone, reading, model.sampling, model.latents)
    looking = Attending(backbone, reading, answers)
    image_BN, shown_BN = looking.image_columns()
    content_BR, real_BR = looking.content()
    before_B1, has_B1 = looking.predicting()
    latents = Probe(rows=looking.latent_rows(), columns=image_BN)
    content = Probe(rows=content_BR, columns=image_BN)
    predicting = Probe(rows=before_B1, columns=image_BN)
    to_slots = Probe(rows=before_B1, columns=looking.slots)
    looking.look([latents, content, predicting, to_slots])
    in_prompt_B = looking.predicting_in_prompt()
    last = Probe(rows=torch.full_like(before_B1, looking.first - 1), columns=image_BN)
    if bool(in_prompt_B.any()):
        looking.look_from_prompt([last])
    size = (backbone.layers, len(answers))
    latents_LBKN = _stack(latents, (*size, model.latents, image_BN.shape[1]))
    answer_LBN = token_attention(_stack(content, (*size, content_BR.shape[1], image_BN.shape[1])), real_BR.cpu())
    predicting_LBN = _stack(predicting, (*size, 1, image_BN.shape[1]))[:, :, 0]
    slots_LBK = _stack(to_slots, (*size, 1, model.latents))[:, :, 0]
    if bool(in_prompt_B.any()):
        chosen = in_prompt_B.cpu()[None, :, None]
        predicting_LBN = torch.where(chosen, last.stack().double().cpu()[:, :, 0], predicting_LBN)
    found = []
    for row, (sample, prompt) in enumerate(zip(reading.samples, reading.prompts, strict=True)):
        shown = shown_BN[row].cpu()
        known, predicted = bool(answers[row].content), bool(has_B1[row, 0] | in_prompt_B[row])
        found.append(
            Look(
                sample,
                tuple(image.grid for image in prompt.images),
                answers[row],
                latents_LBKN[:, row][..., shown],
                answer_LBN[:, row][..., shown] if known else None,
                predicting_LBN[:, row][..., shown] if predicted else None,
                slots_LBK[:, row] if bool(has_B1[row, 0]) else None,
            )
        )
    return found, reading.errors


def _stack(probe: Probe, shape: tuple[int, ...]) -> Tensor:
    """All layers of a probe; zeros where the pass had no query."""
    return probe.stack().double().cpu() if probe.layers else torch.zeros(shape, dtype=torch.float64)


# ---------------------------------------------------------------------- regions


@dataclass(frozen=True)
class Region:
    """Evidence among the visual tokens of a prompt: weights (N,) of the region and of its background."""

    target_N: Tensor
    around_N: Tensor
    windows: int
    """Same-shape windows beside it; of several pictures, the fewest."""

    def measured(self, attention: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``s(M)``, ``E[s(B)]`` and their ratio (…) for attention (…, N)."""
        target, around = region_mass(attention, self.target_N), region_mass(attention, self.around_N)
        return target, around, enrichment(target, around)


def region(sample: Sample, grids: Sequence[Grid], each_box: bool = False, boxes: Sequence[Box] | None = None) -> Region:
    """The evidence of a sample (or these of its `prompt_boxes`) and the windows beside it.

    The region is the union of the boxes, and a window a translate of the whole. With several pictures each has windows
    of its own, and their masses add up. ``each_box`` moves every box by itself instead, to where no box is; the
    background then has the area of the union.
    """
    chosen = prompt_boxes(sample) if boxes is None else boxes
    total = sum(grid.tokens for grid in grids)
    target_N, around_N = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    windows: list[int] = []
    start = 0
    for number, grid in enumerate(grids):
        own = [box.xyxy for box in chosen if box.image == number]
        place = start + torch.from_numpy(on_canvas(np.arange(grid.tokens), grid).copy())
        start += grid.tokens
        union = _on_tiles(own, grid)
        if not bool(union.any()):
            continue
        target_N[place] = union.double()
        shapes = [mask for mask in (_on_tiles([box], grid) for box in own) if mask.any()] if each_box else [union]
        scale = float(union.sum()) / sum(float(shape.sum()) for shape in shapes)
        for shape in shapes:
            weights, count = background(shape, union)
            windows.append(count)
            around_N[place] += scale * weights
    return Region(target_N, around_N, min(windows, default=0))


def as_shown(sample: Sample, boxes: Sequence[Box]) -> list[Box]:
    """Boxes of another question about the same pictures, their images counted as this sample's prompt shows them."""
    return prompt_boxes(replace(sample, boxes=list(boxes)))


def why_not(found: Region) -> str | None:
    """Why a region has no ratio; None where it has one."""
    if not bool(found.target_N.any()):
        return NO_REGION
    return None if found.windows else NO_WINDOW


def measured_each(regions: Sequence[Region | None], attention_LKN: Tensor) -> dict[str, Tensor] | None:
    """``target``, ``background`` and ``ratio`` (L, K) of each latent against a region of its own; NaN for one that has
    no region or no window. None where no latent has any."""
    usable = [one is not None and why_not(one) is None for one in regions]
    if not any(usable):
        return None
    nothing = torch.full_like(attention_LKN[:, 0, 0], torch.nan)
    values = [
        one.measured(attention_LKN[:, t]) if one is not None and usable[t] else (nothing, nothing, nothing)
        for t, one in enumerate(regions)
    ]
    names = ("target", "background", "ratio")
    return {name: torch.stack([value[place] for value in values], 1) for place, name in enumerate(names)}


def _on_tiles(boxes: Sequence[Sequence[float]], grid: Grid) -> Tensor:
    return torch.from_numpy(on_canvas(token_mask(boxes, grid) > 0, grid).copy())


# ---------------------------------------------------------------------- for records and the case browser


def digits(values: Tensor) -> list[Any]:
    """Nested lists of numbers with six significant digits; None for NaN."""
    if values.dim() > 1:
        return [digits(part) for part in values]
    return [None if math.isnan(value) else short(value) for value in values.tolist()]


def chosen_layers(count: int) -> list[int]:
    """Layers (from 0) whose maps are kept: at most as many as the case browser shows, evenly, first and last."""
    if count <= MOST_LAYERS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_LAYERS - 1)) for place in range(MOST_LAYERS)})


def maps(attention_LN: Tensor, grids: Sequence[Grid]) -> list[dict[str, Any]]:
    """Attention as the case browser draws it: the mean over layers and single ones, a grid for each picture (tiles side
    by side, the thumbnail left out), averaged down to what a page shows, three significant digits."""
    layers: list[tuple[int | str, Tensor]] = [("mean", attention_LN.mean(0))]
    layers += [(number + 1, attention_LN[number]) for number in chosen_layers(len(attention_LN))]
    return [{"layer": name, "grids": [coarse(grid) for grid in split(a_N, grids)]} for name, a_N in layers]


def split(attention: Tensor, grids: Sequence[Grid]) -> list[NDArray[np.float64]]:
    """Attention (…, N) as it lies in each picture: (…, rows, columns), thumbnails left out."""
    parts = attention.split([grid.tokens for grid in grids], dim=-1)
    return [on_canvas(part.double().numpy(), grid) for part, grid in zip(parts, grids, strict=True)]


def coarse(grid: NDArray[np.float64]) -> list[list[float | None]]:
    """A map averaged down to what a page shows, three significant digits."""
    return [[None if value is None else float(f"{value:.3g}") for value in row] for row in pooled(grid.tolist())]


def tiles(grids: Sequence[Grid]) -> Tensor:
    """(N,) which visual tokens are of tiles, not of a thumbnail."""
    parts = [torch.arange(grid.tokens) < int(np.prod(canvas_size(grid))) for grid in grids]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)
