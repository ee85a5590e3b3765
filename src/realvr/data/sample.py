"""The one sample type that every reader yields and every writer takes, with images that are decoded on demand."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from realvr.imaging import files as image_file
from realvr.imaging.files import ImageError
from realvr.imaging.processing import picture_hash

BASE64_INVALID = "base64_invalid"

Role = Literal["system", "user", "assistant"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IMAGE_TAG = re.compile(r"<image>")


def decode_base64(text: str | bytes, name: str) -> bytes:
    """Strict base64; a ``data:image/...;base64,`` prefix and line breaks are accepted."""
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    if raw[:5] == b"data:":
        raw = raw[raw.find(b",") + 1 :]
    try:
        return base64.b64decode(raw.replace(b"\n", b"").replace(b"\r", b"").strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(BASE64_INVALID, f"{name}: invalid base64 ({error})") from None


def option(answer: str, choices: Sequence[str]) -> str:
    """The option that a letter stands for, or '' where the answer is no letter of the options."""
    return dict(zip(LETTERS, choices, strict=False)).get(answer, "")


@dataclass(frozen=True)
class FileSlice:
    """Base64 text that stays in its file until it is wanted: rows of tens of MB must not accumulate in memory."""

    path: Path
    offset: int
    length: int

    def read(self, name: str) -> bytes:
        """The decoded bytes."""
        try:
            with self.path.open("rb") as source:
                source.seek(self.offset)
                return decode_base64(source.read(self.length), name)
        except OSError as error:
            raise ImageError(image_file.IMAGE_MISSING, f"{name}: {self.path} cannot be read again ({error})") from None


@dataclass(frozen=True)
class ImageRef:
    """An image that is not decoded yet. Exactly one of ``path``, ``data``, ``slice`` and ``broken`` is set. Picklable.

    ``id`` is stable: the path as the file names it, or an inline id such as ``hr_bench_4k.tsv#12/image``.
    """

    id: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    slice: FileSlice | None = None
    broken: tuple[str, str] | None = None
    """(reason, message) of the `ImageError` that opening it raises: the row does not hold the image it should."""
    _picture: str | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_path(cls, path: str | Path, id: str | None = None) -> ImageRef:
        """Reference to a file; its id is the path unless one is given."""
        return cls(id=str(path) if id is None else id, path=Path(path))

    @classmethod
    def from_bytes(cls, id: str, data: bytes) -> ImageRef:
        """Reference to an encoded image (PNG, JPEG, ...) held in memory."""
        return cls(id=id, data=data)

    @classmethod
    def from_image(cls, id: str, image: Image.Image, format: str = "PNG", **save: Any) -> ImageRef:
        """Encode a Pillow image. PNG by default: the pixels come back unchanged."""
        buffer = io.BytesIO()
        image.save(buffer, format=format, **save)
        return cls(id=id, data=buffer.getvalue())

    def read(self) -> bytes:
        """The encoded bytes, read or decoded from base64 on every call."""
        if self.data is not None:
            return self.data
        if self.slice is not None:
            return self.slice.read(self.id)
        if self.broken is not None:
            raise ImageError(*self.broken)
        if self.path is None:
            raise ImageError(image_file.IMAGE_MISSING, f"{self.id}: the reference names no image")
        return image_file.read_file(self.path, str(self.path))

    def open(self) -> Image.Image:
        """The image, upright and RGB, decoded now; raises `ImageError` (a `UserError` with a ``reason``)."""
        return image_file.decode(self.read(), self.id)

    def verify(self) -> tuple[int, int]:
        """Decode everything once, keep nothing, return (width, height)."""
        return image_file.verify(self.read(), self.id)

    @cached_property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image, from the header."""
        if self.path is not None:
            return image_file.file_size(self.path, str(self.path))
        return image_file.image_size(self.read(), self.id)

    def picture(self, opened: Image.Image | None = None) -> str:
        """`picture_hash`, computed once; ``opened`` is what `open` has returned, where the caller has it."""
        if self._picture is None:
            object.__setattr__(self, "_picture", picture_hash(self.open() if opened is None else opened))
        assert self._picture is not None
        return self._picture

    def content_hash(self) -> str:
        """SHA-256 of the encoded bytes: equal files have equal hashes, whatever they are called."""
        return hashlib.sha256(self.read()).hexdigest()


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
    """Evidence; empty means that nothing is known (the whole image counts as evidence)."""
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
