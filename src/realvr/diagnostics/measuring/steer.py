"""Steering on a model's tensors; `realvr.diagnostics.steer` says what is asked and why.

One prefill and one free-running span serve all steps and conditions of a batch, and the visual tokens of a picture are
computed once. Every condition runs over all rows of the batch: where a row has no place to move to, its own latent is
put back. Equal shapes make equal arithmetic, so that a latent put back changes nothing to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realvr.answers import JUDGE, canonical_answer, parser
from realvr.backbone.backbone import Backbone
from realvr.data.boxes import XYXY
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import Reading, read_samples
from realvr.diagnostics.steer_moves import Move, as_json, box_distance, control_seed, move_at
from realvr.evaluation.model_responder import prompt_hash
from realvr.latent.group_rollout import Completion, decode
from realvr.latent.regions import region_tokens, region_vector
from realvr.latent.sampling import GREEDY, Sampling
from realvr.latent.span import span_tokens, think
from realvr.latent.state import State
from realvr.latent.walk import walk
from realvr.maths.injection import random_direction
from realvr.runs.journal import Record


@dataclass(frozen=True)
class SteerOptions:
    """Which latents are replaced, and how answers are made and read."""

    latents: int
    steps: tuple[int, ...]
    seed: int = 0
    policy: Any = "strict"
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Told:
    """What one span led to: its latents (R, K, D), the state behind it (R, D), and a reply for each row."""

    latents_RKD: Tensor
    last_RD: Tensor
    replies: list[Completion]


@torch.no_grad()
def steer_samples(backbone: Backbone, samples: Sequence[Sample], options: SteerOptions) -> list[Record]:
    """Records of one batch: one for each sample and step, also where there is nowhere to move to."""
    records: list[Record] = []
    moves, going = {}, []
    for sample in samples:
        moves[sample.id] = [move_at(sample, step, options.latents, options.seed) for step in options.steps]
        if any(isinstance(move, Move) for move in moves[sample.id]):
            going.append(sample)
        else:
            records += [
                _skipped(sample, step, str(why)) for step, why in zip(options.steps, moves[sample.id], strict=True)
            ]
    reading = read_samples(backbone, going, options.latents)
    records += [{"id": sample.id, "error": error} for sample, error in reading.errors]
    if reading.samples:
        bench = Bench(backbone, reading, options)
        for number, step in enumerate(options.steps):
            records += bench.records(step, [moves[sample.id][number] for sample in reading.samples])
    return records


def _skipped(sample: Sample, step: int, why: str) -> Record:
    return {"id": sample.id, "step": step, "skipped": why, "error": None}


class Bench:
    """One batch that was read, and its free-running spans."""

    def __init__(self, backbone: Backbone, reading: Reading, options: SteerOptions) -> None:
        self.backbone, self.reading, self.options = backbone, reading, options
        self.features = reading.features()
        room = backbone.context_length - span_tokens(options.latents)
        self.limits = [min(options.sampling.max_new, room - len(prompt)) for prompt in reading.prompts]
        assert reading.after is not None and reading.latents_RKD is not None
        self.free = self._answer(reading.after, reading.latents_RKD)

    def _answer(self, after: State, latents_RKD: Tensor) -> Told:
        groups = decode(self.backbone, after, 1, self.options.sampling, 0, self.limits)
        return Told(latents_RKD, after.last_BD, [group[0] for group in groups])

    def put(self, step: int, vectors: Sequence[Tensor | None]) -> Told:
        """The span with a vector for each row at a step; None puts the row's own latent back."""
        assert self.reading.prompt is not None
        own_RD = self.free.latents_RKD[:, step - 1]
        fed_RD = torch.stack([own_D if v is None else v.to(own_D) for own_D, v in zip(own_RD, vectors, strict=True)])
        return self._answer(
            *think(self.backbone, self.reading.prompt, self.options.latents, interventions={step: fed_RD})
        )

    def vectors(self, images: Sequence[int], boxes: Sequence[XYXY | None]) -> list[Tensor | None]:
        """For each row, the mean visual token of a box on one of its pictures; None without a box."""
        return [
            None
            if box is None
            else region_vector(self.features[row][image], self.reading.prompts[row].images[image].grid, box)
            for row, (image, box) in enumerate(zip(images, boxes, strict=True))
        ]

    def randomly(self, step: int, vectors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """For each vector one of the same norm in a random direction."""
        rows = zip(self.reading.samples, vectors, strict=True)
        return [
            None if v is None else random_direction(v, control_seed(self.options.seed, sample.id, step))
            for sample, v in rows
        ]

    def records(self, step: int, moves: Sequence[Move | str]) -> list[Record]:
        """One for each row of the batch."""
        samples = self.reading.samples
        found = [move if isinstance(move, Move) else None for move in moves]
        if not any(found):
            return [_skipped(sample, step, str(why)) for sample, why in zip(samples, moves, strict=True)]
        images = [move.image if move else 0 for move in found]
        vectors = self.vectors(images, [move.box if move else None for move in found])
        told = {
            "free": self.free,
            "moved": self.put(step, vectors),
            "own_place": self.put(step, self.vectors(images, [move.own if move else None for move in found])),
            "put_back": self.put(step, [None] * len(found)),
            "random": self.put(step, self.randomly(step, vectors)),
        }
        return [
            _skipped(sample, step, str(move)) if isinstance(move, str) else self._record(row, move, told)
            for row, (sample, move) in enumerate(zip(samples, moves, strict=True))
        ]

    def _record(self, row: int, move: Move, told: dict[str, Told]) -> Record:
        sample, options = self.reading.samples[row], self.options
        reader = parser(options.policy, "evaluation")
        shown = {n: t for n, t in told.items() if n != "random" and (n != "own_place" or move.own is not None)}
        texts = {name: one.replies[row].text for name, one in shown.items()}
        back, random = told["put_back"], told["random"].replies[row].text
        return {
            "id": sample.id,
            "step": move.step,
            "latents": options.latents,
            "skipped": None,
            **as_json(move),
            "old_truth": sample.answer,
            "new_truth": canonical_answer(move.answer, sample.choices),
            "texts": texts,
            "extracted": {name: reader.read(text, sample.choices) for name, text in texts.items()},
            "later": {
                "moved": self._on(row, move, told["moved"], move.new),
                "own_place": self._on(row, move, told["own_place"], move.old) if move.own is not None else [],
                "free": self._on(row, move, self.free, move.old),
            },
            "random": {
                "text": random,
                "extracted": reader.read(random, sample.choices),
                "later": self._on(row, move, told["random"], move.new),
            },
            "distance": self._distance(row, move),
            "unchanged": torch.equal(back.latents_RKD[row], self.free.latents_RKD[row])
            and torch.equal(back.last_RD[row], self.free.last_RD[row])
            and texts["put_back"] == texts["free"],
            "choices": list(sample.choices),
            "tags": sample.tags,
            "policy": options.policy,
            "parser": str(reader),
            "judge": JUDGE,
            "prompt": prompt_hash(self.reading.prompts[row]),
            "error": None,
        }

    def _distance(self, row: int, move: Move) -> int | None:
        if move.distance is not None or move.own is None:
            return move.distance
        return box_distance(self.reading.prompts[row].images[move.image].grid, move.own, move.box)

    def _on(self, row: int, move: Move, told: Told, places: Sequence[XYXY]) -> list[bool]:
        """For each latent after the step, whether the visual token nearest to it lies in the place it should be at."""
        if not places:
            return []
        grids = [image.grid for image in self.reading.prompts[row].images]
        nearest = walk(told.latents_RKD[row], torch.cat(self.features[row]), grids).nearest[move.step :]
        before = sum(grid.tokens for grid in grids[: move.image])
        tokens = [before + region_tokens(grids[move.image], place) for place in places]
        return [bool((token == int(near)).any()) for token, near in zip(tokens, nearest, strict=True)]
