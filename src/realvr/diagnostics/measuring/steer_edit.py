"""Steering by an edited picture on a model's tensors; `realvr.diagnostics.steer_edit` says what is asked and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realvr.answers import JUDGE, parser
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.data.boxes import canvas_size, prompt_boxes, token_mask, token_place
from realvr.diagnostics.measuring.cases import changed_cells
from realvr.diagnostics.measuring.reading import Reading, read_samples
from realvr.diagnostics.measuring.steer import Bench, SteerOptions, Told
from realvr.diagnostics.numbers import short
from realvr.diagnostics.pairs import Pair
from realvr.diagnostics.steer_moves import grid_distance
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.maths.precision import at_least_float32
from realvr.runs.journal import Record

NO_REGION = "neither pixels nor evidence boxes say where the edit is"
OTHER_GRID = "the two pictures have different grids of visual tokens"
CONDITIONS = ("edited", "original", "random")


@torch.no_grad()
def steer_pairs(backbone: Backbone, pairs: Sequence[Pair], options: SteerOptions) -> list[Record]:
    """Records of one batch: one for each pair and step."""
    there = read_samples(backbone, [pair.edited for pair in pairs], options.latents)
    seen = {sample.id: row for row, sample in enumerate(there.samples)}
    here = read_samples(backbone, [pair.original for pair in pairs if pair.edited.id in seen], options.latents)
    by_view = {view.id: pair for pair in pairs for view in pair.views}
    records: list[Record] = [
        {"pair": by_view[sample.id].id, "error": error} for sample, error in (*there.errors, *here.errors)
    ]
    if not here.samples:
        return records
    chosen = [by_view[sample.id] for sample in here.samples]
    bench = Edits(backbone, here, there, [seen[pair.edited.id] for pair in chosen], chosen, options)
    for step in options.steps:
        records += bench.edit_records(step)
    return records


class Edits(Bench):
    """A batch of original views that was read, beside their edited views."""

    def __init__(
        self,
        backbone: Backbone,
        reading: Reading,
        there: Reading,
        rows: Sequence[int],
        pairs: Sequence[Pair],
        options: SteerOptions,
    ) -> None:
        super().__init__(backbone, reading, options)
        self.pairs = pairs
        assert there.latents_RKD is not None
        self.goal_RKD = there.latents_RKD[list(rows)]
        """Latents of the edited views."""
        edited = there.features()
        self.regions: list[tuple[int, list[int]] | str] = []
        self.put_in: dict[str, list[Tensor | None]] = {"edited": [], "original": []}
        for place, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
            found = edited_region(pair, reading.prompts[place], there.prompts[row])
            self.regions.append(found)
            for name, features in (("edited", edited[row]), ("original", self.features[place])):
                self.put_in[name].append(None if isinstance(found, str) else _mean(features[found[0]], found[1]))

    def edit_records(self, step: int) -> list[Record]:
        """One for each row of the batch."""
        if all(isinstance(region, str) for region in self.regions):
            return [self._skip(row, step) for row in range(len(self.pairs))]
        vectors = self.put_in | {"random": self.randomly(step, self.put_in["edited"])}
        told = {name: self.put(step, vectors[name]) for name in CONDITIONS}
        return [
            self._skip(row, step) if isinstance(region, str) else self._edit_record(row, step, region, told)
            for row, region in enumerate(self.regions)
        ]

    def _skip(self, row: int, step: int) -> Record:
        pair = self.pairs[row]
        return {"pair": pair.id, "edit": pair.edit, "step": step, "skipped": self.regions[row], "error": None}

    def _edit_record(self, row: int, step: int, region: tuple[int, list[int]], told: dict[str, Told]) -> Record:
        pair, options = self.pairs[row], self.options
        reader = parser(options.policy, "evaluation")
        texts = {name: one.replies[row].text for name, one in {"free": self.free, **told}.items()}
        return {
            "pair": pair.id,
            "edit": pair.edit,
            "step": step,
            "latents": options.latents,
            "skipped": None,
            "image": region[0] + 1,
            "tokens": len(region[1]),
            "distance": _distance(pair, step, region, self.reading.prompts[row].images[region[0]].grid),
            "changes_at": _changes_at(pair),
            "old_truth": pair.truths[0],
            "new_truth": pair.truths[1],
            "texts": texts,
            "extracted": {name: reader.read(text, pair.original.choices) for name, text in texts.items()},
            "toward": {name: self._toward(row, step, one) for name, one in told.items()},
            "choices": list(pair.original.choices),
            "policy": options.policy,
            "parser": str(reader),
            "judge": JUDGE,
            "error": None,
        }

    def _toward(self, row: int, step: int, told: Told) -> float | None:
        """Gain of the later latents' cosine to those of the edited view, over the free-running span; mean over the
        steps behind, None behind the last."""
        if step == self.options.latents:
            return None
        goal = at_least_float32(self.goal_RKD[row, step:])
        near, free = (
            F.cosine_similarity(at_least_float32(one.latents_RKD[row, step:]), goal, dim=-1)
            for one in (told, self.free)
        )
        return short(float((near - free).mean()))


def edited_region(pair: Pair, here: Prompt, there: Prompt) -> tuple[int, list[int]] | str:
    """Picture (from 0, in the order of the prompt) and visual tokens in which the views differ, or why none are known.

    By pixels, where both pictures have one size and differ in at most half of their cells; of these tokens, those in
    the edited view's evidence where there are any. Else the evidence of the edited view.
    """
    grids = [image.grid for image in here.images]
    if grids != [image.grid for image in there.images]:
        return OTHER_GRID
    try:
        boxes = prompt_boxes(pair.edited)
    except UserError:
        boxes = []
    evidence = [token_mask([box.xyxy for box in boxes if box.image == place], grid) for place, grid in enumerate(grids)]
    for place, grid in enumerate(grids):
        first, second = (view.images[view.shown[place]].open() for view in pair.views)
        cells = set(changed_cells(first, second, canvas_size(grid)))
        tokens = [token for token in range(grid.tokens) if _cell(token, grid) in cells]
        if tokens:
            return place, [token for token in tokens if evidence[place][token]] or tokens
    for place, mask in enumerate(evidence):
        if mask.any():
            return place, np.flatnonzero(mask).tolist()
    return NO_REGION


def _cell(token: int, grid: Grid) -> int | None:
    """Number of a visual token's cell, row by row over the whole picture; None for one of a thumbnail."""
    at = token_place(token, grid)
    return None if at is None else at[0] * canvas_size(grid)[1] + at[1]


def _mean(features_ND: Tensor, tokens: Sequence[int]) -> Tensor:
    return at_least_float32(features_ND[list(tokens)]).mean(0).to(features_ND.dtype)


def _distance(pair: Pair, step: int, region: tuple[int, list[int]], grid: Grid) -> int | None:
    """Visual tokens from the step's evidence box to the nearest of the region; None without evidence there."""
    boxes = prompt_boxes(pair.original)
    own = boxes[min(step, len(boxes)) - 1] if boxes and pair.original.ordered else None
    if own is None or own.image != region[0]:
        return None
    evidence = np.flatnonzero(token_mask([own.xyxy], grid)).tolist()
    here, there = ([at for token in tokens if (at := token_place(token, grid))] for tokens in (evidence, region[1]))
    return min((grid_distance(a, b) for a in here for b in there), default=None)


def _changes_at(pair: Pair) -> int | None:
    """For a pair of trails: the step whose cell was edited, where it is on the trail."""
    trail: Any = pair.original.meta.get("trail")
    found = trail.get("changes_at") if isinstance(trail, dict) else None
    return found if isinstance(found, int) else None
