"""BLINK: a tree ``<SubTask>/val-00000-of-00001.parquet`` with up to four images per question."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from realvr.data import reasons
from realvr.data.parquet import files_in, parquet_rows
from realvr.data.readers.base import (
    Context,
    Format,
    ReadOptions,
    Row,
    checked_choices,
    id_of,
    label_of,
    letter_answer,
    question_of,
    require,
    text_of,
)
from realvr.data.readers.cells import cell_image, no_image
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Sample

IMAGES = ("image_1", "image_2", "image_3", "image_4")
REQUIRED = ("idx", "question", "choices", "answer", "image_1")
COLUMNS = ("idx", "question", "prompt", "choices", "answer", "sub_task", *IMAGES)
_SPLIT_FILE = re.compile(r"(\w+)-\d+-of-\d+")


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample. The prompt that already carries the options is kept in ``meta``."""
    name = id_of(row, "idx")
    there = [column for column in IMAGES if row.get(column) is not None]
    images = [
        ctx.kept(f"{name}/{column}", partial(cell_image, row[column], f"{name}/{column}")) for column in there
    ] or [ctx.kept(f"{name}/{IMAGES[0]}", partial(no_image, "image_1 to image_4 are all empty"))]
    options = require(row, "choices")
    if not isinstance(options, list):
        raise BadRow(reasons.FIELD_TYPE, f"'choices' is {type(options).__name__}, a list is expected")
    choices = checked_choices(options)
    answer = text_of(row, "answer")
    if answer.lower() == "hidden":
        raise BadRow(reasons.ANSWER_HIDDEN, "the answer is withheld")
    return Sample.ask(
        name,
        images,
        question_of(row, "question"),
        letter_answer(answer, choices),
        choices=choices,
        task=label_of(row, "sub_task") or ctx.file.parent.name,
        source=ctx.source,
        meta={"prompt": prompt} if (prompt := label_of(row, "prompt")) else {},
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of one parquet file."""
    return parquet_rows(path, COLUMNS)


def of_split(path: Path, options: ReadOptions) -> list[Path]:
    """The files of one split of a tree; all of them where none is named after a split."""
    files = files_in(path)
    marked = {file: match[1] for file in files if (match := _SPLIT_FILE.match(file.name))}
    if not marked:
        return files
    if options.split not in marked.values():
        there = ", ".join(sorted(set(marked.values())))
        raise FileError(reasons.FILE_MISSING, f"{path}: no files of split {options.split!r}; there are {there}")
    return [file for file in files if marked.get(file) == options.split]


FORMAT = Format("blink", "BLINK parquet tree", rows, parse, folders=True, tables=(REQUIRED,), files=of_split)
