"""Images inside table cells, shared by the TSV and parquet benchmarks."""

from __future__ import annotations

from typing import Any

from realvr.data import reasons
from realvr.data.readers.base import Context
from realvr.data.reasons import BadRow
from realvr.data.sample import FileSlice, ImageRef, decode_base64
from realvr.data.streams import TableRow

REFERENCE_LENGTH = 64
"""Harnesses save space by writing another row's index where its image would stand; no image is this short."""


def inline_id(ctx: Context, column: str = "image") -> str:
    """Stable name of an image that lives inside a row."""
    return f"{ctx.file.name}#{ctx.row}/{column}"


def cell_image(cell: Any, name: str) -> ImageRef:
    """A parquet cell: bytes, a struct with ``bytes``, or base64 text. ``name`` becomes the image's id."""
    if isinstance(cell, dict):
        cell = cell.get("bytes")
    if isinstance(cell, str):
        cell = decode_base64(cell, name)
    if not isinstance(cell, bytes) or not cell:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, f"{name} holds no image")
    return ImageRef.from_bytes(name, cell)


def table_image(row: dict[str, Any], index: str, ctx: Context, column: str = "image") -> ImageRef:
    """The image of a TSV row (left in the file), of a parquet row, or of an earlier row that this one refers to."""
    known: dict[str, ImageRef] = ctx.state.setdefault("images", {})
    if not isinstance(row, TableRow):
        cell = row.get(column)
        if isinstance(cell, str) and len(cell) <= REFERENCE_LENGTH and cell in known:
            return known[cell]
        return cell_image(cell, inline_id(ctx, column))
    offset, length = row.image_at
    if length == 0:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, f"column {column!r} is empty")
    if row[column] in known:
        return known[row[column]]
    image = ImageRef(inline_id(ctx, column), slice=FileSlice(ctx.file, offset, length))
    known[index] = image
    return image
