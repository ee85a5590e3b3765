"""Visual tokens of single pictures, by stock transformers alone: what evidence must point at.

Nothing here imports ``realvr``.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor


@torch.no_grad()
def picture_tokens(model: Any, processor: Any, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
    """(N, D) tokens of one picture, encoded alone, and (rows, columns) of its grid: those of one tile where the
    processor cuts tiles, which stand in raster order with the thumbnail at the end."""
    tiled = hasattr(processor, "max_patches")
    out = processor(images=[image], return_tensors="pt", **({"crop_to_patches": True} if tiled else {}))
    grid = {"image_grid_thw": out["image_grid_thw"]} if "image_grid_thw" in out else {}
    pixels = out["pixel_values"].to(model.device, model.dtype)
    found = model.model.get_image_features(pixel_values=pixels, return_dict=True, **grid).pooler_output
    parts = [found] if isinstance(found, Tensor) else list(found)
    tokens = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).float().cpu()
    if grid:
        merge = processor.merge_size
        _, rows, cols = (int(n) for n in out["image_grid_thw"][0])
        return tokens, (rows // merge, cols // merge)
    side = round((len(tokens) / len(pixels)) ** 0.5)
    return tokens, (side, side)


def corner(tokens: int, grid: tuple[int, int], last: bool) -> int:
    """Token of the picture's upper left or lower right corner: first of the first tile, last of the last tile."""
    per_tile = grid[0] * grid[1]
    tiles = tokens // per_tile
    shown = tiles - 1 if tiles > 1 else 1  # several tiles are followed by the thumbnail
    return shown * per_tile - 1 if last else 0
