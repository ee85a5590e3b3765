"""Our own rows: JSON lines, one `Sample` a line, image paths relative to the file, boxes in fractions; or the same
fields as columns of a parquet file, whose images may be inside (``{"bytes", "path"}``, as on the hub).

`ReadOptions.columns` reads files whose columns have other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from realvr.data import reasons
from realvr.data.parquet import columns, parquet_rows
from realvr.data.readers.base import (
    Context,
    Format,
    ReadOptions,
    Row,
    asked_text,
    checked_choices,
    id_of,
    is_blank,
    letter_answer,
    question_of,
    require,
    text_of,
)
from realvr.data.readers.cells import cell_image, inline_id
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.data.streams import json_rows
from realvr.imaging.reference import decode_base64

V = TypeVar("V")


def to_json(sample: Sample, images: list[str] | None = None) -> dict[str, Any]:
    """The sample as one JSON object; ``images`` replaces image ids by the names they were saved under.

    ``turns`` is written only where ``question`` does not say everything.
    """
    row: dict[str, Any] = {
        "id": sample.id,
        "images": images if images is not None else [image.id for image in sample.images],
        "question": sample.question,
        "choices": sample.choices,
        "answer": sample.answer,
        "boxes": _plain(sample.boxes),
    }
    simple = [Message("user", sample.question, tuple(range(len(sample.images))))]
    if sample.turns != simple:
        row["turns"] = [{"role": turn.role, "text": turn.text, "images": list(turn.images)} for turn in sample.turns]
    if sample.earlier_boxes:
        row["earlier_boxes"] = [_plain(boxes) for boxes in sample.earlier_boxes]
    if not sample.ordered:
        row["ordered"] = False
    optional = ("response", "task", "category", "tags", "pair", "cycle", "meta")
    return row | {name: getattr(sample, name) for name in optional if getattr(sample, name)}


def _plain(boxes: list[Box]) -> list[dict[str, Any]]:
    return [{"image": box.image, "xyxy": list(box.xyxy)} for box in boxes]


def _images(row: dict[str, Any], ctx: Context) -> list[ImageRef]:
    names = require(row, "images")
    if _is_table(ctx) and isinstance(names, str | bytes | dict):
        names = [names]
    if not isinstance(names, list):
        raise BadRow(reasons.FIELD_TYPE, f"'images' is {type(names).__name__}, a list is expected")
    if not names:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, "'images' is empty")
    images: list[ImageRef] = []
    for position, name in enumerate(names):
        if isinstance(name, dict) and isinstance(name.get("base64"), str):
            inline = str(name.get("id") or f"{ctx.file.name}#{ctx.row}/{position}")
            images.append(ctx.kept(inline, partial(_inline, name["base64"], inline)))
        elif isinstance(name, bytes) or (isinstance(name, dict) and isinstance(name.get("bytes"), bytes)):
            inline = inline_id(ctx, str(position))
            images.append(ctx.kept(inline, partial(cell_image, name, inline)))
        elif isinstance(name, dict) and isinstance(name.get("path"), str):
            images.append(ctx.image(name["path"]))
        else:
            images.append(ctx.image(name))
    return images


def _inline(text: str, name: str) -> ImageRef:
    return ImageRef.from_bytes(name, decode_base64(text, name))


def _turns(row: dict[str, Any], count: int) -> list[Message]:
    if row.get("turns") is None:
        return [Message("user", question_of(row, "question"), tuple(range(count)))]
    turns: list[Message] = []
    for turn in row["turns"] if isinstance(row["turns"], list) else [None]:
        if not isinstance(turn, dict) or turn.get("role") not in ("system", "user", "assistant"):
            raise BadRow(reasons.FIELD_TYPE, f"a turn is {turn!r:.60}; role and text are expected")
        shown = turn.get("images", [])
        if not isinstance(shown, list) or not all(type(index) is int and 0 <= index < count for index in shown):
            raise BadRow(reasons.FIELD_TYPE, f"a turn shows images {shown!r:.60} of {count}")
        turns.append(Message(turn["role"], text_of(turn, "text"), tuple(shown)))
    asked_text(next((turn.text for turn in reversed(turns) if turn.role == "user"), ""), "the last user turn")
    return turns


def _boxes(raw: object, name: str, images: list[ImageRef], ctx: Context) -> list[Box]:
    if not isinstance(raw, list):
        raise BadRow(reasons.BOX_MALFORMED, f"{name} is {type(raw).__name__}, a list is expected")
    found: list[tuple[object, int]] = []
    for entry in raw:
        image = entry.get("image", 0) if isinstance(entry, dict) else None
        if isinstance(image, bool) or not isinstance(image, int) or not 0 <= image < len(images):
            raise BadRow(reasons.BOX_MALFORMED, f"box {entry!r:.60} names no image of the row")
        found.append((entry.get("xyxy"), image))
    return ctx.read_boxes(found, images, own="fractions")


def _earlier_boxes(row: dict[str, Any], turns: list[Message], images: list[ImageRef], ctx: Context) -> list[list[Box]]:
    """A list of boxes for each assistant turn, or none at all."""
    raw = row.get("earlier_boxes") or []
    if not isinstance(raw, list):
        raise BadRow(reasons.BOX_MALFORMED, f"'earlier_boxes' is {type(raw).__name__}, a list of lists is expected")
    replies = sum(turn.role == "assistant" for turn in turns)
    if raw and len(raw) != replies:
        detail = f"'earlier_boxes' has {len(raw)} lists, the turns have {replies} earlier replies: one each is expected"
        raise BadRow(reasons.BOX_MALFORMED, detail)
    return [_boxes(boxes, f"list {number} of 'earlier_boxes'", images, ctx) for number, boxes in enumerate(raw, 1)]


def _optional(row: dict[str, Any], name: str, kind: type[V]) -> V:
    value = row.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise BadRow(reasons.FIELD_TYPE, f"{name!r} is {type(value).__name__}, {kind.__name__} is expected")
    return value


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One line -> sample."""
    images = _images(row, ctx)
    choices = checked_choices(row["choices"]) if _optional(row, "choices", list) else []
    answer, turns = text_of(row, "answer"), _turns(row, len(images))
    if is_blank(answer):
        raise BadRow(reasons.ANSWER_EMPTY, "'answer' is empty")
    return Sample(
        id=_id(row, ctx),
        images=images,
        turns=turns,
        answer=letter_answer(answer, choices) if choices else answer,
        choices=choices,
        boxes=_boxes(row.get("boxes") or [], "'boxes'", images, ctx),
        response=_optional(row, "response", str),
        task=_optional(row, "task", str),
        category=_optional(row, "category", str),
        tags={str(key): str(value) for key, value in _optional(row, "tags", dict).items()},
        pair=None if row.get("pair") is None else text_of(row, "pair"),
        cycle=None if row.get("cycle") is None else text_of(row, "cycle"),
        source=ctx.source,
        meta=_optional(row, "meta", dict),
        earlier_boxes=_earlier_boxes(row, turns, images, ctx),
        ordered=True if row.get("ordered") is None else _optional(row, "ordered", bool),
    )


