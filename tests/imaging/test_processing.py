"""Images from real files, good and broken, to visual tokens and their grid."""

from __future__ import annotations

import importlib
import io
import json
import os
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from realvr.errors import UserError
from realvr.families import FAMILIES
from realvr.imaging.processing import MAX_IMAGE_PIXELS, ImageProcessor, open_image, read_header
from realvr.zoo.tiny import build

QWEN = [name for name, family in FAMILIES.items() if family.variable_grid]


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises ``width`` x ``height`` pixels and holds almost none of them."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 64))]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: build(name, "tiny", root / name) for name in FAMILIES}


def load(checkpoints: dict[str, Path], name: str, **options) -> ImageProcessor:
    from transformers import AutoConfig

    path = checkpoints[name]
    return ImageProcessor.load(path, FAMILIES[name], AutoConfig.from_pretrained(path), **options)


# --- opening -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_path_string_bytes_and_pillow_images_agree(tmp_path: Path, kind: str) -> None:
    data = encoded(noise(20, 10), kind)
    path = tmp_path / "a picture"
    path.write_bytes(data)
    reference = np.asarray(Image.open(path).convert("RGB"))
    for source in (path, str(path), data, Image.open(path)):
        image = open_image(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), reference)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees to see it upright
    image = Image.new("RGB", (30, 10))
    image.paste((255, 0, 0), (0, 0, 15, 10))  # left half red: top half once upright
    path = tmp_path / "turned.png"
    image.save(path, exif=exif)
    upright = open_image(path)
    assert upright.size == (10, 30)
    assert upright.getpixel((5, 2)) == (255, 0, 0)
    assert upright.getpixel((5, 27)) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new(mode, (4, 3)).save(path)
    assert open_image(path).mode == "RGB"


def test_transparent_pixels_are_white_and_half_transparent_ones_lighter(tmp_path: Path) -> None:
    """A drawing in black on nothing: below what is transparent lies black, too."""
    black, colours = np.zeros((2, 3, 4), dtype=np.uint8), np.zeros((2, 3, 3), dtype=np.uint8) + 255
    black[0, 0, 3], black[0, 1, 3], black[1, 2] = 255, 128, (200, 100, 0, 64)
    colours[0, 0], colours[0, 1], colours[1, 2] = 0, 127, (241, 216, 191)  # a * colour + (1 - a) * 255
    drawing = Image.fromarray(black)
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {"RGBA": (drawing, {}), "LA": (drawing.convert("LA"), {})}
    index = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8), "P")
    index.putpalette([0, 0, 0, 9, 9, 9, 50, 60, 70])
    grey = Image.fromarray(np.array([[0, 7], [0, 90]], dtype=np.uint8))
    kinds |= {"P": (index, {"transparency": 1}), "L": (grey, {"transparency": 0})}
    found = {}
    for name, (image, options) in kinds.items():
        image.save(tmp_path / f"{name}.png", **options)
        found[name] = np.asarray(open_image(tmp_path / f"{name}.png"), dtype=int)
    assert abs(found["RGBA"] - colours).max() <= 1
    assert found["LA"][0].tolist() == [[0] * 3, [127] * 3, [255] * 3]
    assert found["P"].tolist() == [[[0] * 3, [255] * 3], [[50, 60, 70], [255] * 3]]
    assert found["L"][..., 0].tolist() == [[255, 7], [255, 90]]
    assert drawing.mode == "RGBA" and drawing.getpixel((0, 0)) == (0, 0, 0, 255), "the caller's image has changed"


def test_opaque_pictures_keep_their_pixels_with_an_alpha_channel() -> None:
    shades = noise(64, 48)
    shades.putpixel((0, 0), (0, 0, 0))
    assert np.array_equal(open_image(shades.convert("RGBA")), shades)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_a_large_picture_is_copied_once(tmp_path: Path) -> None:
    """Pillow has 4 bytes a pixel: one copy that it decodes into, one that the caller gets."""
    Image.new("RGB", (6000, 6000), (1, 2, 3)).save(tmp_path / "large.jpg")
    code = (
        "import sys; from realvr.imaging.processing import open_image\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "image = open_image(sys.argv[1]); assert image.getpixel((5, 5))\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "large.jpg")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 2.5 * 4 * 6000 * 6000


def test_sixteen_bit_greyscale_keeps_its_shades(tmp_path: Path) -> None:
    values = np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "scan.png")
    assert np.asarray(open_image(tmp_path / "scan.png"))[0, :, 0].tolist() == [0, 0x40, 0x80, 0xFF]
    assert np.asarray(open_image(Image.fromarray(values.astype(np.int32))))[0, :, 0].tolist() == [0, 0x40, 0x80, 0xFF]


