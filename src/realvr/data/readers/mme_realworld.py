"""MME-RealWorld and its Lite set: JSON rows with image paths, or table rows with base64 images.

Five options; E means that the feature does not exist.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from realvr.data import reasons
from realvr.data.parquet import parquet_rows
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
    without_letters,
)
from realvr.data.readers.cells import no_image, table_image
from realvr.data.reasons import BadRow
from realvr.data.sample import Sample
from realvr.data.streams import json_rows
from realvr.data.tables import table_header, table_rows

OPTIONS = ("A", "B", "C", "D", "E")
LISTED = "multi-choice options"
"""The column that holds all options, in tables without a column for each."""
IMAGE, BYTES = "image", "bytes"
_ALWAYS = ("index", "question", "answer", "category")
TABLES = tuple((*_ALWAYS, *options, image) for image in (IMAGE, BYTES) for options in (OPTIONS, (LISTED,)))
"""Columns that a table must have, in each of the layouts in circulation."""
COLUMNS = (*_ALWAYS, IMAGE, BYTES, *OPTIONS, LISTED, "l2-category")
_LETTERED = re.compile(r"\s*(?:\([A-Z]\)|[A-Z][.:)])")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
JSON_REQUIRED = ("questionid", "image", "text", "answerchoices", "groundtruth")


def fold_key(key: str) -> str:
    """Key without case, spaces and punctuation: published files disagree on all three."""
    return re.sub(r"[^a-z0-9]", "", key.lower())


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row of either layout -> sample."""
    table = "l2-category" in row or "E" in row or LISTED in row
    return _parse_table(row, ctx) if table else _parse_json(row, ctx)


def _parse_json(row: dict[str, Any], ctx: Context) -> Sample:
    row = {fold_key(key): value for key, value in row.items()}
    options = require(row, "answerchoices")
    if not isinstance(options, list):
        raise BadRow(reasons.FIELD_TYPE, f"'Answer choices' is {type(options).__name__}, a list is expected")
    choices = checked_choices(without_letters(options))
    name = id_of(row, "questionid")
    image = row.get("image")
    if image in (None, "", []):
        images = [ctx.kept(f"{name}/image", partial(no_image, "'Image' is empty"))]
    else:
        images = [ctx.image(path) for path in (image if isinstance(image, list) else [image])]
    return Sample.ask(
        name,
        images,
        question_of(row, "text"),
        letter_answer(text_of(row, "groundtruth"), choices),
        choices=choices,
        task=label_of(row, "task"),
        category=label_of(row, "category"),
        tags={"subtask": subtask} if (subtask := label_of(row, "subtask")) else {},
        source=ctx.source,
        meta={"question_type": kind} if (kind := label_of(row, "questiontype")) else {},
    )


def _parse_table(row: dict[str, Any], ctx: Context) -> Sample:
    index = id_of(row, "index")
    image = table_image(
        row, index, ctx, image_column(list(row))
    )  # first: later rows may refer to it even where this one is dropped
    if "A" in row:
        options: list[object] = [text_of(row, letter) for letter in OPTIONS]
    else:
        options = listed_options(require(row, LISTED))
    choices = checked_choices(without_letters(options))
    task, _, subtask = text_of(row, "category").partition("/")
    return Sample.ask(
        index,
        [image],
        question_of(row, "question"),
        letter_answer(text_of(row, "answer"), choices),
        choices=choices,
        task=task,
        category=label_of(row, "l2-category"),
        tags={"subtask": subtask} if subtask else {},
        source=ctx.source,
    )


def listed_options(cell: object) -> list[object]:
    """Options of the one column that some tables have: a list, a list written as text, or a line for each option."""
    if isinstance(cell, str):
        text = cell.strip()
        cell = _written_list(text) if text.startswith("[") and text.endswith("]") else _option_lines(text)
    if not isinstance(cell, list):
        raise BadRow(reasons.CHOICES_MALFORMED, f"{LISTED!r} is {type(cell).__name__}: a list or text is expected")
    return cell


def _written_list(text: str) -> list[object]:
    """Texts of "['a', 'b']", with or without commas (numpy prints none)."""
    parts = _QUOTED.findall(text)
    if _QUOTED.sub("", text).strip("[], \t\r\n"):
        raise BadRow(reasons.CHOICES_MALFORMED, f"{LISTED!r} is no list of texts: {text!r:.60}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know stays as it is
            return [ast.literal_eval(part) for part in parts]
    except (ValueError, SyntaxError) as error:
        raise BadRow(reasons.CHOICES_MALFORMED, f"{LISTED!r} cannot be read: {error}") from None


def _option_lines(text: str) -> list[object]:
    """Options that begin with "(A)", "A." and so on, one to a line; other lines go on with the option before them."""
    options: list[str] = []
    for line in text.splitlines():
        if _LETTERED.match(line):
            options.append(line)
        elif options:
            options[-1] += f"\n{line}"
        elif line.strip():
            raise BadRow(reasons.CHOICES_MALFORMED, f"{LISTED!r} begins with no letter: {line!r:.60}")
    return [option.strip() for option in options]


def image_column(columns: Sequence[str]) -> str:
    """The column that holds the image."""
    return IMAGE if IMAGE in columns else BYTES


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of a JSON, TSV or parquet file."""
    if path.suffix.lower() == ".parquet":
        return parquet_rows(path, COLUMNS)
    return table_rows(path, image_column(table_header(path))) if path.suffix.lower() == ".tsv" else json_rows(path)


FORMAT = Format("mme-realworld", "MME-RealWorld JSON or TSV", rows, parse, folders=True, tables=TABLES)
