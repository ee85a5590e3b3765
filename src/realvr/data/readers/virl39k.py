r"""ViRL39K: parquet rows with image paths and ``\boxed{}`` answers, without boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    id_of,
    is_blank,
    label_of,
    question_of,
    split_options,
    text_of,
    untagged,
)
from realvr.data.reasons import BadRow
from realvr.data.sample import Sample

REQUIRED = ("question", "answer", "qid", "image")
COLUMNS = (*REQUIRED, "PassRate_32BTrained", "PassRate_7BBase", "category", "source")
_BOXED = "\\boxed{"


def unbox(text: str) -> str:
    r"""Content of the last ``\boxed{...}``; text without one is the answer itself. Raises on unbalanced braces."""
    start = text.rfind(_BOXED)
    if start < 0:
        return text.strip()
    depth = 1
    at = start + len(_BOXED)
    for position in range(at, len(text)):
        escaped = text[position - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[at:position].strip()
    raise BadRow(reasons.BOXED_UNBALANCED, f"{text[start : start + 60]!r}")


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample; the whole image is its evidence."""
    names = row.get("image")
    if names is None or names == [] or names == "":
        raise BadRow(reasons.IMAGE_LIST_EMPTY, "'image' is empty")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise BadRow(reasons.FIELD_TYPE, f"'image' is {type(names).__name__}, a list of paths is expected")
    images = [ctx.image(name) for name in names]
    answer = unbox(text_of(row, "answer"))
    if is_blank(answer):
        raise BadRow(reasons.ANSWER_EMPTY, "the answer is empty")
    plain = asked_text(untagged(question_of(row, "question"), len(images), ctx), "'question' without image marks")
    question, choices = split_options(plain, answer)
    rates = {key: row.get(key) for key in ("PassRate_32BTrained", "PassRate_7BBase")}
    known = {key: rate for key, rate in rates.items() if isinstance(rate, float | int) and math.isfinite(rate)}
    return Sample.ask(
        id_of(row, "qid"),
        images,
        question,
        answer,
        choices=choices,
        category=label_of(row, "category"),
        tags={"source": source} if (source := label_of(row, "source")) else {},
        source=ctx.source,
        meta=known,
    )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of one parquet file."""
    return parquet_rows(path, COLUMNS)


FORMAT = Format("virl39k", "ViRL39K parquet", rows, parse, folders=True, tables=(REQUIRED,))
