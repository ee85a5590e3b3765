"""A walk as a picture: the path of z_1 … z_K through the visual tokens, or a heat map per latent for fine grids.

Pillow only, drawn enlarged and scaled down, so that lines are smooth. Path and numbers have a halo: they can be read on
light and dark pictures alike. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from realvr.data.boxes import canvas_size
from realvr.imaging.drawing import (
    FAINT,
    GAP,
    PAPER,
    RGB,
    Pen,
    Point,
    Rectangle,
    beside,
    column,
    enlarged,
    framed,
    paragraph,
    titled,
)
from realvr.imaging.types import Grid
from realvr.latent.walk import Place, Walk

FINE = 12
"""A grid with more rows or columns than this is fine: its walk also gets heat maps."""
PATH, PUT = (236, 0, 140), (0, 92, 214)
"""Colors of the walk, and of latents that were put there from outside."""
_INK, _TRACK, _HALO = (24, 24, 27), (228, 228, 231), (255, 255, 255)
_SIDE, _FINE_SIDE, _SEVERAL_SIDE = 576, 872, 432
"""Longest side of a picture as it is drawn, in pixels: with a coarse grid, with a fine one, beside others."""
_HEAT_COLUMNS, _LEAST_WIDTH, _TEXT_LINES = 4, 420, 10
_HEAT = ((13, 8, 64), (106, 23, 110), (188, 55, 84), (243, 120, 25), (252, 220, 105), (252, 255, 214))


def draw_walk(
    pictures: Image.Image | Sequence[Image.Image],
    walk: Walk,
    *,
    question: str = "",
    answer: str = "",
    heading: str = "",
    put: Collection[int] = (),
    heat: bool | None = None,
    strip: bool = True,
    side: int | None = None,
) -> Image.Image:
    """The pictures of a prompt, in its order, with the walk drawn in; below them the cosines, question and answer.
    ``heading`` is a line above all of it.

    ``put`` are the steps, counted from 1, whose latents were replaced. ``heat`` adds a map of the cosines with all
    visual tokens for every latent; by default for grids of more than `FINE` rows or columns. ``strip`` is the list of
    cosines. Without it and without texts, a single picture comes back as large as it is drawn, without margins.
    ``side`` is the longest side of a picture, in pixels.
    """
    shown = [pictures] if isinstance(pictures, Image.Image) else list(pictures)
    if len(shown) != len(walk.grids):
        raise ValueError(f"{len(shown)} pictures for a walk over {len(walk.grids)}")
    fine = any(_is_fine(grid) for grid in walk.grids) if heat is None else heat
    side = side or (_FINE_SIDE if fine else _SIDE if len(shown) == 1 else _SEVERAL_SIDE)
    views = [enlarged(picture.convert("RGB"), side) for picture in shown]
    stops = _stops(walk, put)
    traced = [_traced(view, walk.grids[image], stops, image) for image, view in enumerate(views)]
    if len(traced) == 1 and not (strip or question or answer or heading or fine):
        return traced[0]
    ruled = [_ruled(one, grid) for one, grid in zip(traced, walk.grids, strict=True)]
    if len(ruled) > 1:
        ruled = [titled(one, f"picture {number}") for number, one in enumerate(ruled, 1)]
    blocks = list(_rows(ruled, 1 if fine else 2 if len(ruled) < 5 else 3))
    if fine:
        for image, picture in enumerate(shown):
            of = f" of picture {image + 1}" if len(shown) > 1 else ""
            heading = f"cosine with every visual token{of}: from the lowest of each latent (dark) to its highest (pale)"
            blocks.append(titled(_heat_maps(picture, walk, image, put), heading))
    width = max(_LEAST_WIDTH, *(block.width for block in blocks))
    if strip and len(walk):
        blocks.append(_strip(walk, put, width))
    if question or answer:
        blocks.append(_caption(question, answer, width))
    body = column(blocks)
    for line in reversed(paragraph(heading, width, 13) if heading else []):
        body = titled(body, line)
    return framed(body, width)


def _is_fine(grid: Grid) -> bool:
    return max(canvas_size(grid)) > FINE


def _rows(panels: Sequence[Image.Image], columns: int) -> Iterator[Image.Image]:
    """Panels side by side, so many in a row."""
    for start in range(0, len(panels), columns):
        yield beside(panels[start : start + columns])


def _ruled(picture: Image.Image, grid: Grid) -> Image.Image:
    """The picture with the numbers of rows and columns at its edges, from 1, where they can be told apart."""
    if _is_fine(grid):
        return picture
    rows, cols = canvas_size(grid)
    edge = 16
    pen = Pen((picture.width + edge, picture.height + edge))
    for col in range(cols):
        pen.text(edge + (col + 0.5) * picture.width / cols, 6, str(col + 1), FAINT, 12)
    for row in range(rows):
        pen.text(4, edge + (row + 0.5) * picture.height / rows, str(row + 1), FAINT, 12)
    sheet = Image.new("RGB", pen.size, PAPER)
    sheet.paste(picture, (edge, edge))
    return pen.over(sheet)


# ---------------------------------------------------------------------- the path


@dataclass(frozen=True)
class _Stop:
    """Steps in a row with the same nearest token."""

    place: Place
    steps: tuple[int, ...]
    put: bool


def _stops(walk: Walk, put: Collection[int]) -> list[_Stop]:
    """The walk, steps that stay where they are taken together."""
    numbered = [(place, step, step in put) for step, place in enumerate(walk.places(), 1)]
    grouped = groupby(numbered, key=lambda one: (one[0], one[2]))
    return [_Stop(place, tuple(step for _, step, _ in group), by_hand) for (place, by_hand), group in grouped]


def numbers(steps: Sequence[int]) -> str:
    """Steps as they are written on a cell: ``2``, ``5-8``, ``1,4-6``."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}" for run in runs]
    return ",".join(texts)