def test_float_greyscale_outside_eight_bits_is_refused() -> None:
    with pytest.raises(UserError, match=r"greyscale values -1\.\.3"):
        open_image(Image.fromarray(np.array([[-1.0, 3.0]], dtype=np.float32)))


def broken_files(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    png, jpeg = encoded(noise(64, 64), "PNG"), encoded(noise(64, 64), "JPEG")
    contents = {
        "empty.png": (b"", "is empty"),
        "text.png": (b"this is not an image\n", "not an image"),
        "cut.png": (png[: len(png) // 2], "damaged or truncated"),
        "cut.jpg": (jpeg[: len(jpeg) // 2], "damaged or truncated"),
        "header.png": (png[:20], "not an image|cannot be read"),
        "huge.png": (png_header(20_000, 20_000), "too large"),
    }
    found = {}
    for name, (data, reason) in contents.items():
        (tmp_path / name).write_bytes(data)
        found[name] = (tmp_path / name, reason)
    (tmp_path / "folder.png").mkdir()
    found["folder"] = (tmp_path / "folder.png", "is a directory")
    found["missing"] = (tmp_path / "missing.png", "does not exist")
    return found


def test_broken_files_are_one_line_user_errors_that_name_the_file(tmp_path: Path) -> None:
    for path, reason in broken_files(tmp_path).values():
        for source in (path, str(path)):
            with pytest.raises(UserError, match=reason) as caught:
                open_image(source)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"not an image", encoded(noise(64, 64), "PNG")[:900]])
def test_broken_bytes(data: bytes) -> None:
    with pytest.raises(UserError, match="image data"):
        open_image(data)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root reads every file, so root becomes nobody here."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(noise(4, 4), "PNG"))
    path.chmod(0)
    with unprivileged(), pytest.raises(UserError, match="cannot be read"):
        open_image(path)


def test_path_that_no_file_system_takes() -> None:
    with pytest.raises(UserError, match="image a"):
        open_image("a\0b.png")


def test_other_types_are_refused() -> None:
    with pytest.raises(UserError, match="not ndarray"):
        open_image(np.zeros((4, 4, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_pillow_image_without_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="no pixels"):
        open_image(Image.new("RGB", size))


def test_our_bound_holds_without_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huge.png").write_bytes(png_header(20_000, 20_000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(UserError, match=r"20000x20000 is over 178956970 pixels"):
        open_image(tmp_path / "huge.png")


def test_between_one_and_two_times_pillows_limit_is_read_without_a_warning(tmp_path: Path) -> None:
    assert Image.MAX_IMAGE_PIXELS is not None and MAX_IMAGE_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    before, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    (tmp_path / "wide.png").write_bytes(png_header(10_000, 10_000))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match="damaged or truncated"):  # decoding was reached
            open_image(tmp_path / "wide.png")
    assert not seen
    assert before == Image.MAX_IMAGE_PIXELS
    assert warnings.filters == filters


def test_a_header_read_by_a_thread_leaves_no_filter_of_the_main_thread_behind() -> None:
    """The main thread silences a few lines; a thread begins within them and ends behind them."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(io.BytesIO):
        def read(self, *size: int) -> bytes:
            begun.set()
            assert go_on.wait(10)
            return super().read(*size)

    before = list(warnings.filters)
    opened: list[Image.Image] = []
    thread = threading.Thread(target=lambda: opened.append(read_header(Slow(encoded(noise(4, 4), "PNG")))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread.start()
        assert begun.wait(10)
    go_on.set()
    thread.join(10)
    assert opened[0].size == (4, 4) and warnings.filters == before


# --- processing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_those_of_the_stock_class(checkpoints: dict[str, Path], name: str) -> None:
    module, _, cls = FAMILIES[name].image_processor.partition(":")
    stock = getattr(importlib.import_module(module), cls).from_pretrained(checkpoints[name])
    image = noise(170, 110)
    options = {"crop_to_patches": True} if name == "internvl3" else {}
    expected = stock(images=[image], return_tensors="pt", **options)["pixel_values"]
    found = load(checkpoints, name)(image)
    assert torch.equal(found.pixels, expected)
    patches_per_token = found.grid.merge**2
    if name in QWEN:
        assert found.pixels.shape[0] == found.tokens * patches_per_token


@pytest.mark.parametrize("size", [(128, 64), (128, 65), (31, 200), (700, 500), (3, 2)])  # the first stays as it is
@pytest.mark.parametrize("change", ["", "do_resize", "do_rescale", "do_normalize", "bilinear", "one mean", "budget"])
def test_qwen_pixels_are_the_stock_ones_in_every_bit(
    checkpoints: dict[str, Path], size: tuple[int, int], change: str
) -> None:
    """Shorter than the stock way, where all its steps are on; configurations that leave one out keep theirs."""
    processor = load(checkpoints, "qwen3-vl", **({"min_tokens": 6, "max_tokens": 9} if change == "budget" else {}))
    stock = processor.stock
    if change.startswith("do_"):
        setattr(stock, change, False)
        size = (128, 64) if change == "do_resize" else size  # otherwise patches do not divide it
    elif change == "bilinear":
        stock.resample = 2
    elif change == "one mean":
        stock.image_mean, stock.image_std, stock.rescale_factor = 0.25, 0.125, 1 / 127
    image = noise(*size)
    bounds = {"shortest_edge": 6, "longest_edge": 9} if change == "budget" else {}
    bounds = {edge: tokens * (stock.patch_size * 2) ** 2 for edge, tokens in bounds.items()} or dict(stock.size)
    expected = stock(images=[image], size=bounds, return_tensors="pt")
    found = processor(image)
    assert torch.equal(found.pixels, expected["pixel_values"]) and found.pixels.dtype == torch.float32
    assert found.pixels.is_contiguous()
    assert [[1, found.grid.rows * 2, found.grid.cols * 2]] == expected["image_grid_thw"].tolist()


@pytest.mark.parametrize("name", QWEN)
def test_qwen_tokens_are_in_raster_order_over_the_merged_grid(checkpoints: dict[str, Path], name: str) -> None:
    processor = load(checkpoints, name)
    side = processor.stock.patch_size * 2
    shades = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    image = Image.fromarray(np.kron(shades, np.ones((side, side), dtype=np.uint8)))
    found = processor(image)
    assert (found.grid.rows, found.grid.cols, found.grid.merge, found.tokens) == (2, 3, 2, 6)
    means = found.pixels.reshape(6, -1).mean(1)
    assert means.tolist() == sorted(means.tolist())


@settings(deadline=None)
@given(
    width=st.integers(1, 900), height=st.integers(1, 900), low=st.integers(1, 40), extra=st.integers(0, 200),
    name=st.sampled_from(QWEN),
)  # fmt: skip
def test_qwen_budget_is_the_stock_resize_in_tokens(
    checkpoints: dict[str, Path], width: int, height: int, low: int, extra: int, name: str
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(width, height) > 200 * min(width, height):
        return
    high = low + extra
    processor = load(checkpoints, name, min_tokens=low, max_tokens=high)
    side = processor.stock.patch_size * 2
    rows, cols = (n // side for n in smart_resize(height, width, side, low * side**2, high * side**2))
    tokens = processor(Image.new("RGB", (width, height))).tokens
    assert tokens == rows * cols
    if high >= 4 * low + 4 and max(width, height) <= high * min(width, height):
        assert low <= tokens <= high  # outside this the stock rounding may miss a bound, see the class


def test_qwen_budget_bounds_alone(checkpoints: dict[str, Path]) -> None:
    big, small = noise(800, 600), noise(30, 30)
    assert load(checkpoints, "qwen2.5-vl")(big).tokens > 40
    assert load(checkpoints, "qwen2.5-vl", max_tokens=40)(big).tokens <= 40
    assert load(checkpoints, "qwen2.5-vl", max_tokens=1)(small).tokens == 1  # below the stock minimum of 4
    assert load(checkpoints, "qwen2.5-vl", min_tokens=100)(small).tokens >= 100  # over the stock maximum of 64
    assert load(checkpoints, "qwen2.5-vl", min_tokens=9, max_tokens=30).describe().startswith("9 to 30 visual tokens")


def test_released_qwen_configuration_with_pixel_bounds(tmp_path: Path) -> None:
    settings = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
                "image_processor_type": "Qwen2VLImageProcessor"}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    family = FAMILIES["qwen2.5-vl"]
    assert ImageProcessor.load(tmp_path, family, None).describe().startswith("4 to 16384 visual tokens")
    assert ImageProcessor.load(tmp_path, family, None, max_tokens=10)(noise(500, 500)).tokens <= 10


@pytest.mark.parametrize(("low", "high", "reason"), [(0, None, "at least 1"), (5, 4, "5 is over maximum 4")])
def test_impossible_budgets(checkpoints: dict[str, Path], low: int, high: int | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load(checkpoints, "qwen3-vl", min_tokens=low, max_tokens=high)


@pytest.mark.parametrize("name", QWEN)
def test_very_thin_image_is_refused_with_its_size(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    Image.new("RGB", (1000, 3)).save(tmp_path / "line.png")
    with pytest.raises(UserError, match=r"line\.png: size 1000x3 .*200"):
        load(checkpoints, name)(tmp_path / "line.png")


@pytest.mark.parametrize(
    ("name", "sentence"), [("internvl3", "4 visual tokens per tile"), ("gemma3", "16 visual tokens per image")]
)
def test_fixed_families_say_that_they_ignore_a_budget(checkpoints: dict[str, Path], name: str, sentence: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} ignores a visual-token budget: {sentence}") as seen:
        processor = load(checkpoints, name, max_tokens=3)
    assert len(seen) == 1
    assert processor.describe().startswith(sentence)
    assert processor(noise(56, 56)).tokens == {"internvl3": 4, "gemma3": 16}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoints, name)


@pytest.mark.parametrize(("rows", "cols"), [(2, 3), (3, 2), (1, 4), (5, 1)])
def test_internvl_tiles_are_in_raster_order_and_the_thumbnail_is_last(
    checkpoints: dict[str, Path], rows: int, cols: int
) -> None:
    processor = load(checkpoints, "internvl3")
    shades = np.arange(rows * cols, dtype=np.uint8).reshape(rows, cols) * 40
    found = processor(Image.fromarray(np.kron(shades, np.ones((56, 56), dtype=np.uint8))))
    grid = found.grid
    assert (grid.tile_rows, grid.tile_cols, grid.thumbnail) == (rows, cols, True)
    assert (grid.rows, grid.cols, grid.merge) == (2, 2, 2)
    assert found.pixels.shape == (rows * cols + 1, 3, 56, 56)
    tiles, thumbnail = found.pixels[:-1], found.pixels[-1]
    means = tiles.mean((1, 2, 3)).tolist()
    assert means == sorted(means) and len(set(means)) == rows * cols
    assert tiles.std((2, 3)).max() < 1e-3 < thumbnail.std((1, 2)).min()


def test_internvl_without_tiles_and_with_one_tile(checkpoints: dict[str, Path]) -> None:
    off = load(checkpoints, "internvl3", tiles=False)
    for found in (off(noise(170, 110)), load(checkpoints, "internvl3")(noise(60, 60))):
        assert found.pixels.shape == (1, 3, 56, 56)
        assert (found.tokens, found.grid.thumbnail) == (4, False)
    assert off.describe() == "4 visual tokens per tile, one tile per image"


def test_gemma_grid(checkpoints: dict[str, Path]) -> None:
    found = load(checkpoints, "gemma3")(noise(300, 40))
    assert found.pixels.shape == (1, 3, 56, 56)
    assert (found.grid.rows, found.grid.cols, found.grid.merge, found.tokens) == (4, 4, 2, 16)


def test_keys_follow_the_content_and_the_grid(checkpoints: dict[str, Path]) -> None:
    processor = load(checkpoints, "qwen2.5-vl")
    image = noise(100, 60)
    assert processor(image).key == processor(encoded(image, "PNG")).key
    assert processor(image).key != processor(noise(100, 60, seed=1)).key
    wide, tall = processor(Image.new("RGB", (112, 56))), processor(Image.new("RGB", (56, 112)))
    assert torch.equal(wide.pixels, tall.pixels)  # flat images: only the grid tells them apart
    assert wide.key != tall.key


def test_configuration_that_contradicts_itself(checkpoints: dict[str, Path]) -> None:
    from transformers import AutoConfig

    for name, field in (("internvl3", "image_seq_length"), ("gemma3", "mm_tokens_per_image")):
        config = AutoConfig.from_pretrained(checkpoints[name])
        setattr(config, field, 9)
        with pytest.raises(UserError, match="9 visual tokens per tile do not fit"):
            ImageProcessor.load(checkpoints[name], FAMILIES[name], config)
    config = AutoConfig.from_pretrained(checkpoints["gemma3"])
    config.vision_config.image_size = 112
    config.mm_tokens_per_image = 64
    with pytest.raises(UserError, match="56x56 tiles, the vision tower expects 112"):
        ImageProcessor.load(checkpoints["gemma3"], FAMILIES["gemma3"], config)


def test_directory_without_a_processor(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the image processor configuration cannot be used"):
        ImageProcessor.load(tmp_path, FAMILIES["qwen2.5-vl"], None)
