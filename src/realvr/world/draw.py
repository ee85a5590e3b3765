"""Scenes to pixels, deterministically.

Every object is stamped inside its own box: outside the pixels its (smoothed) outline touches nothing is written, and
nothing it writes depends on another object, so an edit can only change pixels of the edited objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from realvr.world.scene import Background, Mark, Object, Scene
from realvr.world.shapes import Outline, extent, hole, outline, rotated
from realvr.world.words import COLORS

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLANK = (0, 0, 0)


@dataclass(frozen=True)
class Stamp:
    """One object's look before color: ``cover`` (h, w) in [0, 1] is how much of a pixel it fills, ``inner`` where it is
    not outline, ``pattern`` where the second tone of its texture shows. Centred: h = w = 2 * half + 1."""

    cover: Floats
    inner: Floats
    pattern: Floats
    half: int


def _fill(points: Outline, cut: Outline, degrees: float, radius: float, half: int) -> Floats:
    """Coverage of a polygon with a hole, by drawing it enlarged and averaging."""
    scale = 4 if half <= 64 else 2
    side = (2 * half + 1) * scale
    canvas = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(canvas)
    centre = side / 2 - 0.5
    for outline_points, value in ((points, 255), (cut, 0)):
        if outline_points:
            turned = rotated(outline_points, degrees, radius * scale)
            pen.polygon([(centre + x, centre + y) for x, y in turned], fill=value)
    small = canvas.reduce(scale)
    return np.asarray(small, np.float32) / np.float32(255)


def _pattern(texture: str, half: int, radius: float) -> Floats:
    """Where the second tone of a texture shows, in the object's own frame."""
    side = 2 * half + 1
    if texture == "plain":
        return np.zeros((side, side), np.float32)
    axis = np.arange(side, dtype=np.float32) - half
    period = max(5.0, round(radius * 0.55))
    y, x = axis[:, None], axis[None, :]
    if texture == "striped":
        phase = (x + y) / period
        return (np.mod(phase, 1.0) < 0.45).astype(np.float32)
    if texture == "checkered":
        return ((np.floor(x / period + 0.5) + np.floor(y / period + 0.5)) % 2).astype(np.float32)
    dx, dy = np.mod(x + period / 2, period) - period / 2, np.mod(y + period / 2, period) - period / 2
    return (dx * dx + dy * dy < max(1.6, (0.28 * period) ** 2)).astype(np.float32)


@lru_cache(maxsize=8192)
def stamp(shape: str, radius: float, rotation: int, texture: str) -> Stamp:
    """The look of a shape; cached, because most objects of a size share it."""
    left, top, right, bottom = extent(shape, radius, rotation)
    half = int(np.ceil(max(-left, -top, right, bottom))) + 1
    cover = _fill(outline(shape), hole(shape), rotation, radius, half)
    if texture == "flat":  # no rim: for shapes so small that it would be most of them
        return Stamp(cover, cover, _pattern("plain", half, radius), half)
    # A rim of about a pixel separates an object from what lies under it. The ring's hole grows as its outline shrinks.
    rim = max(1.0, radius * 0.09)
    shrink = 1 - rim / radius
    cut = tuple((x / shrink * (1 + rim / radius * 2), y / shrink * (1 + rim / radius * 2)) for x, y in hole(shape))
    inner = _fill(outline(shape), cut, rotation, radius * shrink, half)
    return Stamp(cover, np.minimum(inner, cover), _pattern(texture, half, radius), half)


def tones(item: Object) -> tuple[Floats, Floats, Floats]:
    """Fill, second tone of the texture, and rim, as float RGB."""
    fill = np.asarray(COLORS[item.color], np.float32) * np.float32(item.shade)
    # The second tone stays clearly of the same color: white must not turn gray, nor black white.
    light = float(fill.mean()) > 128
    if light:
        second = fill * np.float32(0.74 if item.color == "white" else 0.45)
    else:
        second = fill + (255 - fill) * np.float32(0.4 if item.color == "black" else 0.62)
    rim = fill * np.float32(0.4) if item.color != "black" else np.full(3, 118, np.float32)
    return fill, second, rim


def _window(scene: Scene, item: Object, half: int) -> tuple[slice, slice, slice, slice]:
    """Slices of the canvas and of the stamp where the two overlap."""
    x0, y0 = item.x - half, item.y - half
    cx0, cy0 = max(x0, 0), max(y0, 0)
    cx1, cy1 = min(item.x + half + 1, scene.width), min(item.y + half + 1, scene.height)
    return slice(cy0, cy1), slice(cx0, cx1), slice(cy0 - y0, cy1 - y0), slice(cx0 - x0, cx1 - x0)


@lru_cache(maxsize=8192)
def _inked(shape: str, color: str, radius: float, rotation: int, texture: str, shade: float) -> tuple[Stamp, Floats]:
    """A stamp and its pixels (h, w, 3), before they are laid over what is there."""
    look = stamp(shape, radius, rotation, texture)
    fill, second, rim = tones(Object(shape, color, 0, 0, radius, shade=shade))
    ink = fill if texture in ("plain", "flat") else fill + (second - fill) * look.pattern[:, :, None]
    if texture == "flat":
        return look, np.broadcast_to(ink, (*look.cover.shape, 3))
    return look, rim + (ink - rim) * look.inner[:, :, None]


