"""Pictures of a prompt that have as many visual tokens as a workload asks for, or as near as whole tiles come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from realvr.imaging.processing import ImageProcessor

Way = tuple[int, int, int]
"""How many pictures, their width and their height."""


def pictures(processor: ImageProcessor, grid: tuple[int, int]) -> Way:
    """Pictures for rows x columns of visual tokens: one where the family follows the size of a picture, otherwise as
    few as have that many tiles. What they really have is counted by the processor."""
    if processor.family.variable_grid:
        side = processor.stock.patch_size * processor.merge
        return 1, grid[1] * side, grid[0] * side
    wanted = grid[0] * grid[1]
    ways = sorted(_tiled(processor, wanted), key=lambda way: (abs(way[1] - wanted), way[0][0], way[2]))
    return next(way for way, expected, _ in ways if counted(processor, way) == expected)


def counted(processor: ImageProcessor, way: Way) -> int:
    """Visual tokens of all of them."""
    count, width, height = way
    return count * processor(Image.new("RGB", (width, height))).tokens


def _tiled(processor: ImageProcessor, wanted: int) -> Iterator[tuple[Way, int, int]]:
    """Pictures of whole tiles, a thumbnail behind several ones: the tokens that all of them should have, and how far
    the layout is from a square."""
    each, side = processor.tokens_per_tile or 1, int(processor.stock.size["width"])
    most = processor.max_tiles if processor.tiles else 1
    for rows in range(1, most + 1):
        for cols in range(1, most // rows + 1):
            tokens = each * (rows * cols + (rows * cols > 1))
            count = max(1, round(wanted / tokens))
            yield (count, cols * side, rows * side), count * tokens, abs(rows - cols)


def noise(seed: int, width: int, height: int) -> Image.Image:
    """A picture of noise, the same one for the same seed."""
    shades = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    return Image.fromarray(shades).convert("RGB")