def _traced(view: Image.Image, grid: Grid, stops: Sequence[_Stop], image: int) -> Image.Image:
    """One picture with the part of the walk that lies in it. A step to another picture leaves a gap; one to a latent
    that was put there is no step of the model, and dashed."""
    pen = Pen(view.size)
    rows, cols = canvas_size(grid)
    cell = min(view.width / cols, view.height / rows)
    width = min(6.0, max(2.5, 0.06 * cell))
    halo, dot = max(1.5, 0.4 * width), 1.7 * width

    def at(place: Place) -> Point:
        return place.center[0] * view.width, place.center[1] * view.height

    here = [stop for stop in stops if stop.place.image == image]
    steps = [(a.place, b.place, b.put) for a, b in pairwise(stops) if a.place.image == image == b.place.image]
    legs = [(at(a), at(b), by_hand) for a, b, by_hand in steps if a != b]
    for extra, color in ((halo, _HALO), (0.0, PATH)):
        for a, b, by_hand in legs:
            pen.line(a, b, PUT if by_hand and not extra else color, width + 2 * extra, by_hand)
            if math.dist(a, b) > 9 * width and not by_hand:
                pen.polygon(_arrow(a, b, 1.9 * width + 1.5 * extra, extra), color)
        for stop in sorted(here, key=lambda one: one.put):
            pen.dot(*at(stop.place), PUT if stop.put and not extra else color, dot + extra)
    _badges(pen, here, [(a, b) for a, b, _ in legs], cell, dot + halo)
    return pen.over(view)


def _arrow(a: Point, b: Point, size: float, extra: float) -> list[Point]:
    """A head that points along a leg. Past its middle, so that the heads of a way there and back stand apart."""
    angle = math.atan2(b[1] - a[1], b[0] - a[0])
    x, y = (p + (q - p) * 0.6 for p, q in zip(a, b, strict=True))
    cos, sin = math.cos(angle), math.sin(angle)
    head = ((size + extra, 0.0), (-size, size), (-size, -size))
    return [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in head]


