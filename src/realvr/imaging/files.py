"""Checking an encoded image, and naming what is wrong with it. Decoding is `realvr.imaging.processing.open_image`.

Nothing here or there imports torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from PIL import Image, UnidentifiedImageError

from realvr.errors import UserError
from realvr.imaging.processing import MAX_IMAGE_PIXELS, open_image, read_header

IMAGE_MISSING = "image_missing"
IMAGE_NOT_A_FILE = "image_not_a_file"
IMAGE_BROKEN = "image_broken"
IMAGE_TOO_LARGE = "image_too_large"
LARGEST_SIDE = 1 << 20
"""No image is this wide or high, whatever a file says about it."""

_ORIENTATION = 0x0112
_T = TypeVar("_T")


class ImageError(UserError):
    """An image that cannot be used. ``reason`` is one of the constants of this module, or ``base64_invalid``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled with their message only, and loader workers raise across processes.
        return type(self), (self.reason, str(self))


def read_file(path: Path, name: str) -> bytes:
    """Bytes of an image file; ``name`` is what an error calls it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ImageError(IMAGE_MISSING, f"{name}: no such image file") from None
    except (IsADirectoryError, NotADirectoryError):
        raise ImageError(IMAGE_NOT_A_FILE, f"{name}: not a file; an image file is expected") from None
    except (OSError, ValueError) as error:  # permissions, a name that is too long, a disk that went away
        raise ImageError(IMAGE_BROKEN, f"{name}: cannot be read ({error})") from None


def _within_bound(source: BinaryIO, name: str, use: Callable[[Image.Image], _T]) -> _T:
    """Open ``source``, check its declared size before any pixel is decoded, and apply ``use``."""
    try:
        with read_header(source) as image:
            width, height = image.size
            if width * height > MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{width}x{height}")
            return use(image)
    except Image.DecompressionBombError as error:
        limit = f"the limit of {MAX_IMAGE_PIXELS:,} pixels"
        raise ImageError(IMAGE_TOO_LARGE, f"{name}: over {limit} ({error}); scale it down first") from None
    except UnidentifiedImageError:
        raise ImageError(IMAGE_BROKEN, f"{name}: not an image that Pillow can read") from None
    except Exception as error:  # Pillow's decoders raise many types on damaged files, depending on the format
        raise ImageError(IMAGE_BROKEN, f"{name}: damaged image ({error})") from None


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) after the rotation that the file asks for, which `open_image` applies."""
    width, height = image.size
    if width == height:
        return width, height
    # Pillow decodes a whole PNG in search of EXIF data behind its pixels.
    exif = image.getexif() if image.format != "PNG" or _tells_after_pixels(image) else Image.Image.getexif(image)
    return (height, width) if exif.get(_ORIENTATION) in (5, 6, 7, 8) else (width, height)


def _tells_after_pixels(image: Image.Image) -> bool:
    """Whether a PNG holds text or EXIF data behind its pixels; reads the heads of its chunks only."""
    file: Any = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    try:
        file.seek(8)
        pixels = False
        while len(head := file.read(8)) == 8:
            kind = head[4:]
            if pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            pixels = pixels or kind == b"IDAT"
            file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(place)


def image_size(data: bytes, name: str = "image") -> tuple[int, int]:
    """(width, height) of the upright image, from the header."""
    return _within_bound(io.BytesIO(data), name, _upright_size)


def file_size(path: Path, name: str) -> tuple[int, int]:
    """As `image_size`, without reading the whole file."""
    try:
        with path.open("rb") as source:
            return _within_bound(source, name, _upright_size)
    except (OSError, ValueError):
        return image_size(read_file(path, name), name)


def decode(data: bytes, name: str = "image") -> Image.Image:
    """Encoded image -> upright RGB, fully decoded, exactly as the model's image processing sees it."""
    try:
        image = open_image(data)
        image.filename = name  # type: ignore[attr-defined]  # so that a later error can name it
        return image
    except UserError as error:
        image_size(data, name)  # raises first where the header alone tells the reason
        raise ImageError(IMAGE_BROKEN, f"{name}: {error}") from None


def verify(data: bytes, name: str = "image") -> tuple[int, int]:
    """Decode the whole stream and return (width, height); raises `ImageError` for a damaged image.

    A JPEG is decoded at one eighth of its size: every byte of the stream is still read, so truncation is still found,
    at a fraction of the memory of an 8K photograph.
    """

    def load(image: Image.Image) -> tuple[int, int]:
        size = _upright_size(image)
        if image.mode in ("I", "F"):
            open_image(data)  # wide greyscale may decode and still not convert
        image.draft("RGB", (1, 1))
        image.load()
        return size

    return _within_bound(io.BytesIO(data), name, load)
