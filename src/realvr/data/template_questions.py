"""Questions for pictures with boxes: from templates, whose answers follow from the boxes, or joined from a file."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from realvr.data import reasons
from realvr.data.labelled import Annotated, Losses, Picture
from realvr.data.readers.base import checked_choices, letter_answer, question_of, text_of
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import LETTERS, Box, Sample
from realvr.data.streams import json_rows
from realvr.data.tables import csv_rows

Template = Literal["exists", "count", "where"]
WITHOUT_PICTURE = "question_without_picture"
WITHOUT_CATEGORY = "question_without_category"
TEMPLATES: tuple[Template, ...] = ("exists", "count", "where")
_CLEAR = 0.8
"""Share of a box that must lie in one quarter of the picture before that quarter is asked for."""
_QUARTERS = ("top left", "top right", "bottom left", "bottom right")
_BETWEEN = "|"


class TemplateQuestions:
    """Questions whose answers follow from the boxes: at most ``per_image`` of each template for a picture.

    The draws for a picture depend on the seed and its name, not on the other pictures or their order.
    """

    def __init__(
        self, categories: Sequence[str], templates: Sequence[Template] = TEMPLATES, seed: int = 0, per_image: int = 1
    ) -> None:
        self.categories, self.templates, self.seed, self.per_image = categories, templates, seed, per_image

    def about(self, picture: Picture) -> Iterator[Sample]:
        """The questions about one picture."""
        for template in self.templates:
            rng = random.Random(f"{self.seed}/{template}/{picture.name}")
            yield from getattr(self, f"_{template}")(picture, rng)

    def _pick(self, found: Sequence[str], rng: random.Random) -> list[str]:
        return rng.sample(sorted(found), min(self.per_image, len(found)))

    def _exists(self, picture: Picture, rng: random.Random) -> Iterator[Sample]:
        """As many categories that are there as categories that are not: a question that is always answered yes would
        teach nothing."""
        there = self._pick(list(picture.boxes), rng)
        absent = self._pick([name for name in self.categories if not picture.has(name)], rng)
        pairs = min(len(there), len(absent))
        for name in (*there[:pairs], *absent[:pairs]):
            answer, boxes = ("A", picture.boxes[name]) if name in there else ("B", [])
            question = f"Does the image show any {_spoken(name)}?"
            yield _sample(picture, "exists", name, question, answer, ["Yes", "No"], boxes)

    def _count(self, picture: Picture, rng: random.Random) -> Iterator[Sample]:
        for name in self._pick([name for name in picture.boxes if name not in picture.unsure], rng):
            number = len(picture.boxes[name])
            near = [other for other in range(max(0, number - 3), number + 4) if other != number]
            options = [number, *rng.sample(near, 3)]
            rng.shuffle(options)
            answer = LETTERS[options.index(number)]
            question = f"How many {_spoken(name)} objects are in the image?"
            yield _sample(picture, "count", name, question, answer, list(map(str, options)), picture.boxes[name])

    def _where(self, picture: Picture, rng: random.Random) -> Iterator[Sample]:
        """Of categories with a single box."""
        quarters = {
            name: quarter
            for name, boxes in picture.boxes.items()
            if len(boxes) == 1 and name not in picture.unsure and (quarter := _quarter(boxes[0])) is not None
        }
        for name in self._pick(list(quarters), rng):
            options = list(_QUARTERS)
            rng.shuffle(options)
            question = f"Which part of the image shows the {_spoken(name)}?"
            answer = LETTERS[options.index(quarters[name])]
            yield _sample(picture, "where", name, question, answer, options, picture.boxes[name])


def _quarter(box: Box) -> str | None:
    """The quarter of the picture that holds nearly all of a box; None where no quarter does."""
    x0, y0, x1, y1 = box.xyxy
    left, top = ((min(high, 0.5) - min(low, 0.5)) / (high - low) for low, high in ((x0, x1), (y0, y1)))
    shares = {
        "top left": left * top,
        "top right": (1 - left) * top,
        "bottom left": left * (1 - top),
        "bottom right": (1 - left) * (1 - top),
    }
    return next((quarter for quarter, share in shares.items() if share >= _CLEAR), None)


def _stem(picture: Picture) -> str:
    return os.path.splitext(picture.name)[0]


def _spoken(category: str) -> str:
    return category.replace("_", " ")


def _sample(
    picture: Picture, template: Template, name: str, question: str, answer: str, choices: list[str], boxes: list[Box]
) -> Sample:
    return Sample.ask(
        f"{_stem(picture)}/{template}/{name}",
        [picture.image],
        question,
        answer,
        choices=choices,
        boxes=boxes,
        task=template,
        category=name,
        tags={"question": "template", "template": template},
    )


# ---------------------------------------------------------------------- from a file


class JoinedQuestions:
    """Questions of a file, each about a picture and, for its evidence, one or more categories in it."""

    def __init__(self, file: Path, pictures: Sequence[Annotated], categories: Sequence[str], losses: Losses) -> None:
        self.file, self.losses = file, losses
        called = Counter(alias for picture in pictures for alias in picture.aliases)
        self.whole = Counter(picture.name for picture in pictures)  # "0.jpg" is that one, not also "sub/0.jpg"
        self.ambiguous = {alias for alias, count in called.items() if count > 1 and self.whole[alias] != 1}
        self.categories = {name.casefold(): name for name in categories}
        self.rows: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.used: set[int] = set()
        for row in _question_rows(file):
            where = f"{file}, row {row.number}"
            if row.error is not None:
                losses.add(row.error.reason, f"{where}: {row.error.detail}")
                continue
            try:
                name = text_of(row.data, "image")
                if not name:
                    raise BadRow(reasons.FIELD_MISSING, "'image' is empty")
                self.rows.setdefault(name, []).append((row.number, row.data))
            except BadRow as error:
                losses.add(error.reason, f"{where}: {error.detail}")

    def about(self, picture: Picture) -> Iterator[Sample]:
        """The questions about one picture, by any of its names that no other picture has."""
        names = {name for name in picture.aliases - self.ambiguous if name == picture.name or not self.whole[name]}
        for number, row in sorted((entry for name in names for entry in self.rows.get(name, ())), key=lambda e: e[0]):
            self.used.add(number)
            try:
                yield self._sample(picture, number, row)
            except BadRow as error:
                self.losses.add(error.reason, f"{self.file}, row {number}: {error.detail}")

    def finish(self) -> None:
        """Count the rows whose picture was not met."""
        for name, rows in self.rows.items():
            why = "several pictures are called" if name in self.ambiguous else "no usable picture is called"
            for number, _ in rows:
                if number not in self.used:
                    self.losses.add(WITHOUT_PICTURE, f"{self.file}, row {number}: {why} {name!r:.80}")

    def _sample(self, picture: Picture, number: int, row: dict[str, Any]) -> Sample:
        choices = checked_choices(given) if (given := _listed(row.get("choices"))) else []
        answer = text_of(row, "answer")
        if not answer:
            raise BadRow(reasons.ANSWER_EMPTY, "'answer' is empty")
        wanted = [self._category(name) for name in _listed(row.get("category"))]
        name = text_of(row, "id") if row.get("id") not in (None, "") else f"{_stem(picture)}/{number}"
        return Sample.ask(
            name,
            [picture.image],
            question_of(row, "question"),
            letter_answer(answer, choices) if choices else answer,
            choices=choices,
            boxes=[box for category in dict.fromkeys(wanted) for box in picture.boxes.get(category, ())],
            category=wanted[0] if len(wanted) == 1 else "",
            tags={"question": "file"},
        )

    def _category(self, name: object) -> str:
        found = self.categories.get(str(name).strip().casefold())
        if found is None:
            raise BadRow(WITHOUT_CATEGORY, f"no category {name!r:.60} in the annotations")
        return found


def _listed(value: object) -> list[Any]:
    """A list, or what a table holds in its place: values with ``|`` between them."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(_BETWEEN)]
    if not isinstance(value, list):
        raise BadRow(reasons.FIELD_TYPE, f"{value!r:.60} is no list")
    return value


def _question_rows(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == ".csv":
        return csv_rows(file, ("image", "question", "answer"))
    if file.suffix.lower() in (".json", ".jsonl"):
        return json_rows(file)
    raise FileError(reasons.FORMAT_UNKNOWN, f"{file}: questions are read from .jsonl, .json or .csv")
