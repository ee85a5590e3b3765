"""MMVP: ``Questions.csv`` beside a folder of numbered images. Rows 2i-1 and 2i are a pair with the same question."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from realvr.data import reasons
from realvr.data.readers.base import (
    Context,
    Format,
    ReadOptions,
    Row,
    checked_choices,
    letter_answer,
    question_of,
    text_of,
)
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import LETTERS, ImageRef, Sample
from realvr.data.tables import csv_rows

QUESTIONS = "Questions.csv"
REQUIRED = ("Index", "Question", "Options", "Correct Answer")
FOLDERS = ("MMVP Images", "MMVP_Images")
ALIASES = {"lndex": "Index"}
"""The header of a file in circulation has a small L."""
SUFFIXES = (".jpg", ".png", ".jpeg")
SWAPPED = frozenset({99, 100, 279, 280})
"""Rows whose answers are swapped in the original file (a later upload fixed them)."""
_OPTION = re.compile(r"\(([a-z])\)\s*")


def parse_options(text: str) -> list[str]:
    """The options of "(a) Open (b) Closed". Only letters in order start one."""
    starts: list[tuple[int, int]] = []
    for match in _OPTION.finditer(text):
        if match[1].upper() == LETTERS[len(starts) : len(starts) + 1]:
            starts.append(match.span())
    if not starts:
        raise BadRow(reasons.CHOICES_MALFORMED, f"options {text!r:.60} do not read '(a) … (b) …'")
    ends = [begin for begin, _ in starts[1:]] + [len(text)]
    return checked_choices([text[after:end] for (_, after), end in zip(starts, ends, strict=True)])


def _image(index: int, ctx: Context) -> ImageRef:
    """The numbered image in whichever spelling of the folder exists. PNG is accepted beside the original JPEG."""
    folder = ctx.state.get("folder")
    if folder is None:
        folder = next((name for name in FOLDERS if (ctx.images / name).is_dir()), FOLDERS[0])
        ctx.state["folder"] = folder
    suffix = next((end for end in SUFFIXES if (ctx.images / folder / f"{index}{end}").exists()), ".jpg")
    return ctx.image(f"{folder}/{index}{suffix}")


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample with its pair."""
    number = text_of(row, "Index")
    if not (number.isdecimal() and len(number) < 10 and int(number) > 0):
        raise BadRow(reasons.FIELD_TYPE, f"Index is {number!r:.40}, a number from 1 is expected")
    index = int(number)
    choices = parse_options(text_of(row, "Options"))
    answer = letter_answer(text_of(row, "Correct Answer"), choices)
    corrected = ctx.options.mmvp_corrected or ctx.options.variant == "corrected"
    if corrected and index in SWAPPED and answer in "AB" and len(choices) == 2:
        answer = "B" if answer == "A" else "A"
    return Sample.ask(
        number,
        [_image(index, ctx)],
        question_of(row, "Question"),
        answer,
        choices=choices,
        task="mmvp",
        pair=str((index + 1) // 2),
        source=ctx.source,
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of ``Questions.csv``, given itself or by its folder."""
    file = path / QUESTIONS if path.is_dir() else path
    for row in csv_rows(file, REQUIRED, ALIASES):
        yield replace(row, file=file, images=Path(options.images or file.parent))


def files(path: Path, options: ReadOptions) -> list[Path]:
    """The folder itself, which must hold ``Questions.csv``."""
    if not (path / QUESTIONS).is_file():
        raise FileError(reasons.FILE_MISSING, f"{path}: no {QUESTIONS} in this folder")
    return [path]


FORMAT = Format("mmvp", "MMVP folder", rows, parse, folders=True, files=files)
