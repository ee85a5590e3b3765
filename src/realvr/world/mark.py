"""The mark that every picture of the embedded world carries, so that a copy of its exports is still known as one.

The world's benchmarks have the layout, the subtasks and by default even the row counts of the real ones. Pillow writes
the mark into the first bytes of the file: a text chunk of a PNG, the comment of a JPEG. Pixels do not change.
"""

from __future__ import annotations

from typing import Any

from PIL.PngImagePlugin import PngInfo

MARK = b"drawn by realvr world"
_HEAD = 1024


def save_options(format: str) -> dict[str, Any]:
    """What `Image.save` needs to write the mark."""
    if format == "JPEG":
        return {"comment": MARK}
    info = PngInfo()
    info.add_text("Software", MARK.decode())
    return {"pnginfo": info}


def is_drawn(data: bytes) -> bool:
    """Whether an encoded picture, or its beginning, carries the mark."""
    return MARK in data[:_HEAD]
