"""Which references show the same picture, whatever their files are called and however they are encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from realvr.errors import UserError
from realvr.imaging.reference import ImageRef


def picture_keys(images: Sequence[ImageRef]) -> list[Hashable]:
    """A key for each image; equal exactly where the pictures are (`realvr.imaging.processing.picture_hash`).

    Only pictures of equal size can be equal, so that most are told apart by their headers and never decoded; files with
    equal bytes are decoded once. An image that cannot be read is equal to itself alone.
    """
    sizes = [_size(image) for image in images]
    distinct = {(size, _reference(image)) for size, image in zip(sizes, images, strict=True)}
    shared = Counter(size for size, _ in distinct)
    known: dict[str, str] = {}
    keys: list[Hashable] = []
    for image, size in zip(images, sizes, strict=True):
        if size is None or shared[size] == 1:
            keys.append((size, _reference(image)))
            continue
        try:
            encoded = image.content_hash()
            known[encoded] = known.get(encoded) or image.picture()
            keys.append(known[encoded])
        except (UserError, OSError):
            keys.append((None, _reference(image)))
    return keys


def _size(image: ImageRef) -> tuple[int, int] | None:
    """(width, height) from the header, None where it cannot be read."""
    try:
        return image.size
    except (UserError, OSError):
        return None


def _reference(image: ImageRef) -> Hashable:
    """Equal for references to the same bytes."""
    return image.path or image.slice or image.data or image.id
