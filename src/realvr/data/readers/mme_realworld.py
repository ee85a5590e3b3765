"""MME-RealWorld and its Lite set: JSON rows with image paths, or table rows with base64 images.

Five options; E means that the feature does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    letter_answer,
    question_of,
    require,
    strip_letter,
    text_of,
)
from realvr.data.readers.cells import no_image, table_image
from realvr.data.reasons import BadRow
from realvr.data.sample import Sample
from realvr.data.streams import json_rows, table_rows

OPTIONS = ("A", "B", "C", "D", "E")
REQUIRED = ("index", "image", "question", *OPTIONS, "answer", "category")
COLUMNS = (*REQUIRED, "multi-choice options", "l2-category")
JSON_REQUIRED = ("questionid", "image", "text", "answerchoices", "groundtruth")


def fold_key(key: str) -> str:
    """Key without case, spaces and punctuation: published files disagree on all three."""
    return re.sub(r"[^a-z0-9]", "", key.lower())


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row of either layout -> sample."""
    return _parse_table(row, ctx) if "l2-category" in row or "E" in row else _parse_json(row, ctx)


def _parse_json(row: dict[str, Any], ctx: Context) -> Sample:
    row = {fold_key(key): value for key, value in row.items()}
    options = require(row, "answerchoices")
    if not isinstance(options, list):
        raise BadRow(reasons.FIELD_TYPE, f"'Answer choices' is {type(options).__name__}, a list is expected")
    choices = checked_choices([strip_letter(option) if isinstance(option, str) else option for option in options])
    name = text_of(row, "questionid")
    image = row.get("image")
    if image in (None, "", []):
        images = [ctx.kept(f"{name}/image", partial(no_image, "'Image' is empty"))]
    else:
        images = [ctx.image(path) for path in (image if isinstance(image, list) else [image])]
    tags = {"subtask": str(row["subtask"])} if row.get("subtask") else {}
    return Sample.ask(
        name,
        images,
        question_of(row, "text"),
        letter_answer(text_of(row, "groundtruth"), choices),
        choices=choices,
        task=str(row.get("task") or ""),
        category=str(row.get("category") or ""),
        tags=tags,
        source=ctx.source,
        meta={"question_type": row["questiontype"]} if row.get("questiontype") else {},
    )


def _parse_table(row: dict[str, Any], ctx: Context) -> Sample:
    index = text_of(row, "index")
    image = table_image(row, index, ctx)  # first: later rows may refer to it even where this one is dropped
    choices = checked_choices([strip_letter(text_of(row, letter)) for letter in OPTIONS])
    task, _, subtask = text_of(row, "category").partition("/")
    return Sample.ask(
        index,
        [image],
        question_of(row, "question"),
        letter_answer(text_of(row, "answer"), choices),
        choices=choices,
        task=task,
        category=str(row.get("l2-category") or ""),
        tags={"subtask": subtask} if subtask else {},
        source=ctx.source,
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of a JSON, TSV or parquet file."""
    if path.suffix.lower() == ".parquet":
        return parquet_rows(path, COLUMNS)
    return table_rows(path, "image") if path.suffix.lower() == ".tsv" else json_rows(path)


FORMAT = Format("mme-realworld", "MME-RealWorld JSON or TSV", rows, parse, folders=True)
