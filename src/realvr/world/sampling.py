"""Random scenes from a numpy generator, in a few styles: easy, full, cluttered and high-resolution."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from realvr.errors import UserError
from realvr.world.scene import BUCKETS, Background, Object, Scene
from realvr.world.words import COLORS, EASY_COLORS, EASY_SHAPES, RARE_COLORS, RARE_SHAPES, SHAPES

ANY_BUCKET = range(BUCKETS)
COMMON_COLORS = tuple(name for name in COLORS if name not in RARE_COLORS and name != "gray")
COMMON_SHAPES = tuple(name for name in SHAPES if name not in RARE_SHAPES)
BACKGROUNDS = ("flat", "gradient", "noise", "stripes", "tiles")
SOLID = ("circle", "square", "hexagon")
"""Shapes whose overlap is plain to see wherever they meet."""

SMALL, LARGE = 0.265, 0.41
"""Radius of a small and a large object as a fraction of its cell."""


@dataclass(frozen=True)
class Style:
    """How scenes of one kind look. ``cells`` is (columns, rows); ``objects`` is (fewest, most)."""

    name: str
    width: int
    height: int
    cells: tuple[int, int]
    objects: tuple[int, int]
    palette: int = 4
    """Common colors and, less one, common shapes in one scene: few, so that objects share them and must be told apart."""
    overlap: float = 0.0
    """Chance that two neighbours are pushed over each other."""
    vocabulary: str = "full"
    """``easy``: plain, upright objects in eight colors and eight shapes, all different where there are enough."""

    @property
    def cell(self) -> float:
        """Side of the largest square that fits a layout cell, in pixels."""
        return min(self.width / self.cells[0], self.height / self.cells[1])


def easy(side: int = 48) -> Style:
    """The curriculum: 3 x 3 cells, 3 to 5 plain objects, no two of one color or one shape."""
    return Style("easy", side, side, (3, 3), (3, 5), vocabulary="easy")


def full(side: int = 128) -> Style:
    """The whole world: shared colors and shapes, two sizes, textures, rare attributes, overlaps."""
    return Style("full", side, side, (4, 4), (5, 9), overlap=0.35)


def clutter(width: int = 640, height: int = 480) -> Style:
    """Many objects, as in MME-RealWorld; on a small canvas fewer, in the easy vocabulary."""
    if min(width, height) <= 128:
        return Style("clutter", width, height, (4, 4), (9, 12), vocabulary="easy")
    return Style("clutter", width, height, (8, 6), (22, 32), palette=6)


def huge(width: int = 3840, height: int = 2160) -> Style:
    """Tiny objects, far apart, as in HR-Bench; on a small canvas fewer, in the easy vocabulary."""
    if max(width, height) < 2000:
        return Style("huge", width, height, (4, 4), (5, 8), vocabulary="easy")
    return Style("huge", width, height, (16, 9), (28, 48), palette=6)


def style_for(width: int, height: int | None = None) -> Style:
    """The single-scene style that suits a canvas: easy up to 64 pixels, full up to 512, huge from 2,000."""
    height = height or width
    if min(width, height) < 36 or max(width, height) > 8192:
        raise UserError(f"canvas {width}x{height}: sides must lie between 36 and 8192 pixels")
    if max(width, height) <= 64:
        return replace(easy(), width=width, height=height)
    if max(width, height) >= 2000:
        return huge(width, height)
    return replace(full(), width=width, height=height)


def pick(rng: np.random.Generator, options):  # type: ignore[no-untyped-def]
    """One element of a sequence; `Generator.choice` costs ten times as much."""
    return options[int(rng.integers(len(options)))]


def sample_background(rng: np.random.Generator, style: Style) -> Background:
    """Muted, light or dark, never close to an object's color."""
    kind = pick(rng, BACKGROUNDS[:3] if style.name == "easy" else BACKGROUNDS)
    dark = rng.random() < 0.3
    level = rng.integers(44, 62) if dark else rng.integers(196, 226)
    tint = rng.integers(-9, 10, 3)
    base = tuple(int(level + t) for t in tint)
    step = int(rng.integers(12, 20)) * (1 if dark else -1)
    accent = tuple(int(level + step + t) for t in rng.permutation(tint))
    return Background(kind, base, accent, int(rng.integers(2**31)))  # type: ignore[arg-type]


def _looks(rng: np.random.Generator, style: Style, count: int) -> list[tuple[str, str, str]]:
    """Shape, color and texture wish of each object."""
    if style.vocabulary == "easy":
        distinct = count <= len(EASY_SHAPES)
        shapes = rng.permutation(len(EASY_SHAPES))[:count] if distinct else rng.integers(len(EASY_SHAPES), size=count)
        colors = rng.permutation(len(EASY_COLORS))[:count] if distinct else rng.integers(len(EASY_COLORS), size=count)
        return [(EASY_SHAPES[s], EASY_COLORS[c], "plain") for s, c in zip(shapes, colors, strict=True)]
    some_colors = rng.permutation(len(COMMON_COLORS))[: style.palette]
    some_shapes = rng.permutation(len(COMMON_SHAPES))[: style.palette - 1]
    looks = []
    for a, b, c, d, e in rng.random((count, 5)).tolist():
        rare_color, rare_shape = a < 0.1, b < 0.2
        color = RARE_COLORS[int(c * len(RARE_COLORS))] if rare_color else COMMON_COLORS[some_colors[int(c * style.palette)]]
        shape = RARE_SHAPES[int(d * 3)] if rare_shape else COMMON_SHAPES[some_shapes[int(d * (style.palette - 1))]]
        texture = "plain" if e < 0.58 else "striped" if e < 0.78 else "dotted" if e < 0.94 else "checkered"
        looks.append((shape, color, texture))
    return looks


