"""What a reader is made of, and the checks that every format shares."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from realvr.answers.options import canonical
from realvr.data import reasons
from realvr.data.reasons import BadRow
from realvr.data.sample import LETTERS, Box, ImageRef, Source, strip_image_tags
from realvr.imaging.files import ImageError
from realvr.runs.files import Json

BoxUnit = Literal["fractions", "pixels", "auto"]
PIXELS_ABOVE = 2.0
"""A larger value is no fraction of an image, even where a box overhangs it."""


@dataclass(frozen=True)
class ReadOptions:
    """How files are read. Every field but broken_images and variant is a flag of ``realvr data check``."""

    images: str | Path | None = None
    """Folder that image paths are relative to; None means the folder of the data file."""
    policy: Literal["skip", "strict"] = "skip"
    """``skip`` drops and counts bad rows; ``strict`` stops at the first, naming file and row."""
    check_images: Literal["none", "exists", "decode"] = "exists"
    """How far images are checked while reading."""
    duplicates: Literal["drop", "rename"] = "drop"
    """What happens to a row whose id was seen before (LLaVA files reuse ids on purpose: ``rename`` keeps them)."""
    split: str = "val"
    """Which split is read from a BLINK tree."""
    mmvp_corrected: bool = False
    """Correct the swapped answers at Index 99/100 and 279/280 of the original MMVP file."""
    boxes: BoxUnit | None = None
    """What the numbers of boxes are. None: the format's own rule (fractions for our JSON lines)."""
    broken_images: Literal["drop", "keep"] = "drop"
    """What happens to a row that does not hold the image it should (an empty cell, invalid base64, a path that leaves
    the folder): ``keep`` gives it an image that cannot be opened, so that an evaluation counts the question."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """For rows in our own layout: name of a field -> column of the file that holds it, where they differ."""
    variant: str = ""
    """Another way to read the same files, where a benchmark offers one (``realvr eval --variant``)."""


@dataclass(frozen=True)
class Row:
    """One raw row, or what went wrong where one was expected."""

    number: int
    """1-based, header not counted."""
    data: Any = None
    error: BadRow | None = None
    progress: float = 0.0
    """Fraction of the file that has been read."""
    count: int = 1
    """How many rows an error stands for, where the rest of a file is lost."""
    file: Path | None = None
    """Set where one file lists others: the file this row is really in."""
    images: Path | None = None
    """Set where one file lists others: the image folder given there."""
    prefix: str = ""
    """Set where one file lists others: put before ids."""


@dataclass
class Context:
    """What turning a row into a sample may depend on."""

    file: Path
    images: Path
    row: int
    options: ReadOptions
    state: dict[str, Any]
    """Lives as long as the file, for formats whose rows refer to earlier rows."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Repairs made on this row, as (reason, detail)."""
    boxes: Literal["fractions", "pixels"] | None = None
    """What the boxes of this row were read as, if it has any."""

    def note(self, reason: str, detail: str) -> None:
        """Record that the row was repaired, not dropped."""
        self.notes.append((reason, detail))

    @property
    def source(self) -> Source:
        """Where the row came from, for messages and records."""
        return Source(str(self.file), self.row)

    def kept(self, name: str, make: Callable[[], ImageRef]) -> ImageRef:
        """``make()``; where that fails and broken images are kept, an image ``name`` that cannot be opened."""
        try:
            return make()
        except (BadRow, ImageError) as error:
            if self.options.broken_images == "drop":
                raise
            detail = error.detail if isinstance(error, BadRow) else str(error)
            return ImageRef(name, broken=(error.reason, detail))

    def image(self, name: object) -> ImageRef:
        """Reference to an image file named by the data, which must stay inside the image folder."""
        return self.kept(str(name), lambda: self._image(name))

    def _image(self, name: object) -> ImageRef:
        if not isinstance(name, str) or not name.strip():
            raise BadRow(reasons.FIELD_TYPE, f"image path is {name!r}")
        root = self.state.get("image_root")
        if root is None or root[0] != self.images:
            root = self.state["image_root"] = (self.images, os.path.abspath(self.images))
        # Lexical on purpose: links that the user placed inside the image folder are theirs to place.
        wanted = os.path.normpath(os.path.join(root[1], name))
        if "\0" in name or not wanted.startswith(root[1].rstrip(os.sep) + os.sep):
            way = (
                "--images / allows absolute paths"
                if os.path.isabs(name)
                else "write it without .., relative to a folder above all images, and name that folder with --images"
            )
            raise BadRow(reasons.IMAGE_PATH_ESCAPES, f"{name!r} is not inside {self.images}; {way}")
        return ImageRef(id=name, path=Path(wanted))

    def read_boxes(
        self, boxes: Sequence[tuple[object, int]], images: Sequence[ImageRef], own: BoxUnit, above: float = PIXELS_ABOVE
    ) -> list[Box]:
        """(four numbers, image index) each -> boxes in fractions, as the options say or by the format's ``own`` rule.

        ``auto`` takes all boxes of a row for pixels where any value is ``above`` what a fraction may be.
        """
        if not boxes:
            return []
        unit = self.options.boxes or own
        values = [v for numbers, _ in boxes if isinstance(numbers, list | tuple) for v in numbers]
        large = any(isinstance(v, int | float) and not isinstance(v, bool) and _as_float(v) > above for v in values)
        self.boxes = "pixels" if unit == "pixels" or (unit == "auto" and large) else "fractions"
        found: list[Box] = []
        for numbers, image in boxes:
            if self.boxes == "pixels":
                box = normal_box(numbers, image, self, self._size(images[image]))
            else:
                box = fraction_box(numbers, image, self)
            if box is not None:
                found.append(box)
        return found

    def _size(self, image: ImageRef) -> tuple[int, int]:
        """(width, height) of the upright image, from the header, which is read once for rows in a row that share it."""
        last = self.state.get("image_size")
        if last is None or last[0] != image:
            last = self.state["image_size"] = (image, image.size)
        size: tuple[int, int] = last[1]
        return size


