"""Pictures of samples with their evidence boxes and the visual tokens those cover, for a person to check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from realvr.data.boxes import token_boxes, token_mask
from realvr.data.sample import LETTERS, Sample
from realvr.imaging.cache import ImageCache
from realvr.imaging.drawing import wrapped
from realvr.imaging.types import Grid

LONGEST = 1600
"""Longest side of a saved picture: an 8K photograph is scaled down, a thumbnail is scaled up."""
SHORTEST = 448
_TOKEN = (255, 170, 0)
_BOX = (230, 20, 60)
_TEXT = (20, 20, 20)
_MARGIN = 8
TEXT_LINES = 24
"""Most lines of text under a picture."""


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


def text_of(sample: Sample) -> list[str]:
    """What is written under a picture: the question, its options with the answer marked, or the free answer."""
    lines = sample.question.split("\n")
    for letter, choice in zip(LETTERS, sample.choices, strict=False):
        lines.append(f"({letter}) {choice}" + ("   <- answer" if letter == sample.answer else ""))
    return lines if sample.choices else [*lines, f"Answer: {sample.answer}"]


def caption(picture: Image.Image, lines: Sequence[str]) -> Image.Image:
    """The picture on a strip of its own width with the text under it, broken into lines that fit."""
    size = max(13, round(picture.width / 55))
    font = ImageFont.load_default(size)
    pen = ImageDraw.Draw(picture)
    fitting = [part for line in lines for part in wrapped(line, picture.width - 2 * _MARGIN, font, pen)]
    if len(fitting) > TEXT_LINES:
        fitting = [*fitting[: TEXT_LINES - 1], "…"]
    step = round(size * 1.35)
    canvas = Image.new("RGB", (picture.width, picture.height + step * len(fitting) + 2 * _MARGIN), (255, 255, 255))
    canvas.paste(picture, (0, 0))
    pen = ImageDraw.Draw(canvas)
    for number, line in enumerate(fitting):
        pen.text((_MARGIN, picture.height + _MARGIN + number * step), line, fill=_TEXT, font=font)
    return canvas


def save(
    sample: Sample,
    number: int,
    folder: Path,
    grid_of: Callable[[Image.Image], Grid],
    images: ImageCache | None = None,
) -> list[Path]:
    """Save every image of a sample as ``NNNN_K.png``, with the question under it; returns the paths."""
    images = images or ImageCache()
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for index, ref in enumerate(sample.images):
        image = images.open(ref)
        boxes = [box.xyxy for box in sample.boxes if box.image == index]
        path = folder / f"{number:04d}_{index}.png"
        caption(draw(image, boxes, grid_of(image)), text_of(sample)).save(path)
        paths.append(path)
    return paths
