"""Rows of base training: a question and a caption of each sample, and dense labels of every visual token."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt, Turn
from realvr.data.boxes import token_boxes
from realvr.data.mixture import Mixture
from realvr.data.sample import Sample
from realvr.data.wording import spelled_out
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.training.dropping import Draws
from realvr.training.examples import Encoder
from realvr.training.prefetch import parallel_map
from realvr.training.sft_batch import SftBatch, SftExample, pack_rows

CAPTION_REQUEST = "Describe the image."
ATTRIBUTES = ("color", "shape")
NOTHING = ""

Rows = tuple[list[SftExample], list[bool], list[Tensor]]
"""Rows of a sample, whether each is a caption, and the dense labels of each row's visual tokens."""
Place = tuple[str, int]
"""A sample by its source and its number there."""


@dataclass
class BaseBatch:
    """Rows of examples (questions or captions), and dense labels of every visual token."""

    rows: SftBatch
    caption_M: Tensor  # bool: the labelled token belongs to a caption
    dense_NA: Tensor  # class of each visual token per attribute; -1 where unknown
    totals: dict[str, float]

    @property
    def names(self) -> list[str]:
        """Ids of the rows, for messages."""
        return self.rows.names

    def to(self, device: torch.device) -> BaseBatch:
        """On a device, in place."""
        self.rows.to(device)
        self.caption_M, self.dense_NA = self.caption_M.to(device), self.dense_NA.to(device)
        return self


class BaseRows:
    """Samples to rows to microbatches; kept in memory with ``keep``. May run in a worker process."""

    def __init__(
        self, backbone: Backbone, samples: Mixture[Sample], *, caption_ratio: float, jitter: int, keep: bool
    ) -> None:
        self.backbone, self.samples = backbone, samples
        self.caption_ratio, self.jitter, self.keep = caption_ratio, jitter, keep
        self.classes = [_classes(samples.sources, attribute) for attribute in ATTRIBUTES]
        self.encoder = Encoder(backbone, backbone.context_length)
        self.kept: dict[Place, Rows] = {}

    def encode_all(self, workers: int) -> None:
        """Fill the memory before the workers of the loop are forked, so that they share it."""
        samples = self.samples
        places = [
            (name, i) for name, source in zip(samples.names, samples.sources, strict=True) for i in range(len(source))
        ]
        for place, rows in zip(places, parallel_map(self._laid_out, places, workers), strict=True):
            if rows is not None:
                self.kept[place] = rows

    def _laid_out(self, place: Place) -> Rows | None:
        rows = self._encode(self.samples.at(place))  # in a worker, which need not keep it
        for example in rows[0] if rows else ():
            example.layout(self.backbone)
        return rows

    def batches(self, step: int, drawn: list[Place], size: int, generator: torch.Generator) -> list[BaseBatch]:
        """Microbatches of one step; ``encoder.draws`` then counts which of its rows cannot be used."""
        self.encoder.draws = Draws(len(drawn))  # of this step alone: another process may make the next
        rows = [each for each in (self._rows(place) for place in drawn) if each is not None]
        if len(rows) <= len(drawn) - size:  # a microbatch would be empty
            draws = self.encoder.draws
            first = next(iter(draws.first.values()))
            raise UserError(f"step {step + 1}: too few rows for its microbatches: {draws.line()} (first: {first})")
        return [self._batch(rows[i : i + size], generator) for i in range(0, len(rows), size)]

    def _rows(self, place: Place) -> Rows | None:
        """Rows of a sample, or None (counted) where it cannot be used."""
        rows = self.kept.get(place)
        if rows is None:
            rows = self._encode(self.samples.at(place))
            if rows is not None and self.keep:
                self.kept[place] = rows
        return rows

    def _encode(self, sample: Sample) -> Rows | None:
        prompt = self.encoder.prompt(sample)
        if prompt is None:
            return None
        rows, captions = [self._row(prompt, spelled_out(sample), sample.id)], [False]
        labels = [_dense_labels(sample, [image.grid for image in prompt.images], self.classes)]
        caption = sample.meta.get("caption") if self._captioned(sample) else None
        if isinstance(caption, str) and caption and len(prompt.images) == 1:
            request = self.backbone.prompt([Turn("user", CAPTION_REQUEST, list(prompt.images))])
            rows.append(self._row(request, caption, f"{sample.id}/caption"))
            captions.append(True)
            labels.append(labels[0])
        return rows, captions, labels

    def _captioned(self, sample: Sample) -> bool:
        """Whether the caption of this sample is used: a fixed share of the samples, by name."""
        return zlib.crc32(sample.id.encode()) % 10_000 < self.caption_ratio * 10_000

    def _row(self, prompt: Prompt, text: str, name: str) -> SftExample:
        ids = [*self.backbone.prompts.encode_text(text)[0], self.backbone.end_of_turn_id]
        whole = Prompt(torch.cat([prompt.ids, torch.tensor(ids)]), prompt.images)
        return SftExample(whole, len(prompt), torch.empty(0, dtype=torch.long), name)

    def _batch(self, samples: Sequence[Rows], generator: torch.Generator) -> BaseBatch:
        examples = [example for rows, _, _ in samples for example in rows]
        captions = [flag for _, flags, _ in samples for flag in flags]
        packed = pack_rows(self.backbone, _side_by_side(examples), jitter=self.jitter, generator=generator)
        counts = torch.tensor([len(example) - example.prompt_length for example in examples])
        caption_M = torch.tensor(captions).repeat_interleave(counts)
        dense = torch.cat([each for _, _, labels in samples for each in labels])
        return BaseBatch(packed, caption_M, dense, {})


