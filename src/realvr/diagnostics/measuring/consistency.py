"""Mean trajectories of one question under changes of its pictures; `realvr.diagnostics.consistency` says why."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from PIL.Image import Image
from torch import Tensor

from realvr.answers.judge import equal
from realvr.data.sample import Sample
from realvr.diagnostics.consistency import Condition, View
from realvr.diagnostics.measuring.attending import Generated, answer
from realvr.diagnostics.measuring.reading import Reading, prompt_with, read_prompts
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import hashed
from realvr.errors import UserError
from realvr.imaging import perturbing
from realvr.maths import geometry
from realvr.maths.evidence import unit
from realvr.runs.journal import Record


class Destroyed(UserError):
    """A changed picture in which there is nothing left to see."""


@dataclass
class Case:
    """One question: its pictures, and what each view of them gave; ``refused`` says why it could not be read."""

    sample: Sample
    pictures: list[Image]
    means: dict[View, Tensor] = field(default_factory=dict)
    answers: dict[View, Generated] = field(default_factory=dict)
    destroyed: set[View] = field(default_factory=set)
    refused: dict[View, str] = field(default_factory=dict)


def changed(case: Case, view: View, seed: int) -> list[Image]:
    """The pictures of a view: the seed, the sample and the view alone decide how they are changed."""
    if view.change is None:
        return case.pictures
    found = []
    for number, picture in enumerate(case.pictures):
        name = f"{seed}\n{case.sample.id}\n{view.condition}\n{view.change}\n{view.number}\n{number}"
        draw = random.Random(hashed(name))
        change: perturbing.Change = getattr(perturbing, view.change)
        found.append(change(picture, view.strength, draw))
    before = [perturbing.destroyed(picture) for picture in case.pictures]
    if any(perturbing.destroyed(picture) and not was for picture, was in zip(found, before, strict=True)):
        raise Destroyed("nothing is left of a picture: it has one colour")
    return found


@torch.no_grad()
def consistency_records(
    model: Model, samples: Sequence[Sample], conditions: Sequence[Condition], seed: int, policy: str | None
) -> Iterator[tuple[Sample, Record | str, Tensor | None]]:
    """For each sample what its record holds and its mean latent (D,), or why it cannot be read."""
    cases, errors = [], []
    for sample in samples:
        try:
            if not sample.images:
                raise UserError(f"{sample.id}: no picture, so there is nothing to change")
            pictures = [image.open().convert("RGB") for image in sample.images]
            if all(perturbing.destroyed(picture) for picture in pictures):
                raise UserError(f"{sample.id}: a picture of one colour or narrower than two pixels: nothing can change")
            cases.append(Case(sample, pictures))
        except UserError as error:
            errors.append((sample, str(error)))
    for condition in conditions:
        for view in condition.views:
            _read(model, cases, view, seed, policy)
    first = conditions[0].views[0]
    for case in cases:
        if first in case.means:
            own = {one.name: _numbers(case, one, first) for one in conditions}
            yield case.sample, {"conditions": own, "correct": _right(case, first)}, case.means[first].cpu()
        else:
            errors.append((case.sample, case.refused[first]))
    yield from ((sample, error, None) for sample, error in errors)


def _read(model: Model, cases: Sequence[Case], view: View, seed: int, policy: str | None) -> None:
    """One view of all questions, in one batch."""
    reading, read = Reading(), []
    for case in cases:
        try:
            pictures = changed(case, view, seed)
            reading.prompts.append(prompt_with(model.backbone, case.sample, pictures, model.latents))
            reading.samples.append(case.sample)
            read.append(case)
        except Destroyed:
            case.destroyed.add(view)
        except UserError as error:
            case.refused[view] = str(error)
    read_prompts(model.backbone, reading, model.latents)
    if reading.latents_RKD is None:
        return
    for case, latents_KD in zip(read, reading.latents_RKD, strict=True):
        case.means[view] = latents_KD.double().mean(0)
    if policy is not None:
        replies = answer(model.backbone, reading, model.sampling, model.latents, policy)
        for case, reply in zip(read, replies, strict=True):
            case.answers[view] = reply


def _numbers(case: Case, condition: Condition, first: View) -> Record:
    views = [view for view in condition.views if view in case.means]
    means = [case.means[view] for view in views]
    original = unit(case.means[first])
    own = [float(unit(vector) @ original) for view, vector in zip(views, means, strict=True) if view != first]
    same = geometry.pairwise(means)
    return {
        "rcs": None if same is None else _fine(same),
        "to_original": _fine(sum(own) / len(own)) if own else None,
        "views": len(views),
        "destroyed": sum(view in case.destroyed for view in condition.views),
        "refused": [case.refused[view] for view in condition.views if view in case.refused],
        "kept": [_kept(case, view, first) for view in views if view != first and view in case.answers],
    }


def _kept(case: Case, view: View, first: View) -> bool:
    """Whether the answer is that to the pictures as they are; one that cannot be parsed never is."""
    said, before = case.answers[view].extracted, case.answers[first].extracted
    return said is not None and before is not None and bool(equal(said, before, case.sample.choices))


def _right(case: Case, first: View) -> bool | None:
    return case.answers[first].correct if first in case.answers else None


def _fine(value: float) -> float:
    """Ten digits: consistency differs from 1 by little."""
    return float(f"{value:.10g}")