def _badges(pen: Pen, stops: Sequence[_Stop], legs: Sequence[tuple[Point, Point]], cell: float, dot: float) -> None:
    """The numbers of the steps, one label a cell, where it hides least of the path and no other label."""
    width, height = pen.size
    cells: dict[tuple[Place, bool], list[int]] = {}
    for stop in stops:
        cells.setdefault((stop.place, stop.put), []).extend(stop.steps)
    path = [(a[0] + (b[0] - a[0]) * k / 24, a[1] + (b[1] - a[1]) * k / 24) for a, b in legs for k in range(25)] + [
        (x * width, y * height) for x, y in (stop.place.center for stop in stops)
    ]
    size = min(22.0, max(13.0, 0.24 * cell))
    taken: list[Rectangle] = []
    for (place, by_hand), steps in cells.items():
        text, letters = _fitting(pen, numbers(steps), size, max(cell, 64))
        w, h = max(pen.length(text, letters) + 0.7 * letters, 1.35 * letters), 1.35 * letters
        best = min(
            _spots(place, (width, height), w, h, dot),
            key=lambda spot: 8 * sum(_overlap(spot, other) for other in taken) + sum(_inside(p, spot) for p in path),
        )
        taken.append(best)
        x0, y0, x1, y1 = best
        pen.pill((x0 - 1.5, y0 - 1.5, x1 + 1.5, y1 + 1.5), _HALO, h / 2 + 1.5)
        pen.pill(best, PUT if by_hand else PATH, h / 2)
        pen.text((x0 + x1) / 2, (y0 + y1) / 2, text, _HALO, letters)


def _fitting(pen: Pen, text: str, size: float, room: float) -> tuple[str, float]:
    """The size at which a label fits its cell, and the label: cut where it is too long even at the smallest."""
    while size > 10 and pen.length(text, size) + size > room:
        size -= 1
    while pen.length(text, size) + size > room and "," in text:
        text = text.removesuffix(",…").rpartition(",")[0] + ",…"
        if text.count(",") == 1:
            break
    return text, size


def _spots(place: Place, size: tuple[int, int], w: float, h: float, dot: float) -> Iterator[Rectangle]:
    """Places for a label of a cell, the best first: its corners where they are clear of its centre, else around it."""
    x0, y0, x1, y1 = (value * side for value, side in zip(place.box, (*size, *size), strict=True))
    cx, cy = (x0 + x1) / 2, (y0 + y1) / 2
    gap = 3.0
    left, top = min(x0 + gap, cx - dot - w), min(y0 + gap, cy - dot - h)
    right, bottom = max(x1 - gap - w, cx + dot), max(y1 - gap - h, cy + dot)
    around = [(left, top), (right, top), (left, bottom), (right, bottom)]
    around += [(cx - w / 2, top), (cx - w / 2, bottom), (left, cy - h / 2), (right, cy - h / 2)]
    around += [(left, top - h), (right, top - h), (left, bottom + h), (right, bottom + h)]
    for x, y in around:
        x, y = min(max(x, 2.0), max(2.0, size[0] - w - 2)), min(max(y, 2.0), max(2.0, size[1] - h - 2))
        yield x, y, x + w, y + h


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(point: Point, box: Rectangle) -> bool:
    return box[0] - 2 <= point[0] <= box[2] + 2 and box[1] - 2 <= point[1] <= box[3] + 2


# ---------------------------------------------------------------------- heat maps


