"""Pictures of samples with their evidence boxes and the visual tokens those cover, for a person to check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from realvr.backbone.types import Grid
from realvr.data.boxes import preview_grid, token_boxes, token_mask
from realvr.data.image_cache import ImageCache
from realvr.data.sample import Sample

LONGEST = 1600
"""Longest side of a saved picture: an 8K photograph is scaled down, a thumbnail is scaled up."""
SHORTEST = 448
_TOKEN = (255, 170, 0)
_BOX = (230, 20, 60)


def _for_viewing(image: Image.Image) -> Image.Image:
    longest = max(image.size)
    target = min(LONGEST, max(SHORTEST, longest))
    if target == longest:
        return image.copy()
    size = (max(1, round(image.width * target / longest)), max(1, round(image.height * target / longest)))
    return image.resize(size, Image.Resampling.LANCZOS if target < longest else Image.Resampling.NEAREST)


def draw(image: Image.Image, boxes: Sequence[Sequence[float]], grid: Grid) -> Image.Image:
    """The image with covered visual tokens tinted, their cells outlined, and the boxes on top."""
    canvas = _for_viewing(image.convert("RGB"))
    width, height = canvas.size
    tint = Image.new("RGBA", canvas.size, (0, 0, 0, 0))
    pen = ImageDraw.Draw(tint)
    shown = grid.rows * grid.cols * grid.tile_rows * grid.tile_cols
    covered = token_mask(boxes, grid) > 0
    for cell, inside in zip(token_boxes(grid)[:shown], covered[:shown], strict=True):
        corners = [cell[0] * width, cell[1] * height, cell[2] * width - 1, cell[3] * height - 1]
        if inside:
            pen.rectangle(_ordered(corners), fill=(*_TOKEN, 90), outline=(*_TOKEN, 220))
        else:
            pen.rectangle(_ordered(corners), outline=(255, 255, 255, 45))
    canvas = Image.alpha_composite(canvas.convert("RGBA"), tint).convert("RGB")
    pen = ImageDraw.Draw(canvas)
    line = max(2, round(max(canvas.size) / 400))
    for x0, y0, x1, y1 in boxes:
        pen.rectangle(_ordered([x0 * width, y0 * height, x1 * width, y1 * height]), outline=_BOX, width=line)
    return canvas


def _ordered(corners: list[float]) -> tuple[float, float, float, float]:
    """Pillow refuses a rectangle whose end precedes its start, which a cell below one pixel would have."""
    x0, y0, x1, y1 = corners
    return x0, y0, max(x0, x1), max(y0, y1)


def save(
    sample: Sample, number: int, folder: Path, family: str, max_tokens: int, images: ImageCache | None = None
) -> list[Path]:
    """Save every image of a sample as ``NNNN_K.png``; returns the paths."""
    images = images or ImageCache()
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for index, ref in enumerate(sample.images):
        image = images.open(ref)
        boxes = [box.xyxy for box in sample.boxes if box.image == index]
        path = folder / f"{number:04d}_{index}.png"
        draw(image, boxes, preview_grid(family, image.size, max_tokens)).save(path)
        paths.append(path)
    return paths
