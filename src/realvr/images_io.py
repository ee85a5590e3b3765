"""Opening an encoded image within one documented bound, without importing torch.

Every place that decodes a user's image goes through here, so that the bound holds everywhere and a failure always has
the same named reason.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from PIL import Image, UnidentifiedImageError

from realvr.errors import UserError

MAX_PIXELS = 178_956_970
"""Largest image that is decoded, in pixels: twice Pillow's warning limit, which is where Pillow itself refuses."""

IMAGE_MISSING = "image_missing"
IMAGE_NOT_A_FILE = "image_not_a_file"
IMAGE_BROKEN = "image_broken"
IMAGE_TOO_LARGE = "image_too_large"

_T = TypeVar("_T")


class ImageError(UserError):
    """An image that cannot be used. ``reason`` is one of the constants of this module."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        # The default pickling of exceptions would call __init__ with one argument; loader workers raise across processes.
        return type(self), (self.reason, str(self))


def read_file(path: Path, name: str) -> bytes:
    """Bytes of an image file; ``name`` is what an error calls it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ImageError(IMAGE_MISSING, f"{name}: no such image file") from None
    except (IsADirectoryError, NotADirectoryError):
        raise ImageError(IMAGE_NOT_A_FILE, f"{name}: not a file; an image file is expected") from None
    except OSError as error:
        raise ImageError(IMAGE_BROKEN, f"{name}: cannot be read ({error.strerror or error})") from None


def _within_bound(source: BinaryIO, name: str, use: Callable[[Image.Image], _T]) -> _T:
    """Open ``source``, check its declared size before any pixel is decoded, and apply ``use``."""
    try:
        with warnings.catch_warnings():
            # Pillow only warns between half the bound and the bound; those sizes are allowed here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise Image.DecompressionBombError(f"{width}x{height}")
                return use(image)
    except Image.DecompressionBombError as error:
        raise ImageError(
            IMAGE_TOO_LARGE, f"{name}: image exceeds the limit of {MAX_PIXELS:,} pixels ({error}); scale it down first"
        ) from None
    except UnidentifiedImageError:
        raise ImageError(IMAGE_BROKEN, f"{name}: not an image that Pillow can read") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, MemoryError) as error:
        # Pillow's decoders raise any of these on damaged files, depending on the format.
        raise ImageError(IMAGE_BROKEN, f"{name}: damaged image ({error})") from None


def decode(data: bytes, name: str = "image") -> Image.Image:
    """Encoded image -> RGB image, fully loaded. Orientation metadata is not applied: boxes refer to stored pixels."""
    return _within_bound(io.BytesIO(data), name, lambda image: image.convert("RGB"))


def image_size(data: bytes, name: str = "image") -> tuple[int, int]:
    """(width, height) from the header, without decoding."""
    return _within_bound(io.BytesIO(data), name, lambda image: image.size)


def file_size(path: Path, name: str) -> tuple[int, int]:
    """(width, height) of an image file from its header, without reading the whole file."""
    try:
        with path.open("rb") as source:
            return _within_bound(source, name, lambda image: image.size)
    except OSError:
        return image_size(read_file(path, name), name)


def verify(data: bytes, name: str = "image") -> tuple[int, int]:
    """Decode the whole stream and return (width, height); raises `ImageError` for a damaged image.

    A JPEG is decoded at one eighth of its size: every byte of the stream is still read, so truncation is still found,
    at a fraction of the memory of an 8K photograph.
    """

    def load(image: Image.Image) -> tuple[int, int]:
        size = image.size
        image.draft("RGB", (1, 1))
        image.load()
        return size

    return _within_bound(io.BytesIO(data), name, load)
