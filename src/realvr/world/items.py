"""One generated example: its pictures as descriptions, drawn only when wanted, and its conversion to a `Sample`."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.world.draw import Pixels, render
from realvr.world.mark import save_options
from realvr.world.questions import LETTERS, Question
from realvr.world.scene import PixelBox, Scene

JPEG_QUALITY = 92


@dataclass(frozen=True)
class View:
    """A picture to be: a scene, or a part of one. ``name`` is the file name it gets."""

    scene: Scene
    name: str
    crop: PixelBox | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        if self.crop is None:
            return self.scene.size
        return self.crop[2] - self.crop[0], self.crop[3] - self.crop[1]

    def pixels(self) -> Pixels:
        """(height, width, 3) uint8."""
        picture = render(self.scene)
        if self.crop is None:
            return picture
        x0, y0, x1, y1 = self.crop
        return np.ascontiguousarray(picture[y0:y1, x0:x1])

    def encode(self) -> bytes:
        """The picture as a file, in the format its name says."""
        buffer = io.BytesIO()
        picture = Image.fromarray(self.pixels())
        if self.name.endswith(".jpg"):
            picture.save(buffer, "JPEG", quality=JPEG_QUALITY, **save_options("JPEG"))
        else:
            picture.save(buffer, "PNG", compress_level=3, **save_options("PNG"))
        return buffer.getvalue()


@dataclass(frozen=True)
class Item:
    """A question about one or more views. ``answer`` is in words; ``boxes`` are (view index, pixel box)."""

    id: str
    views: tuple[View, ...]
    text: str
    answer: str
    choices: tuple[str, ...] = ()
    boxes: tuple[tuple[int, PixelBox], ...] = ()
    kind: str = ""
    task: str = ""
    category: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    pair: str | None = None
    cycle: str | None = None
    earlier: tuple[tuple[str, str], ...] = ()
    """Questions and replies of the conversation before this one."""
    earlier_boxes: tuple[tuple[tuple[int, PixelBox], ...], ...] = ()
    """Evidence of each earlier reply, as ``boxes``; empty where none is given."""
    fresh: bool = False
    """After an earlier turn: the last view comes with the last question, the others came with the first."""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def letter(self) -> str:
        """Letter of the right option, or '' for a free answer."""
        return LETTERS[self.choices.index(self.answer)] if self.choices else ""

    def fractions(self) -> list[Box]:
        """Evidence as fractions of its picture, clipped to it."""
        return self._fractions(self.boxes)

    def _fractions(self, boxes: tuple[tuple[int, PixelBox], ...]) -> list[Box]:
        found = []
        for index, (x0, y0, x1, y1) in boxes:
            width, height = self.views[index].size
            corners = (max(x0, 0) / width, max(y0, 0) / height, min(x1, width) / width, min(y1, height) / height)
            found.append(Box(index, corners))
        return found

    def sample(self, images: list[ImageRef] | None = None) -> Sample:
        """As the type every reader yields; draws the pictures unless their references are given."""
        if images is None:
            images = [ImageRef.from_bytes(view.name, view.encode()) for view in self.views]
        every = tuple(range(len(images)))
        first, last = (every[:-1], every[-1:]) if self.fresh else (every, ())
        turns = []
        for k, (question, reply) in enumerate(self.earlier):
            turns += [Message("user", question, first if k == 0 else ()), Message("assistant", reply)]
        turns.append(Message("user", self.text, last if self.earlier else every))
        return Sample(
            self.id,
            images,
            turns,
            self.letter or self.answer,
            list(self.choices),
            self.fractions(),
            task=self.task,
            category=self.category,
            tags=dict(self.tags),
            pair=self.pair,
            cycle=self.cycle,
            meta=dict(self.meta),
            earlier_boxes=[self._fractions(boxes) for boxes in self.earlier_boxes],
        )


def single(id: str, scene: Scene, question: Question, name: str, **fields: Any) -> Item:
    """An item with one picture."""
    boxes = tuple((0, box) for box in question.boxes(scene))
    tags = {"kind": question.kind, "withheld": "yes" if question.query.withheld() else "no"} | fields.pop("tags", {})
    return Item(
        id,
        (View(scene, name),),
        question.text,
        question.answer,
        question.choices,
        boxes,
        question.kind,
        tags=tags,
        **fields,
    )
