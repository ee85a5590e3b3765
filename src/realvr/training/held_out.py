"""Held-out questions of a run: read before the model, checked, and the same few at every validation. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.evaluation.questions import Questions, load, units
from realvr.hub.datasets import is_hub
from realvr.runs.guard import note

if TYPE_CHECKING:
    from realvr.training.sections import DataSettings, ValidationSettings

NAME = "validation"
"""What the records of an evaluation call these questions."""


def held_out_questions(settings: ValidationSettings) -> Questions | None:
    """The questions of ``validation.path``, at most ``validation.n`` of them; None where the run has no validation."""
    if settings.path is None:
        return None
    path = Path(settings.path)
    if not is_hub(path) and not path.exists():
        raise UserError(f"validation.path: {path} does not exist")
    try:
        questions = load(NAME, path, images=settings.images)
    except UserError as error:
        text = str(error).removeprefix(f"{NAME}: ").replace("name one with --format", "write it as one of docs/data.md")
        raise UserError(f"validation.path: {text}") from None
    chosen = _chosen(questions.samples, settings.n, settings.seed)
    _refuse_unreadable(path, chosen)
    return replace(questions, bench=NAME, samples=chosen, limit=settings.n)


def _chosen(samples: Sequence[Sample], n: int, seed: int) -> list[Sample]:
    """At most ``n`` questions, in whole pairs and option cycles (one at least), drawn by ``seed``; in the order of the
    file. The draw of a question does not depend on what else the file holds."""
    if len(samples) <= n:
        return list(samples)
    kept: list[str] = []
    for unit in sorted(units(samples), key=lambda unit: _draw(seed, unit[0].id)):
        if not kept or len(kept) + len(unit) <= n:
            kept += [sample.id for sample in unit]
    names = set(kept)
    return [sample for sample in samples if sample.id in names]


def _draw(seed: int, question: str) -> bytes:
    return hashlib.sha256(f"{seed}/{question}".encode("utf-8", "backslashreplace")).digest()


def _refuse_unreadable(path: Path, samples: Iterable[Sample]) -> None:
    """A question whose image cannot be read counts as wrong; a file that has no other kind is a mistake."""
    first = None
    for sample in samples:
        try:
            for image in sample.images:
                image.open()
            return
        except (UserError, OSError) as error:
            first = first or f"{sample.id}: {error}"
    raise UserError(f"validation.path: {path} holds no question whose images can be read (first: {first})")


def note_training_on(questions: Questions, data: DataSettings, trained: Mapping[str, Sequence[Sample]]) -> None:
    """Print a notice where held-out questions are trained on."""
    where = Path(questions.path).resolve()
    for number, source in enumerate(data.sources):
        if source.weight > 0 and Path(source.path).resolve() == where:
            note(
                f"validation.path is also data.sources.{number}.path ({source.path}): the run is trained on the "
                "questions it is validated on, and validation shows what it remembers, not what it has learned"
            )
            return
    seen = {_content(sample) for samples in trained.values() for sample in samples}
    both = sum(_content(sample) in seen for sample in questions.samples)
    if both:
        note(f"{both} of the {len(questions)} questions of validation.path are also in the training data")


def _content(sample: Sample) -> Hashable:
    """Question, answer and files; pictures inside a table are told apart by their names."""
    pictures = tuple(str(Path(image.path).resolve()) if image.path else image.id for image in sample.images)
    return sample.question, sample.answer, pictures