def _side_by_side(examples: Sequence[SftExample]) -> list[list[SftExample]]:
    """Rows no longer than the longest example, filled in order: a dialogue is twice as long as a question."""
    width, used = max(len(example) for example in examples), 0
    rows: list[list[SftExample]] = []
    for example in examples:
        if not rows or used + len(example) > width:
            rows.append([])
            used = 0
        rows[-1].append(example)
        used += len(example)
    return rows


def _objects(sample: Sample) -> list[dict[str, Any]]:
    found = sample.meta.get("objects", [])
    return [item for item in found if isinstance(item, dict) and "box" in item] if isinstance(found, list) else []


def _classes(sources: Iterable[Iterable[Sample]], attribute: str) -> list[str]:
    """Values of an attribute in the data, after the class for "no object"."""
    values = {str(item.get(attribute, NOTHING)) for samples in sources for s in samples for item in _objects(s)}
    return [NOTHING, *sorted(values - {NOTHING})]


def _area(item: dict[str, Any]) -> float:
    x0, y0, x1, y1 = item["box"]
    return float((x1 - x0) * (y1 - y0))


def _dense_labels(sample: Sample, grids: Sequence[Grid], classes: Sequence[Sequence[str]]) -> Tensor:
    """(N, A) class of the object at the centre of each visual token (the smallest where several are), 0 for none, -1
    where the sample does not describe its objects (or has several images)."""
    count = sum(grid.tokens for grid in grids)
    objects = _objects(sample)
    if len(grids) != 1 or not objects:
        return torch.full((count, len(classes)), -1, dtype=torch.long)
    width, height = sample.images[0].size
    cells = token_boxes(grids[0])
    x, y = (cells[:, 0] + cells[:, 2]) / 2 * width, (cells[:, 1] + cells[:, 3]) / 2 * height
    labels = np.zeros((count, len(classes)), dtype=np.int64)
    for item in sorted(objects, key=_area, reverse=True):
        x0, y0, x1, y1 = item["box"]
        inside = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
        for number, (attribute, names) in enumerate(zip(ATTRIBUTES, classes, strict=True)):
            labels[inside, number] = names.index(str(item.get(attribute, NOTHING)))
    return torch.from_numpy(labels)