def _heat_maps(picture: Image.Image, walk: Walk, image: int, put: Collection[int]) -> Image.Image:
    """Cosines of every latent with the visual tokens of one image, over the picture in grey; the nearest has a ring."""
    view = enlarged(picture.convert("RGB"), (_FINE_SIDE - GAP * (_HEAT_COLUMNS - 1)) // _HEAT_COLUMNS)
    panels = []
    for number, (values, place) in enumerate(zip(walk.heat(image), walk.places(), strict=True), 1):
        # Over the visual tokens of all pictures: the maps of one latent share their colors.
        low, high = (float(of(walk.similarity[number - 1])) for of in (np.min, np.max))
        pen = Pen(view.size)
        if place.image == image:
            _ring(pen, place, PUT if number in put else PATH)
        panels.append(titled(pen.over(heat_map(view, values, low, high)), f"z{number}:  {low:.2f} to {high:.2f}"))
    return column(list(_rows(panels, _HEAT_COLUMNS)))


def heat_map(picture: Image.Image, values: NDArray[np.float32], low: float, high: float) -> Image.Image:
    """Values (rows, columns), from ``low`` to ``high``, in color over the picture in grey."""
    grey = np.asarray(picture.convert("L"), np.float32)[..., None] / 255
    share = np.clip((values - low) / max(high - low, 1e-9), 0, 1).astype(np.float32)
    # One block a token: nothing is smoothed into what was not measured.
    strength = np.asarray(Image.fromarray(share).resize(picture.size, Image.Resampling.NEAREST))
    opacity = 0.35 + 0.55 * strength[..., None]
    mixed = _colors(strength) * (0.55 + 0.45 * grey) * opacity + 0.75 * grey * (1 - opacity)
    return Image.fromarray((255 * mixed).astype(np.uint8))


def _ring(pen: Pen, place: Place, color: RGB) -> None:
    """A ring around a visual token."""
    (width, height), (x0, y0, x1, y1) = pen.size, place.box
    x, y = place.center[0] * width, place.center[1] * height
    radius = max(5.0, 0.75 * max((x1 - x0) * width, (y1 - y0) * height))
    pen.ring(x, y, _HALO, radius + 1.5, 5.0)
    pen.ring(x, y, color, radius, 2.5)


def _colors(share: NDArray[np.float32]) -> NDArray[np.float32]:
    """(…) in [0, 1] -> (…, 3): dark violet over red to pale yellow, also distinct for the color-blind."""
    stops = np.linspace(0, 1, len(_HEAT))
    channels = [np.interp(share, stops, [color[c] / 255 for color in _HEAT]) for c in range(3)]
    return np.stack(channels, axis=-1).astype(np.float32)


# ---------------------------------------------------------------------- around the picture


def _strip(walk: Walk, put: Collection[int], width: int) -> Image.Image:
    """The steps with the cosine of each to its nearest token: number, bar, value."""
    rows = math.ceil(len(walk) / max(1, width // 64))
    columns = math.ceil(len(walk) / rows)
    step, height, head = min(width / columns, 140.0), 40, 22
    pen = Pen((width, head + rows * height))
    pen.text(0, 9, "cosine of each latent with its nearest visual token", FAINT, 13, "lm")
    for number, value in enumerate(walk.cosine.tolist(), 1):
        row, column = divmod(number - 1, columns)
        x, y = column * step, head + row * height
        color = PUT if number in put else PATH
        bar = step - 10
        pen.pill((x, y + 24, x + bar, y + 30), _TRACK, 3)
        pen.pill((x, y + 24, x + max(6.0, bar * min(1.0, max(0.0, value))), y + 30), color, 3)
        pen.text(x, y + 11, f"z{number}", color, 14, "lm")
        pen.text(x + bar, y + 11, "put" if number in put else f"{value:.2f}", _INK, 13, "rm")
    return pen.over(Image.new("RGB", pen.size, PAPER))


def _caption(question: str, answer: str, width: int) -> Image.Image:
    """Question, and below it the answer, in lines that fit; a long text ends in dots."""
    lines = []
    for text, bold in ((question, False), (f"Answer: {answer}" if answer else "", True)):
        fitting = paragraph(text, width, 17) if text else []
        if len(fitting) > _TEXT_LINES:
            fitting = [*fitting[: _TEXT_LINES - 1], "…"]
        lines += [(line, bold) for line in fitting]
    pen = Pen((width, 26 * len(lines)))
    for number, (line, bold) in enumerate(lines):
        pen.text(0, 26 * number + 12, line, _INK, 17, "lm", bold)
    return pen.over(Image.new("RGB", pen.size, PAPER))
