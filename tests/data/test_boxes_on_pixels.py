"""The box rule against the stock image processors: the tokens a box covers are the tokens whose pixels it touches."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from realvr.data.boxes import token_mask
from realvr.families import FAMILIES
from realvr.imaging.processing import ImageProcessor

torch = pytest.importorskip("torch")


def processor(family: str) -> ImageProcessor:
    """A stock processor with its default settings, shrunk where it has a fixed size."""
    import importlib

    module, name = FAMILIES[family].image_processor.split(":")
    stock = getattr(importlib.import_module(module), name)
    if FAMILIES[family].variable_grid:
        return ImageProcessor(FAMILIES[family], stock(), None, 4, 400)
    if family == "internvl3":
        shrunk = stock(size={"height": 64, "width": 64}, crop_to_patches=True, min_patches=1, max_patches=12)
        return ImageProcessor(FAMILIES[family], shrunk, 64, merge=2)
    return ImageProcessor(FAMILIES[family], stock(size={"height": 64, "width": 64}), 64, merge=2)


def token_brightness(pixels: np.ndarray, grid, variable: bool) -> np.ndarray:
    """(N,) largest rise over the background within each visual token's pixels."""
    if variable:  # (patches, values), the merge*merge patches of a token next to each other
        return pixels.max(axis=1).reshape(grid.tokens, -1).max(axis=1)
    tiles, _, height, width = pixels.shape
    cells = pixels.max(axis=1).reshape(tiles, grid.rows, height // grid.rows, grid.cols, width // grid.cols)
    return cells.max(axis=(2, 4)).reshape(-1)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "internvl3", "gemma3"])
@pytest.mark.parametrize("size", [(448, 336), (640, 224), (200, 600)])
def test_covered_tokens_are_the_bright_ones(family: str, size: tuple[int, int]) -> None:
    process = processor(family)
    black = process(Image.new("RGB", size))
    width, height = size
    for x0, y0, x1, y1 in (
        (0.05, 0.1, 0.2, 0.3),
        (0.4, 0.35, 0.75, 0.6),
        (0.8, 0.7, 1.0, 1.0),
        (0.45, 0.0, 0.55, 0.95),
    ):
        box = (round(x0 * width), round(y0 * height), round(x1 * width), round(y1 * height))
        image = Image.new("RGB", size)
        image.paste((255, 255, 255), box)
        shown = process(image)
        grid = shown.grid
        rise = token_brightness((shown.pixels - black.pixels).numpy(), grid, FAMILIES[family].variable_grid)
        mask = token_mask([(box[0] / width, box[1] / height, box[2] / width, box[3] / height)], grid, fractional=True)
        tokens = grid.rows * grid.cols * grid.tile_rows * grid.tile_cols
        # Resizing blurs an edge by a pixel or two, so tokens that the box barely touches, or barely misses, may differ.
        full = float(rise.max())
        assert (rise[:tokens][mask[:tokens] > 0.3] > 0.5 * full).all(), "a covered token shows the box"
        bright = rise[:tokens] > 0.9 * full
        assert (mask[:tokens][bright] > 0).all(), "a fully bright token is covered"
        assert bright.any() and not bright.all()
