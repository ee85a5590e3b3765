"""Steering to any region on a model's tensors; `realvr.diagnostics.steer_region` says what is asked and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realvr.answers import JUDGE, equal, parser
from realvr.backbone.backbone import Backbone
from realvr.data.boxes import cell_box, on_canvas, prompt_boxes, token_mask, with_area
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import read_samples
from realvr.diagnostics.measuring.steer import Bench, SteerOptions, Told
from realvr.diagnostics.numbers import hashed, short
from realvr.diagnostics.steer_moves import Move, box_distance
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.latent.regions import region_vector
from realvr.maths.precision import at_least_float32
from realvr.runs.journal import Record

NO_ROOM = "no region of the same shape lies outside the evidence"
NO_AREA = "no evidence box covers a picture that is shown"
CONDITIONS = ("moved", "own_place", "random")


@torch.no_grad()
def steer_regions(backbone: Backbone, samples: Sequence[Sample], options: SteerOptions) -> list[Record]:
    """Records of one batch: one for each sample and step."""
    reading = read_samples(backbone, samples, options.latents)
    records: list[Record] = [{"id": sample.id, "error": error} for sample, error in reading.errors]
    if reading.samples:
        bench = Regions(backbone, reading, options)
        for step in options.steps:
            records += bench.region_records(step)
    return records


def region_at(sample: Sample, grids: Sequence[Grid], step: int, seed: int) -> Move | str:
    """A region as large as the step's evidence box, on the same picture and outside all evidence, drawn by the seed,
    the sample's id and the step alone; or why there is none. ``answer`` is not known."""
    try:
        boxes = with_area(prompt_boxes(sample))
    except UserError:
        boxes = []
    if not boxes:
        return NO_AREA
    own = boxes[min(step, len(boxes)) - 1]
    grid = grids[own.image]
    evidence = [box.xyxy for box in boxes if box.image == own.image]
    taken, covered = (on_canvas(token_mask(part, grid), grid) > 0 for part in (evidence, [own.xyxy]))
    rows, columns = (np.flatnonzero(covered.any(axis)) for axis in (1, 0))
    height, width = len(rows), len(columns)
    windows = np.lib.stride_tricks.sliding_window_view(taken, (height, width))
    free = np.argwhere(~windows.any((2, 3)))
    if not len(free):
        return NO_ROOM
    drawn = np.random.default_rng([seed, hashed(f"{sample.id}\n{step}\nregion")])
    row, column = (int(value) for value in free[int(drawn.integers(len(free)))])
    first, last = cell_box(grid, row, column), cell_box(grid, row + height - 1, column + width - 1)
    box = (first[0], first[1], last[2], last[3])
    return Move(step, own.image, box, "", own.xyxy, distance=box_distance(grid, own.xyxy, box))


class Regions(Bench):
    """A batch that was read, moved to regions without a known answer."""

    def region_records(self, step: int) -> list[Record]:
        """One for each row of the batch."""
        moves = [
            region_at(sample, [image.grid for image in prompt.images], step, self.options.seed)
            for sample, prompt in zip(self.reading.samples, self.reading.prompts, strict=True)
        ]
        found = [move if isinstance(move, Move) else None for move in moves]
        images = [move.image if move else 0 for move in found]
        vectors = self.vectors(images, [move.box if move else None for move in found])
        told: dict[str, Told] = {}
        if any(found):
            own = self.vectors(images, [move.own if move else None for move in found])
            put = {"moved": vectors, "own_place": own, "random": self.randomly(step, vectors)}
            told = {name: self.put(step, put[name]) for name in CONDITIONS}
        return [
            {"id": sample.id, "step": step, "skipped": move, "error": None}
            if isinstance(move, str)
            else self._region_record(row, move, told)
            for row, (sample, move) in enumerate(zip(self.reading.samples, moves, strict=True))
        ]

    def _region_record(self, row: int, move: Move, told: dict[str, Told]) -> Record:
        sample, options = self.reading.samples[row], self.options
        reader = parser(options.policy, "evaluation")
        texts = {name: one.replies[row].text for name, one in {"free": self.free, **told}.items()}
        extracted = {name: reader.read(text, sample.choices) for name, text in texts.items()}
        target = region_vector(
            self.features[row][move.image], self.reading.prompts[row].images[move.image].grid, move.box
        )
        later = options.latents - move.step
        return {
            "id": sample.id,
            "step": move.step,
            "latents": options.latents,
            "skipped": None,
            "image": move.image + 1,
            "box": [round(value, 4) for value in move.box],
            "distance": move.distance,
            "texts": texts,
            "extracted": extracted,
            "changed": {name: _differs(extracted[name], extracted["free"], sample) for name in CONDITIONS},
            "right": {name: bool(equal(said, sample.answer, sample.choices)) for name, said in extracted.items()},
            "toward": {name: self._toward(row, move.step, one, target) for name, one in told.items()},
            "inside": {name: self._on(row, move, one, (move.box,) * later) for name, one in told.items()},
            "choices": list(sample.choices),
            "policy": options.policy,
            "parser": str(reader),
            "judge": JUDGE,
            "error": None,
        }

    def _toward(self, row: int, step: int, told: Told, target_D: Tensor) -> float | None:
        """Gain of the later latents' cosine to the region over the free-running span; None behind the last step."""
        if step == self.options.latents:
            return None
        target = at_least_float32(target_D)[None]
        spans = (at_least_float32(one.latents_RKD[row, step:]) for one in (told, self.free))
        near, free = (F.cosine_similarity(span, target, dim=-1) for span in spans)
        return short(float((near - free).mean()))


def _differs(said: str | None, free: str | None, sample: Sample) -> bool | None:
    """Whether the answer changed; None where one of the two cannot be parsed."""
    return None if said is None or free is None else not equal(said, free, sample.choices)
