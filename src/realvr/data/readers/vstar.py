"""V* (``vstar_bench``): questions about small things in large pictures, with the options inside the question's text.

Rows hold ``text``, ``label`` (a letter), ``category`` (direct_attributes or relative_position) and ``image``: a path in
the JSON lines, the picture itself in the parquet files.
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
    asked_text,
    checked_choices,
    id_text,
    letter_answer,
    question_of,
    text_of,
)
from realvr.data.readers.cells import cell_image, inline_id, no_image
from realvr.data.reasons import BadRow
from realvr.data.sample import LETTERS, ImageRef, Sample
from realvr.data.streams import json_rows

CATEGORIES = ("direct_attributes", "relative_position")
REQUIRED = ("text", "label", "category", "image")
COLUMNS = (*REQUIRED, "question_id")
INSTRUCTION = "Answer with the option's letter from the given choices directly."
"""How the published questions end; a model is asked in our own words instead."""
_AT_LINE_START = re.compile(r"^[ \t]*(?:\(([A-Z])\)|([A-Z])[.:)])[ \t]*", re.MULTILINE)
_ANYWHERE = re.compile(r"\(([A-Z])\)\s*")


def split_text(text: str) -> tuple[str, list[str]]:
    r"""(question, options) of "What …?\n(A) red\n(B) blue\nAnswer with …"; options may also follow on one line."""
    for pattern in (_AT_LINE_START, _ANYWHERE):
        starts: list[re.Match[str]] = []
        for match in pattern.finditer(text):
            if match[1 if match[1] else 2] == LETTERS[len(starts) : len(starts) + 1]:
                starts.append(match)
        if len(starts) > 1:
            break
    else:
        raise BadRow(reasons.CHOICES_MALFORMED, f"no options (A), (B) in {text!r:.60}")
    ends = [match.start() for match in starts[1:]] + [len(text)]
    options = [text[match.end() : end].strip() for match, end in zip(starts, ends, strict=True)]
    options[-1] = options[-1].removesuffix(INSTRUCTION).partition("\n")[0].strip()
    return text[: starts[0].start()].strip(), options


def _image(row: dict[str, Any], ctx: Context) -> ImageRef:
    cell = row.get("image")
    if cell in (None, ""):
        return ctx.kept(inline_id(ctx), partial(no_image, "'image' is empty"))
    if isinstance(cell, str) and "." in cell:  # base64 has no dot
        return ctx.image(cell)
    return ctx.kept(inline_id(ctx), partial(cell_image, cell, inline_id(ctx)))


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample. The published wording is kept in ``meta``."""
    text = question_of(row, "text")
    question, options = split_text(text)
    choices = checked_choices(options)
    number = row.get("question_id")
    return Sample.ask(
        str(ctx.row) if number is None else id_text(number, "question_id"),
        [_image(row, ctx)],
        asked_text(question, "'text' before its options"),
        letter_answer(text_of(row, "label"), choices),
        choices=choices,
        task="vstar",
        category=text_of(row, "category"),
        source=ctx.source,
        meta={"prompt": text},
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of a JSON-lines, JSON or parquet file."""
    return parquet_rows(path, COLUMNS) if path.suffix.lower() == ".parquet" else json_rows(path)


FORMAT = Format("vstar", "V* JSON lines or parquet", rows, parse, folders=True, tables=(REQUIRED,))
