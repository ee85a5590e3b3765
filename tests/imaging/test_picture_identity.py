"""One identity for a picture: its upright RGB pixels, whatever the file and whatever a model makes of it."""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from realvr.data.sample import ImageRef
from realvr.imaging import processing as backbone_images
from realvr.imaging.files import image_size
from realvr.imaging.processing import open_image

ORIENTATION = 0x0112


def noise(width: int = 30, height: int = 20, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[ORIENTATION] = orientation
    return found


def identity(data: bytes) -> str:
    return ImageRef.from_bytes("x", data).picture()


def test_it_is_a_hash_of_the_pixels() -> None:
    image = noise()
    right = hashlib.sha256(b"30x20 RGB\n" + np.asarray(image).tobytes()).hexdigest()
    assert backbone_images.picture_hash(image) == right == identity(encoded(image, "PNG"))


def test_the_encoding_does_not_matter() -> None:
    image = noise()
    jpeg = encoded(image, "JPEG", quality=80)
    decoded = open_image(jpeg)
    assert identity(jpeg) == identity(encoded(decoded, "PNG")) == identity(encoded(decoded, "BMP"))
    assert identity(jpeg) == identity(encoded(decoded, "WEBP", lossless=True))
    assert identity(encoded(image, "PNG", compress_level=0)) == identity(encoded(image, "PNG", compress_level=9))
    assert identity(jpeg) != identity(encoded(image, "PNG")), "other pixels"


def test_the_mode_does_not_matter() -> None:
    few = noise().quantize(16)  # a palette
    grey = noise().convert("L")
    opaque = noise().convert("RGBA")
    for image in (few, grey, opaque, grey.convert("LA"), few.convert("RGBA")):
        assert identity(encoded(image, "PNG")) == identity(encoded(image.convert("RGB"), "PNG")), image.mode


def test_orientation_is_applied() -> None:
    upright = noise()
    lying = upright.transpose(Image.Transpose.ROTATE_90)  # what a camera stores when held on its side
    turned = encoded(lying, "PNG", exif=exif(6))
    assert ImageRef.from_bytes("x", turned).size == upright.size
    assert identity(turned) == identity(encoded(upright, "PNG")) != identity(encoded(lying, "PNG"))
    with Image.open(io.BytesIO(turned)) as raw:
        assert backbone_images.picture_hash(raw) == identity(turned), "also of an image nobody has turned yet"


def test_shape_counts() -> None:
    flat = Image.new("RGB", (12, 5), "red"), Image.new("RGB", (5, 12), "red"), Image.new("RGB", (6, 10), "red")
    assert len({backbone_images.picture_hash(image) for image in flat}) == 3


def test_it_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise().save(tmp_path / "a.png")
    ref = ImageRef.from_path(tmp_path / "a.png")
    first = ref.picture()
    (tmp_path / "a.png").unlink()
    assert ref.picture() == first, "without reading the file again"


# ---------------------------------------------------------------------- many pictures


def test_keys_are_equal_exactly_for_equal_pictures(tmp_path: Path) -> None:
    from realvr.imaging.pictures import picture_keys

    image, other, large = noise(), noise(seed=1), noise(64, 64)
    for name, one in (("a.png", image), ("b.bmp", image), ("c.png", other), ("large.png", large)):
        one.save(tmp_path / name)
    for name, source in (("broken.jpg", image), ("broken too.jpg", other)):  # their headers say the same size
        (tmp_path / name).write_bytes(encoded(source, "JPEG")[:-200])
    (tmp_path / "no.png").write_bytes(b"not an image")
    names = ["a.png", "b.bmp", "c.png", "large.png", "broken.jpg", "no.png", "missing.png", "a.png", "broken too.jpg"]
    refs = [ImageRef.from_path(tmp_path / name) for name in names]
    refs.append(ImageRef.from_bytes("inline", encoded(image, "PNG", compress_level=0)))
    keys = picture_keys(refs)
    assert keys[0] == keys[1] == keys[7] == keys[9]
    assert len(set(keys)) == 7
    assert picture_keys(refs) == keys and picture_keys([]) == []


def test_a_size_that_occurs_once_needs_no_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks of thousands of photographs are not decoded to find out that they differ."""
    from realvr.imaging.pictures import picture_keys

    refs = []
    for number in range(4):
        noise(20 + number, 20).save(tmp_path / f"{number}.jpg")
        refs.append(ImageRef.from_path(tmp_path / f"{number}.jpg"))
    decoded = []
    load = ImageFile.ImageFile.load

    def counted(image: ImageFile.ImageFile) -> Any:
        decoded.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    assert len(set(picture_keys(refs))) == 4 and not decoded
    noise(20, 20, seed=1).save(tmp_path / "same size.jpg")
    decoded.clear()
    assert len(set(picture_keys([*refs, ImageRef.from_path(tmp_path / "same size.jpg")]))) == 5
    assert decoded and set(decoded) == {(20, 20)}


def test_the_size_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = noise(31, 17)
    usual, before = encoded(plain, "PNG"), encoded(plain, "PNG", exif=exif(6))
    (length,) = struct.unpack(">I", before[before.index(b"eXIf") - 4 : before.index(b"eXIf")])
    start = before.index(b"eXIf") - 4
    chunk, rest = before[start : start + length + 12], before[:start] + before[start + length + 12 :]
    behind = rest[: rest.index(b"IEND") - 4] + chunk + rest[rest.index(b"IEND") - 4 :]
    decoded: list[int] = []
    load = PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: decoded.append(1) or load(self))
    assert (image_size(usual), image_size(before), decoded) == ((31, 17), (17, 31), [])
    assert image_size(behind) == (17, 31) == open_image(behind).size
    assert decoded  # where something stands behind the pixels, Pillow has to look