def _size(style: Style, u: float) -> tuple[str, float]:
    """Size word and radius in pixels, in half pixels so that stamps repeat."""
    if style.name == "huge":
        low, high = style.cell * 0.04, style.cell * 0.22
        return "", max(4, round(low * (high / low) ** u))
    if style.vocabulary == "easy":
        return "", round(style.cell * 0.37 * 2) / 2
    name, share = ("small", SMALL) if u < 0.5 else ("large", LARGE)
    return name, round(style.cell * share * 2) / 2


def shows(shape: str, size: str, radius: float, texture: str) -> bool:
    """Whether a person could make out this texture on the object, and the shape through it."""
    if texture == "plain":
        return True
    if shape == "arrow" or radius < 8:
        return False
    if size != "large":
        return shape in ("circle", "square") and (size == "small" or radius >= 14)
    return texture != "dotted" or shape not in ("moon", "ring", "star")


def _rotation(style: Style, shape: str, u: float, v: float) -> int:
    if style.vocabulary == "easy" or shape in ("circle", "ring"):
        return 0
    return 5 * (int(u * 5) - 2) + (90 * int(v * 4) if shape == "arrow" else 0)


def place(style: Style, cell: int, radius: float, u: float, v: float) -> tuple[int, int]:
    """A whole-pixel centre inside a cell, jittered by ``u``, ``v`` in [0, 1) as far as the object fits.

    Turned squares reach 1.14 radii.
    """
    width, height = style.width / style.cells[0], style.height / style.cells[1]
    reach = 1.05 * radius + 0.7 if style.vocabulary == "easy" else 1.14 * radius + 1.5
    row, column = divmod(cell, style.cells[0])
    x = (column + 0.5) * width + (2 * u - 1) * max(0.0, width / 2 - reach)
    y = (row + 0.5) * height + (2 * v - 1) * max(0.0, height / 2 - reach)
    return math.floor(x), math.floor(y)


def _overlap(rng: np.random.Generator, scene: Scene) -> Scene:
    """Push two neighbours of different color, made solid, together until one clearly hides part of the other."""
    cells = {scene.cell(item): k for k, item in enumerate(scene.objects)}
    pairs = [(k, cells[n]) for (c, r), k in cells.items() for n in ((c + 1, r), (c, r + 1)) if n in cells]
    pairs = [(i, j) for i, j in pairs if scene.objects[i].color != scene.objects[j].color]
    if not pairs:
        return scene
    i, j = pick(rng, pairs)
    a, b = _solid(rng, scene.objects[i]), _solid(rng, scene.objects[j])
    distance = math.hypot(b.x - a.x, b.y - a.y)
    # The inscribed circles of the solid shapes have at least 0.82 of the radius: at 0.62 they overlap by a fifth.
    wanted = 0.62 * (a.radius + b.radius)
    pull = (distance - wanted) / 2 / distance
    dx, dy = round((b.x - a.x) * pull), round((b.y - a.y) * pull)
    objects = list(scene.objects)
    objects[i], objects[j] = replace(a, x=a.x + dx, y=a.y + dy), replace(b, x=b.x - dx, y=b.y - dy)
    return replace(scene, objects=tuple(objects))


def _solid(rng: np.random.Generator, item: Object) -> Object:
    if item.shape in SOLID:
        return item
    shape = pick(rng, SOLID)
    texture = item.texture if shows(shape, item.size, item.radius, item.texture) else "plain"
    return replace(item, shape=shape, texture=texture, rotation=0)


def _sample(rng: np.random.Generator, style: Style) -> Scene:
    columns, rows = style.cells
    count = int(rng.integers(style.objects[0], style.objects[1] + 1))
    cells = rng.permutation(columns * rows)[:count].tolist()
    chances = rng.random((count, 5)).tolist()
    objects = []
    for cell, (shape, color, texture), u in zip(cells, _looks(rng, style, count), chances, strict=True):
        size, radius = _size(style, u[0])
        texture = texture if shows(shape, size, radius, texture) else "plain"
        x, y = place(style, cell, radius, u[1], u[2])
        objects.append(Object(shape, color, x, y, radius, size, texture, _rotation(style, shape, u[3], u[4])))
    scene = Scene(style.width, style.height, tuple(objects), grid=style.cells, vocabulary=style.vocabulary)
    return _overlap(rng, scene) if style.overlap and rng.random() < style.overlap else scene


def sample_scene(rng: np.random.Generator, style: Style, buckets: Container[int] = ANY_BUCKET) -> Scene:
    """A random scene whose layout falls into one of ``buckets``."""
    while True:
        scene = _sample(rng, style)
        if buckets is ANY_BUCKET or scene.bucket() in buckets:
            return replace(scene, background=sample_background(rng, style))
