"""Questions about one picture that ask for different places, each in two wordings where the data has them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realvr.data.boxes import unshown_box, with_area
from realvr.data.sample import Box, Sample
from realvr.imaging.files import ImageError


@dataclass(frozen=True)
class Asked:
    """One sample's place: ``question`` (1, 2) of its picture, in ``wording`` 1 (the question) or 2 (a paraphrase)."""

    picture: str
    question: int
    wording: int
    boxes: tuple[tuple[Box, ...], tuple[Box, ...]]
    """Evidence of the first and of the second question."""


def groups(samples: Sequence[Sample]) -> dict[str, Asked]:
    """Samples by id that belong to a picture with two questions.

    Samples belong together if they show the same pictures (`realvr.imaging.processing.picture_hash`) in the same order.
    Two of them ask the same question if their boxes and their answer are the same; other words then make a paraphrase,
    and the same words are the same sample again, which is left out. Of a picture, the first two questions whose boxes
    differ count, each with its first two wordings; one with a single wording has no paraphrase. ``meta`` and tags are
    not looked at.
    """
    pictures: dict[str, dict[tuple[tuple[Box, ...], str], list[Sample]]] = {}
    for sample in samples:
        if not with_area(sample.boxes) or unshown_box(sample) is not None:
            continue
        try:
            picture = "-".join(sample.images[place].picture() for place in sample.shown)
        except ImageError:
            continue
        same = pictures.setdefault(picture, {}).setdefault((tuple(sample.boxes), sample.answer_text), [])
        if sample.question not in [other.question for other in same]:
            same.append(sample)
    found = {}
    for picture, questions in pictures.items():
        by_boxes: dict[tuple[Box, ...], list[Sample]] = {}
        for (boxes, _), asked in questions.items():
            by_boxes.setdefault(boxes, asked)
        if len(by_boxes) < 2:
            continue
        first, second, *_ = by_boxes
        for question, asked in enumerate((by_boxes[first], by_boxes[second]), 1):
            for wording, sample in enumerate(asked[:2], 1):
                found[sample.id] = Asked(picture[:16], question, wording, (first, second))
    return found