_ASKED = ("id", "images", "question", "turns", "answer", "choices", "boxes", "response")
FIELDS = (*_ASKED, "task", "category", "tags", "pair", "cycle", "meta", "earlier_boxes", "ordered")
TABLES = (("images", "question", "answer"), ("image", "question", "answer"))


def _is_table(ctx: Context) -> bool:
    """Whether the row comes from a file that was not written for us: a table, or one with other names."""
    return bool(ctx.options.columns) or ctx.file.suffix.lower() == ".parquet"


def _id(row: dict[str, Any], ctx: Context) -> str:
    """The id of a row; tables on the hub often have none, and then it is the row's number."""
    return f"{ctx.file.stem}/{ctx.row}" if _is_table(ctx) and row.get("id") is None else id_of(row, "id")


def column_names(pairs: Mapping[str, str]) -> dict[str, str]:
    """``columns`` as given: refused where a field is none of ours."""
    for name in pairs:
        if name not in FIELDS:
            raise FileError(
                reasons.WRONG_COLUMNS, f"columns: no field is called {name!r}; choose one of {', '.join(FIELDS)}"
            )
    return dict(pairs)


def column_pairs(words: Sequence[str]) -> dict[str, str]:
    """``FIELD=COLUMN`` words of the command line."""
    pairs = dict(word.partition("=")[::2] for word in words)
    if bad := [name for name, column in pairs.items() if not column]:
        raise FileError(reasons.WRONG_COLUMNS, f"--columns {bad[0]}: write FIELD=COLUMN, such as question=problem")
    return column_names(pairs)


def translated(found: list[str], options: ReadOptions) -> list[str]:
    """The columns of a file under the names of our fields."""
    theirs = {column: name for name, column in options.columns.items()}
    return [theirs.get(name, name) for name in found]


def check_names(path: Path, options: ReadOptions) -> None:
    """Refuse a file without a column that ``columns`` names."""
    if not column_names(options.columns):
        return
    if path.suffix.lower() == ".parquet":
        found = columns(path)
    else:
        probed = [row.data for row in islice(json_rows(path), 5) if row.error is None]
        found = list(dict.fromkeys(str(key) for row in probed for key in row))
    for name, column in options.columns.items():
        if column not in found:
            there = ", ".join(found)[:200] or "none"
            raise FileError(
                reasons.WRONG_COLUMNS, f"{path}: no column {column!r} (columns: {name}={column}); there are {there}"
            )


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of JSON lines, or of a parquet file, under the names of our fields."""
    chosen = column_names(options.columns)
    if path.suffix.lower() == ".parquet":
        there = columns(path)
        if "images" not in chosen and "images" not in there and "image" in there:
            chosen["images"] = "image"
        found = parquet_rows(path, [chosen.get(name, name) for name in FIELDS])
    else:
        found = json_rows(path)
    if not chosen:
        return found
    return (row if row.error else replace(row, data=_renamed(row.data, chosen)) for row in found)


def _renamed(data: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """A row with our names; what ``chosen`` does not name keeps its own."""
    return {**data, **{name: data.get(column) for name, column in chosen.items()}}


FORMAT = Format("jsonl", "realvr JSON lines or parquet", rows, parse, folders=True, tables=TABLES)
