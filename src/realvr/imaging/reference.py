"""A reference to an image that is decoded on demand: a file, bytes, or base64 text that stays in its file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from realvr.imaging import files as image_file
from realvr.imaging.files import ImageError
from realvr.imaging.processing import picture_hash

BASE64_INVALID = "base64_invalid"


def decode_base64(text: str | bytes, name: str) -> bytes:
    """Strict base64; a ``data:image/...;base64,`` prefix and line breaks are accepted."""
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    if raw[:5] == b"data:":
        raw = raw[raw.find(b",") + 1 :]
    try:
        return base64.b64decode(raw.replace(b"\n", b"").replace(b"\r", b"").strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(BASE64_INVALID, f"{name}: invalid base64 ({error})") from None


@dataclass(frozen=True)
class FileSlice:
    """Base64 text that stays in its file until it is wanted: rows of tens of MB must not accumulate in memory."""

    path: Path
    offset: int
    length: int

    def read(self, name: str) -> bytes:
        """The decoded bytes."""
        try:
            with self.path.open("rb") as source:
                source.seek(self.offset)
                return decode_base64(source.read(self.length), name)
        except OSError as error:
            raise ImageError(image_file.IMAGE_MISSING, f"{name}: {self.path} cannot be read again ({error})") from None


@dataclass(frozen=True)
class ImageRef:
    """An image that is not decoded yet. Exactly one of ``path``, ``data``, ``slice`` and ``broken`` is set. Picklable.

    ``id`` is stable: the path as the file names it, or an inline id such as ``hr_bench_4k.tsv#12/image``.
    """

    id: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    slice: FileSlice | None = None
    broken: tuple[str, str] | None = None
    """(reason, message) of the `ImageError` that opening it raises: the row does not hold the image it should."""
    _picture: str | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_path(cls, path: str | Path, id: str | None = None) -> ImageRef:
        """Reference to a file; its id is the path unless one is given."""
        return cls(id=str(path) if id is None else id, path=Path(path))

    @classmethod
    def from_bytes(cls, id: str, data: bytes) -> ImageRef:
        """Reference to an encoded image (PNG, JPEG, ...) held in memory."""
        return cls(id=id, data=data)

    @classmethod
    def from_image(cls, id: str, image: Image.Image, format: str = "PNG", **save: Any) -> ImageRef:
        """Encode a Pillow image. PNG by default: the pixels come back unchanged."""
        buffer = io.BytesIO()
        image.save(buffer, format=format, **save)
        return cls(id=id, data=buffer.getvalue())

    def read(self) -> bytes:
        """The encoded bytes, read or decoded from base64 on every call."""
        if self.data is not None:
            return self.data
        if self.slice is not None:
            return self.slice.read(self.id)
        if self.broken is not None:
            raise ImageError(*self.broken)
        if self.path is None:
            raise ImageError(image_file.IMAGE_MISSING, f"{self.id}: the reference names no image")
        return image_file.read_file(self.path, str(self.path))

    def open(self) -> Image.Image:
        """The image, upright and RGB, decoded now; raises `ImageError` (a `UserError` with a ``reason``)."""
        return image_file.decode(self.read(), self.id)

    def verify(self) -> tuple[int, int]:
        """Decode everything once, keep nothing, return (width, height)."""
        return image_file.verify(self.read(), self.id)

    @cached_property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image, from the header."""
        if self.path is not None:
            return image_file.file_size(self.path, str(self.path))
        return image_file.image_size(self.read(), self.id)

    def picture(self, opened: Image.Image | None = None) -> str:
        """`picture_hash`, computed once; ``opened`` is what `open` has returned, where the caller has it."""
        if self._picture is None:
            object.__setattr__(self, "_picture", picture_hash(self.open() if opened is None else opened))
        assert self._picture is not None
        return self._picture

    def content_hash(self) -> str:
        """SHA-256 of the encoded bytes: equal files have equal hashes, whatever they are called."""
        return hashlib.sha256(self.read()).hexdigest()
