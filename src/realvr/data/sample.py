"""The one sample type that every reader yields and every writer takes, with images that are decoded on demand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from realvr.answers.text import LETTERS
from realvr.imaging.reference import ImageRef as ImageRef

Role = Literal["system", "user", "assistant"]
_IMAGE_TAG = re.compile(r"<image>")


def option(answer: str, choices: Sequence[str]) -> str:
    """The option that a letter stands for, or '' where the answer is no letter of the options."""
    return dict(zip(LETTERS, choices, strict=False)).get(answer, "")


@dataclass(frozen=True)
class Box:
    """Evidence in one image: corners as fractions of the upright image, x0 < x1, y0 < y1, all within [0, 1].

    ``image`` indexes `Sample.images`; visual tokens stand in the order of the prompt. `realvr.data.boxes.prompt_boxes`
    is the way from one to the other.
    """

    image: int
    xyxy: tuple[float, float, float, float]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. ``images`` are indices into `Sample.images`; they stand before ``text``."""

    role: Role
    text: str
    images: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a sample came from. ``row`` is the 1-based data row (header lines not counted), as a person would count."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Sample:
    """One question with its images, its answer and, where known, its evidence.

    ``turns`` is the conversation up to and including the question; the reply to it is ``answer`` (canonical: the letter
    for multiple choice) or, where the data holds more text than the answer, ``response``.
    """

    id: str
    images: list[ImageRef]
    turns: list[Message]
    answer: str
    choices: list[str] = field(default_factory=list)
    """Option texts without letters, in order; empty for a free answer."""
    boxes: list[Box] = field(default_factory=list)
    """Evidence; empty means that nothing is known (the whole image counts as evidence). May be a trail, in which each
    box follows from the one before: readers keep the order."""
    response: str = ""
    """The whole reply, only where it is more than the answer."""
    task: str = ""
    category: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    pair: str | None = None
    """Samples of one pair share it (MMVP, counterfactual pairs)."""
    cycle: str | None = None
    """Which rotation of the options this row is (HR-Bench)."""
    source: Source | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    earlier_boxes: list[list[Box]] = field(default_factory=list)
    """Evidence of the earlier replies, a list for each assistant turn; empty where none is known."""
    ordered: bool = True
    """Whether the order of the boxes means something; where it does not, Stage 1 takes their tokens in reading order
    whatever its ``evidence_order``."""

    @classmethod
    def ask(cls, id: str, images: list[ImageRef], question: str, answer: str, **fields: Any) -> Sample:
        """A single question about all of ``images``."""
        return cls(id, images, [Message("user", question, tuple(range(len(images))))], answer, **fields)

    @property
    def question(self) -> str:
        """Text of the last user turn, without options."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def shown(self) -> tuple[int, ...]:
        """Indices into ``images`` in the order of the prompt. Turns may show an image twice, or leave one out."""
        return tuple(index for turn in self.turns for index in turn.images)

    @property
    def answer_text(self) -> str:
        """The answer in words: the option's text for multiple choice, else the answer itself."""
        return option(self.answer, self.choices) or self.answer

    def content(self, box_digits: int = 4) -> dict[str, Any]:
        """What the sample says, with images by content hash: equal for samples that came through different layouts.

        Names, sources and ``meta`` are left out; boxes are rounded, because pixel layouts round them.
        """
        return {
            "images": [image.content_hash() for image in self.images],
            "turns": [(turn.role, turn.text, turn.images) for turn in self.turns],
            "choices": self.choices,
            "answer": self.answer,
            "boxes": [(box.image, tuple(round(value, box_digits) for value in box.xyxy)) for box in self.boxes],
        }


def strip_image_tags(text: str, start: int = 1) -> tuple[str, int]:
    """Remove ``<image>`` placeholders; return (text, how many there were).

    Placeholders at either end vanish, because images stand before the text anyway. One in the middle of a sentence
    becomes ``image N``, counted from ``start``, so that "compare <image> with <image>" keeps its meaning.
    """
    count = len(_IMAGE_TAG.findall(text))
    if not count:
        return text.strip(), 0
    head = re.match(r"(?:\s*<image>)*\s*", text)
    rest = text[head.end() :] if head else text
    skipped = count - len(_IMAGE_TAG.findall(rest))
    end = len(rest.rstrip())
    while rest.endswith("<image>", 0, end):  # not a pattern: those take quadratic time on long white space
        end -= len("<image>")
        while end and rest[end - 1].isspace():
            end -= 1
    rest = rest[:end]
    number = start + skipped - 1

    def name(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"image {number}"

    return _IMAGE_TAG.sub(name, rest).strip(), count
