"""Random scenes from a numpy generator, in a few styles: easy, full, cluttered and high-resolution."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from realvr.errors import UserError
from realvr.world.scene import BUCKETS, Background, Object, Scene, bucket_of
from realvr.world.words import COLORS, EASY_COLORS, EASY_SHAPES, RARE_COLORS, RARE_SHAPES, SHAPES

T = TypeVar("T")
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
    """Common colors and, less one, common shapes in one scene: few, so that objects share them."""
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


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
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


def _colors(rng: np.random.Generator, style: Style, count: int) -> list[str]:
    if style.vocabulary == "easy":
        easy_colors = len(EASY_COLORS)
        order = rng.permutation(easy_colors)[:count] if count <= easy_colors else rng.integers(easy_colors, size=count)
        return [EASY_COLORS[k] for k in order.tolist()]
    common = rng.permutation(len(COMMON_COLORS))[: style.palette].tolist()
    return [
        RARE_COLORS[int(v * len(RARE_COLORS))] if u < 0.1 else COMMON_COLORS[common[int(v * style.palette)]]
        for u, v in rng.random((count, 2)).tolist()
    ]


def _shapes(rng: np.random.Generator, style: Style, count: int) -> list[tuple[str, str]]:
    """Shape and texture wish of each object."""
    if style.vocabulary == "easy":
        easy_shapes = len(EASY_SHAPES)
        order = rng.permutation(easy_shapes)[:count] if count <= easy_shapes else rng.integers(easy_shapes, size=count)
        return [(EASY_SHAPES[k], "plain") for k in order.tolist()]
    kinds = style.palette - 1
    common = rng.permutation(len(COMMON_SHAPES))[:kinds].tolist()
    looks = []
    for u, v, w in rng.random((count, 3)).tolist():
        shape = RARE_SHAPES[int(v * len(RARE_SHAPES))] if u < 0.2 else COMMON_SHAPES[common[int(v * kinds)]]
        looks.append((shape, "plain" if w < 0.58 else "striped" if w < 0.78 else "dotted" if w < 0.94 else "checkered"))
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


def _reach(vocabulary: str, radius: float) -> float:
    """How far an object may extend from its centre; turned squares reach 1.14 radii."""
    return 1.05 * radius + 0.7 if vocabulary == "easy" else 1.14 * radius + 1.5


def place(style: Style, cell: int, radius: float, u: float, v: float) -> tuple[int, int]:
    """A whole-pixel centre inside a cell, jittered by ``u``, ``v`` in [0, 1) as far as the object fits."""
    width, height = style.width / style.cells[0], style.height / style.cells[1]
    reach = _reach(style.vocabulary, radius)
    row, column = divmod(cell, style.cells[0])
    x = (column + 0.5) * width + (2 * u - 1) * max(0.0, width / 2 - reach)
    y = (row + 0.5) * height + (2 * v - 1) * max(0.0, height / 2 - reach)
    return math.floor(x), math.floor(y)


def settle(scene: Scene, item: Object) -> Object:
    """The object moved as little as needed to lie inside the cell that holds its centre."""
    reach = _reach(scene.vocabulary, item.radius)
    spot = []
    for at, cell, count, length in zip((item.x, item.y), scene.cell(item), scene.grid, scene.size, strict=True):
        middle = (cell + 0.5) * length / count
        room = max(0.0, length / count / 2 - reach)
        spot.append(math.floor(min(max(at, middle - room), middle + room)))
    return replace(item, x=spot[0], y=spot[1])


def _overlap(rng: np.random.Generator, scene: Scene) -> Scene:
    """Push two neighbours of different color, made solid, together until one clearly hides part of the other."""
    cells = {scene.cell(item): k for k, item in enumerate(scene.objects)}
    pairs = [(k, cells[n]) for (c, r), k in cells.items() for n in ((c + 1, r), (c, r + 1)) if n in cells]
    pairs = [(i, j) for i, j in pairs if scene.objects[i].color != scene.objects[j].color]
    if not pairs:
        return scene
    i, j = pick(rng, pairs)
    # Both get the smaller size: about a quarter of the lower one is hidden then, and size does not tell which it is.
    smaller = min(scene.objects[i], scene.objects[j], key=lambda item: item.radius)
    a, b = (_solid(rng, scene.objects[k], smaller.size, smaller.radius) for k in (i, j))
    distance = math.hypot(b.x - a.x, b.y - a.y)
    # The inscribed circles of the solid shapes have at least 0.82 of the radius: at 0.62 they overlap by a fifth.
    wanted = 0.62 * (a.radius + b.radius)
    pull = (distance - wanted) / 2 / distance
    dx, dy = round((b.x - a.x) * pull), round((b.y - a.y) * pull)
    objects = list(scene.objects)
    objects[i], objects[j] = replace(a, x=a.x + dx, y=a.y + dy), replace(b, x=b.x - dx, y=b.y - dy)
    return replace(scene, objects=tuple(objects))


def _solid(rng: np.random.Generator, item: Object, size: str, radius: float) -> Object:
    """The object in a solid shape and in the given size."""
    shape = item.shape if item.shape in SOLID else pick(rng, SOLID)
    texture = item.texture if shows(shape, size, radius, item.texture) else "plain"
    rotation = item.rotation if shape == item.shape else 0
    return replace(item, shape=shape, texture=texture, rotation=rotation, size=size, radius=radius)


def _arrange(rng: np.random.Generator, style: Style, buckets: Container[int]) -> tuple[list[int], list[str]]:
    """Cells and colors of the objects, which decide the bucket: cheap to draw again until it is one of ``buckets``."""
    columns, rows = style.cells
    while True:
        count = int(rng.integers(style.objects[0], style.objects[1] + 1))
        cells: list[int] = rng.permutation(columns * rows)[:count].tolist()
        colors = _colors(rng, style, count)
        places = ((cell % columns, cell // columns, color) for cell, color in zip(cells, colors, strict=True))
        if buckets is ANY_BUCKET or bucket_of(places) in buckets:
            return cells, colors


def sample_scene(rng: np.random.Generator, style: Style, buckets: Container[int] = ANY_BUCKET) -> Scene:
    """A random scene that falls into one of ``buckets``."""
    while True:
        cells, colors = _arrange(rng, style, buckets)
        chances = rng.random((len(cells), 5)).tolist()
        objects = []
        for cell, color, (shape, texture), u in zip(
            cells, colors, _shapes(rng, style, len(cells)), chances, strict=True
        ):
            size, radius = _size(style, u[0])
            texture = texture if shows(shape, size, radius, texture) else "plain"
            x, y = place(style, cell, radius, u[1], u[2])
            objects.append(Object(shape, color, x, y, radius, size, texture, _rotation(style, shape, u[3], u[4])))
        scene = Scene(
            style.width, style.height, tuple(objects), sample_background(rng, style), style.cells, (), style.vocabulary
        )
        if style.overlap and rng.random() < style.overlap:
            scene = _overlap(rng, scene)
        # Objects that were pushed together may have left their cells.
        if buckets is ANY_BUCKET or scene.bucket() in buckets:
            return scene