@dataclass(frozen=True)
class Format:
    """One file format: where its rows come from and how a row becomes a sample."""

    name: str
    title: str
    rows: Callable[[Path, ReadOptions], Iterator[Row]]
    parse: Callable[[Any, Context], Any]
    folders: bool = False
    """Whether a folder is a valid input."""
    pixels_only: bool = False
    """Whether boxes are in pixels by the format's definition."""
    tables: tuple[tuple[str, ...], ...] = ()
    """Columns that its tables (TSV, parquet) must have, in each of its layouts."""
    files: Callable[[Path, ReadOptions], list[Path]] | None = None
    """The files that a folder stands for, in order; None: every parquet file in it. Raises `FileError`."""


def require(row: dict[str, Any], key: str) -> Json:
    """Value of a field that must be there and not null."""
    value = row.get(key)
    if value is None:
        raise BadRow(reasons.FIELD_MISSING, f"no {key!r} (found: {', '.join(map(str, row)) or 'nothing'})")
    return value


def text_of(row: dict[str, Any], key: str) -> str:
    """A required field as text; numbers are accepted because tables lose their quotes."""
    value = require(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(reasons.FIELD_TYPE, f"{key!r} is {type(value).__name__}, text is expected")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(reasons.FIELD_MISSING, f"{key!r} is empty")
    return str(value).strip()


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: white space, zero-width marks, control characters."""
    return not any(character.isprintable() and not character.isspace() for character in text)


def asked_text(text: str, what: str) -> str:
    """``text`` as a question, which must not be blank; ``what`` names it."""
    if is_blank(text):
        raise BadRow(reasons.QUESTION_EMPTY, f"{what} is empty")
    return text


def question_of(row: dict[str, Any], key: str) -> str:
    """The question; must not be blank."""
    return asked_text(text_of(row, key), repr(key))


def id_text(value: object, key: str) -> str:
    """An id as text: text or a whole number, which some tables hold as a float. Must not be blank."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(reasons.ID_INVALID, f"{key!r} is {value!r:.40}: text or a whole number is expected")
    if is_blank(str(value)):
        raise BadRow(reasons.ID_INVALID, f"{key!r} is empty")
    return str(value).strip()


def id_of(row: dict[str, Any], key: str) -> str:
    """The id in a required field."""
    return id_text(require(row, key), key)


def label_of(row: dict[str, Any], key: str) -> str:
    """An optional name such as a task or a category; '' where there is none."""
    return text_of(row, key) if row.get(key) not in (None, "") else ""


def letter_answer(answer: str, choices: Sequence[str]) -> str:
    """Canonical letter from "D", "d", "(D)", "D.", the text of exactly one option, or both."""
    if is_blank(answer):
        raise BadRow(reasons.ANSWER_EMPTY, "the answer is empty")
    letter = canonical(answer, choices)
    if letter is not None:
        return letter
    raise BadRow(reasons.ANSWER_NOT_IN_CHOICES, f"answer {answer[:40]!r}, {len(choices)} options")


def checked_choices(choices: Sequence[object]) -> list[str]:
    """Options as text; at least two, none blank, no two the same."""
    for choice in choices:
        if isinstance(choice, bool) or not isinstance(choice, str | int | float):
            raise BadRow(reasons.CHOICE_TYPE, f"an option is {choice!r:.40}: text or a number is expected")
    texts = ["" if isinstance(choice, float) and math.isnan(choice) else str(choice).strip() for choice in choices]
    texts = ["" if is_blank(text) else text for text in texts]
    if len(texts) < 2 or len(texts) > len(LETTERS) or not all(texts):
        raise BadRow(
            reasons.CHOICES_MALFORMED, f"{len(texts)} options, {sum(not text for text in texts)} of them empty"
        )
    return different(texts)


def different(choices: list[str]) -> list[str]:
    """``choices``, no two of which may be the same."""
    equal = [LETTERS[index] for index, choice in enumerate(choices) if choices.count(choice) > 1]
    if equal:
        text = choices[LETTERS.index(equal[0])]
        raise BadRow(reasons.CHOICES_EQUAL, f"options {', '.join(equal)} are the same: {text!r:.40}")
    return choices


def parse_boxes(text: str) -> list[list[float]]:
    """Every ``[a, b, c, d]`` in a text."""
    number = r"\s*-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*"
    found = re.findall(rf"\[({number},{number},{number},{number})\]", text)
    return [[float(value) for value in group.split(",")] for group in found]


def _as_float(value: float) -> float:
    """As a float; JSON also holds whole numbers beyond the range of one, which become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def normal_box(values: object, image: int, ctx: Context, size: tuple[int, int] | None = None) -> Box | None:
    """Four numbers -> `Box` in fractions, clipped; None where no area is left (counted as ``box_degenerate``).

    ``size`` (width, height) converts from pixels. Inverted corners are swapped, overhang is clipped, both are counted.
    """
    if not isinstance(values, list | tuple) or len(values) != 4:
        raise BadRow(reasons.BOX_MALFORMED, f"box {values!r:.60} is not four numbers")
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise BadRow(reasons.BOX_MALFORMED, f"box {values!r:.60} is not four numbers")
    x0, y0, x1, y1 = (_as_float(value) for value in values)
    if not all(math.isfinite(value) for value in (x0, y0, x1, y1)):
        raise BadRow(reasons.BOX_MALFORMED, f"box {values!r:.60} is not finite")
    if x0 > x1 or y0 > y1:
        ctx.note(reasons.BOX_INVERTED, f"box {values!r:.60}")
        x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
    if size is not None:
        x0, y0, x1, y1 = x0 / size[0], y0 / size[1], x1 / size[0], y1 / size[1]
    clipped = tuple(min(1.0, max(0.0, value)) for value in (x0, y0, x1, y1))
    if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
        ctx.note(reasons.BOX_DEGENERATE, f"box {values!r:.60}")
        return None
    if clipped != (x0, y0, x1, y1):
        ctx.note(reasons.BOX_OUTSIDE, f"box {values!r:.60}")
    return Box(image, (clipped[0], clipped[1], clipped[2], clipped[3]))


def fraction_box(values: object, image: int, ctx: Context) -> Box | None:
    """As `normal_box` for a format whose boxes are fractions: pixels are refused, because guessing hides mistakes."""
    values_or_none = values if isinstance(values, list | tuple) else ()
    numbers = [_as_float(value) for value in values_or_none if isinstance(value, int | float)]
    if any(abs(value) > PIXELS_ABOVE for value in numbers if math.isfinite(value)):
        detail = f"box {values!r:.60}: fractions of the image are expected; --boxes pixels reads pixels"
        raise BadRow(reasons.BOX_IN_PIXELS, detail)
    return normal_box(values, image, ctx)


_OPTION_LINE = re.compile(r"\(?([A-Z])[).:]\s*(\S.*)")
_OPTIONS_HEAD = re.compile(r"\s*(?:options|choices)\s*:?\s*", re.IGNORECASE)


def split_options(text: str, answer: str) -> tuple[str, list[str]]:
    """Take a closing block of lines "(A) ...", "(B) ..." off a question, when ``answer`` is one of its letters.

    Training files keep options inside the question. Without this the letter is the only thing that can be compared.
    Options of which two are the same are a `BadRow`.
    """
    lines = text.rstrip().split("\n")
    options: list[str] = []
    letters = ""
    while lines and (match := _OPTION_LINE.fullmatch(lines[-1].strip())):
        letters = match[1] + letters
        options.insert(0, match[2])
        lines.pop()
        if match[1] == "A":
            break
    if len(options) < 2 or letters != LETTERS[: len(options)] or answer not in letters or len(answer) != 1:
        return text.strip(), []
    if lines and _OPTIONS_HEAD.fullmatch(lines[-1]):
        lines.pop()
    question = "\n".join(lines).strip()
    return (question, different(options)) if question else (text.strip(), [])


def join_options(question: str, choices: Sequence[str]) -> str:
    """The inverse of `split_options`: the question followed by one "(A) ..." line per option."""
    return "\n".join([question, *(f"({LETTERS[index]}) {choice}" for index, choice in enumerate(choices))])


_LETTERED = re.compile(r"\s*(?:\(([A-Za-z])\)|([A-Z])[.:)])\s*")


def without_letters(options: Sequence[object]) -> list[object]:
    """["(A) red", "B. blue"] -> ["red", "blue"]. Only its own letter is taken off an option ("U.S. flag" stays);
    options that carry each other's letters are a `BadRow`."""
    marks = [_LETTERED.match(option) if isinstance(option, str) else None for option in options]
    letters = [(mark[1] or mark[2]).upper() for mark in marks if mark]
    own = [LETTERS[index : index + 1] for index in range(len(options))]
    if len(letters) == len(own) > 1 and letters != own and sorted(letters) == own:
        raise BadRow(reasons.CHOICES_MALFORMED, f"the options are lettered {', '.join(letters)}")
    return [
        option[mark.end() :].strip()
        if isinstance(option, str) and mark and (mark[1] or mark[2]).upper() == letter
        else option
        for option, mark, letter in zip(options, marks, own, strict=True)
    ]


def untagged(text: str, images: int, ctx: Context) -> str:
    """Question without ``<image>`` marks, noting a count that differs from the number of images."""
    plain, marks = strip_image_tags(text)
    if marks and marks != images:
        ctx.note(reasons.IMAGE_COUNT_MISMATCH, f"{marks} <image> marks, {images} images")
    return plain
