"""Images inside table cells, shared by the TSV and parquet benchmarks."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

from realvr.data import reasons
from realvr.data.readers.base import Context
from realvr.data.reasons import BadRow
from realvr.data.tables import TableRow
from realvr.imaging.reference import FileSlice, ImageRef, decode_base64


def inline_id(ctx: Context, column: str = "image") -> str:
    """Stable name of an image that lives inside a row."""
    return f"{ctx.file.name}#{ctx.row}/{column}"


def cell_image(cell: object, name: str) -> ImageRef:
    """A parquet cell: bytes, a struct with ``bytes``, or base64 text. ``name`` becomes the image's id."""
    if isinstance(cell, dict):
        cell = cell.get("bytes")
    if isinstance(cell, str):
        cell = decode_base64(cell, name)
    if not isinstance(cell, bytes) or not cell:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, f"{name} holds no image")
    return ImageRef.from_bytes(name, cell)


def table_image(row: dict[str, Any], index: str, ctx: Context, column: str = "image") -> ImageRef:
    """The image of a TSV row (left in the file), of an earlier TSV row that it refers to, or of a parquet row.

    Rows that hold the same image share one reference, so that it is read, checked and decoded once.
    """
    return ctx.kept(inline_id(ctx, column), lambda: _table_image(row, index, ctx, column))


def no_image(detail: str) -> ImageRef:
    """For rows without any image."""
    raise BadRow(reasons.IMAGE_LIST_EMPTY, detail)


def _table_image(row: dict[str, Any], index: str, ctx: Context, column: str) -> ImageRef:
    if not isinstance(row, TableRow):
        return _parquet_image(row.get(column), ctx, column)
    offset, length = row.image_at
    if length == 0:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, f"column {column!r} is empty")
    by_index: dict[str, ImageRef] = ctx.state.setdefault("images", {})
    if row[column] in by_index:
        return by_index[row[column]]
    if row[column].isdecimal():
        raise BadRow(
            reasons.IMAGE_MISSING, f"column {column!r} names row {row[column]!r:.20}, which did not come before"
        )
    by_digest: dict[bytes, ImageRef] = ctx.state.setdefault("digests", {})
    image = by_digest.get(row.image_digest)
    if image is None:
        image = ImageRef(inline_id(ctx, column), slice=FileSlice(ctx.file, offset, length))
        by_digest[row.image_digest] = image
    by_index[index] = image
    return image


def _parquet_image(cell: object, ctx: Context, column: str) -> ImageRef:
    """Shared with earlier rows only while somebody holds those: parquet images live in memory."""
    text = cell if isinstance(cell, str) else cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(text, str | bytes):
        return cell_image(cell, inline_id(ctx, column))
    held: WeakValueDictionary[bytes, ImageRef] = ctx.state.setdefault("held", WeakValueDictionary())
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    digest = hashlib.blake2b(raw, digest_size=16).digest()
    image = held.get(digest)
    if image is None:
        image = held[digest] = cell_image(cell, inline_id(ctx, column))
    return image