def _paint(canvas: Pixels, scene: Scene, item: Object) -> None:
    look, ink = _inked(item.shape, item.color, item.radius, item.rotation, item.texture, item.shade)
    rows, cols, srows, scols = _window(scene, item, look.half)
    cover, color = look.cover[srows, scols, None], ink[srows, scols]
    under = canvas[rows, cols]
    canvas[rows, cols] = (under + (color - under) * cover + np.float32(0.5)).astype(np.uint8)


def _background(background: Background, width: int, height: int) -> Pixels:
    """A small pattern blown up to the canvas: cheap at any size, and low in contrast so that objects stand out."""
    rng = np.random.default_rng(background.seed)
    mix: NDArray[Any]
    if background.kind == "gradient":
        mix, how = rng.permutation(np.array([0.0, 0.35, 0.65, 1.0])).reshape(2, 2), Image.Resampling.BILINEAR
    elif background.kind == "noise":
        mix, how = rng.random((7, 7)), Image.Resampling.BILINEAR
    elif background.kind == "stripes":
        mix, how = np.tile(np.array([[0.0, 0.8]]), (1, int(rng.integers(3, 6)))), Image.Resampling.NEAREST
    elif background.kind == "tiles":
        count = int(rng.integers(4, 8))
        mix, how = (np.indices((count, count)).sum(0) % 2) * 0.8, Image.Resampling.NEAREST
    else:
        return np.broadcast_to(np.asarray(background.base, np.uint8), (height, width, 3)).copy()
    base, accent = np.asarray(background.base, np.float64), np.asarray(background.accent, np.float64)
    small = (base + (accent - base) * mix[..., None] + 0.5).astype(np.uint8)
    return np.array(Image.fromarray(small).resize((width, height), how))


@lru_cache(maxsize=16)
def font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's own font, so that no font file of the machine matters."""
    return ImageFont.load_default(size)


def _mark(canvas: Image.Image, mark: Mark) -> None:
    pen = ImageDraw.Draw(canvas)
    x0, y0, x1, y1 = mark.box
    if mark.kind == "hole":
        pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=BLANK)
        return
    if mark.kind == "frame":
        pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=(60, 60, 60), width=max(1, (x1 - x0) // 40))
        return
    pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=(255, 255, 255), outline=(0, 0, 0))
    middle, letters = ((x0 + x1) / 2, (y0 + y1) / 2), font(max(8, int((y1 - y0) * 0.85)))
    pen.text(middle, mark.text, fill=(0, 0, 0), font=letters, anchor="mm")


def render(scene: Scene) -> Pixels:
    """The picture, (height, width, 3) uint8."""
    canvas = _background(scene.background, scene.width, scene.height)
    for item in scene.objects:
        _paint(canvas, scene, item)
    if scene.marks:
        picture = Image.fromarray(canvas)
        for mark in scene.marks:
            _mark(picture, mark)
        canvas = np.array(picture)
    return canvas


@dataclass(frozen=True)
class Mask:
    """Pixels of one object inside the window that starts at (x, y) of the canvas; ``pixels`` is (h, w) bool."""

    x: int
    y: int
    pixels: NDArray[np.bool_]

    def full(self, scene: Scene) -> NDArray[np.bool_]:
        """The mask on the whole canvas, (height, width)."""
        out = np.zeros((scene.height, scene.width), bool)
        height, width = self.pixels.shape
        out[self.y : self.y + height, self.x : self.x + width] = self.pixels
        return out

    def box(self) -> tuple[int, int, int, int] | None:
        """Tight box of the pixels on the canvas, or None when there are none."""
        ys, xs = np.nonzero(self.pixels)
        if not len(ys):
            return None
        return self.x + int(xs.min()), self.y + int(ys.min()), self.x + int(xs.max()) + 1, self.y + int(ys.max()) + 1


def mask(scene: Scene, index: int, *, touched: bool = False) -> Mask:
    """Pixels of one object, whether or not something covers them.

    ``touched`` counts every pixel the smoothed outline reaches, otherwise those it fills at least half.
    """
    item = scene.objects[index]
    look = stamp(item.shape, item.radius, item.rotation, item.texture)
    rows, cols, srows, scols = _window(scene, item, look.half)
    cover = look.cover[srows, scols]
    return Mask(cols.start, rows.start, cover > 0 if touched else cover >= 0.5)


def visible_mask(scene: Scene, index: int) -> Mask:
    """Pixels of one object that no later object covers."""
    own = mask(scene, index)
    pixels = own.pixels.copy()
    height, width = pixels.shape
    for other in range(index + 1, len(scene.objects)):
        top = mask(scene, other)
        x0, y0 = max(own.x, top.x), max(own.y, top.y)
        x1 = min(own.x + width, top.x + top.pixels.shape[1])
        y1 = min(own.y + height, top.y + top.pixels.shape[0])
        if x0 < x1 and y0 < y1:
            covered = top.pixels[y0 - top.y : y1 - top.y, x0 - top.x : x1 - top.x]
            pixels[y0 - own.y : y1 - own.y, x0 - own.x : x1 - own.x] &= ~covered
    return Mask(own.x, own.y, pixels)
