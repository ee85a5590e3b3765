"""HR-Bench 4K and 8K, TSV (base64 images, streamed) or parquet: every question in four rotations of its options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realvr.data.parquet import parquet_rows
from realvr.data.readers.base import (
    Context,
    Format,
    ReadOptions,
    Row,
    checked_choices,
    id_of,
    letter_answer,
    question_of,
    text_of,
)
from realvr.data.readers.cells import table_image
from realvr.data.sample import Sample
from realvr.data.tables import table_rows

OPTIONS = ("A", "B", "C", "D")
REQUIRED = ("index", "question", "answer", "category", *OPTIONS, "cycle_category", "image")


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample with its cycle."""
    index = id_of(row, "index")
    image = table_image(row, index, ctx)  # first: later rows may refer to it even where this one is dropped
    choices = checked_choices([text_of(row, letter) for letter in OPTIONS])
    return Sample.ask(
        index,
        [image],
        question_of(row, "question"),
        letter_answer(text_of(row, "answer"), choices),
        choices=choices,
        task="hr_bench",
        category=text_of(row, "category"),
        cycle=text_of(row, "cycle_category"),
        source=ctx.source,
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of a TSV or parquet file."""
    return parquet_rows(path, REQUIRED) if path.suffix.lower() == ".parquet" else table_rows(path, "image")


FORMAT = Format("hr-bench", "HR-Bench TSV or parquet", rows, parse, folders=True, tables=(REQUIRED,))
