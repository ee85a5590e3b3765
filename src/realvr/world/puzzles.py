"""The three BLINK-like tasks that are not a question about one ordinary scene: jigsaw, relative brightness, IQ."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from realvr.world.items import Item, View
from realvr.world.proposals import FULL_COLORS
from realvr.world.sampling import SOLID, Style, pick, place, sample_background, sample_scene
from realvr.world.scene import Mark, Object, PixelBox, Scene
from realvr.world.words import EASY_COLORS, EASY_SHAPES

SECOND, THIRD = "the second image", "the third image"
DARKER = ("A is darker", "B is darker", "about the same")
SMALLEST = 96
"""Least side of pictures that carry letters."""


def jigsaw(rng: np.random.Generator, style: Style, buckets: Container[int], name: str) -> Item:
    """A picture without its lower right quarter and two candidates for it; objects cross the border of the gap."""
    while True:
        whole, crossing = _crossing(rng, style, sample_scene(rng, style))
        other = _altered(rng, whole, crossing)
        if whole.bucket() in buckets and other.bucket() in buckets:
            break
    width, height = whole.size
    gap: PixelBox = (width // 2, height // 2, width, height)
    holed = replace(whole, marks=(Mark("hole", gap),))
    right = rng.random() < 0.5
    scenes = (whole, other) if right else (other, whole)
    views = (View(holed, f"{name}_1.png"), *(View(s, f"{name}_{k + 2}.png", gap) for k, s in enumerate(scenes)))
    return Item(
        name,
        views,
        pick(rng, JIGSAW_TEXTS),
        SECOND if right else THIRD,
        (SECOND, THIRD),
        tuple((0, whole.objects[k].box) for k in crossing),
        "jigsaw",
        task="Jigsaw",
    )


JIGSAW_TEXTS = (
    "The lower right corner of the first image is missing. Which image fits it: the second or the third?",
    "Which of the second and the third image completes the black corner of the first image?",
)


def _crossing(rng: np.random.Generator, style: Style, scene: Scene) -> tuple[Scene, tuple[int, ...]]:
    """Put one object across each border of the lower right quarter, in place of those that were near."""
    width, height = scene.size
    radius = round(width * 0.1 * 2) / 2
    spots = [
        (width // 2, int(height * rng.uniform(0.68, 0.84))),
        (int(width * rng.uniform(0.68, 0.84)), height // 2),
    ]
    kept = [
        item
        for item in scene.objects
        if all(max(abs(item.x - x), abs(item.y - y)) > item.radius + 1.3 * radius for x, y in spots)
    ]
    easy = style.vocabulary == "easy"
    colors = rng.permutation(len(EASY_COLORS))
    for (x, y), color in zip(spots, colors[:2], strict=True):
        shape = pick(rng, ("circle", "square") if easy else SOLID)
        kept.append(Object(shape, EASY_COLORS[color], x, y, radius, "" if easy else "large"))
    return replace(scene, objects=tuple(kept)), (len(kept) - 2, len(kept) - 1)


def _altered(rng: np.random.Generator, scene: Scene, crossing: tuple[int, ...]) -> Scene:
    """The scene with the crossing objects in other colors or shifted, so that their halves no longer meet."""
    width, height = scene.size
    for axis, index in enumerate(crossing):
        item = scene.objects[index]
        if rng.random() < 0.5:
            scene = scene.edit(index, color=pick(rng, [c for c in EASY_COLORS if c != item.color]))
            continue
        along, length = (item.y, height) if axis == 0 else (item.x, width)
        shift = int(0.12 * length) * (1 if along < 0.76 * length else -1)
        scene = scene.edit(index, y=item.y + shift) if axis == 0 else scene.edit(index, x=item.x + shift)
    return scene


def brightness(rng: np.random.Generator, style: Style, buckets: Container[int], name: str) -> Item:
    """Two gray surfaces marked A and B: which is darker, or are they about the same? Others are there to mislead."""
    answer = pick(rng, DARKER)
    while True:
        scene = _surfaces(rng, max(style.width, SMALLEST), answer)
        if scene.bucket() in buckets:
            break
    scene = replace(scene, background=sample_background(rng, style))
    boxes = tuple((0, item.box) for item in scene.objects[:2])
    return Item(
        name,
        (View(scene, f"{name}_1.png"),),
        pick(rng, BRIGHTNESS_TEXTS),
        answer,
        DARKER,
        boxes,
        "brightness",
        task="Relative_Reflectance",
    )


BRIGHTNESS_TEXTS = (
    "Two surfaces are marked, point A and point B. Which one is darker, or are they about the same?",
    "Compare the surface under point A with the one under point B. Which is darker, or are they about the same?",
)


def _surfaces(rng: np.random.Generator, side: int, answer: str) -> Scene:
    layout = Style("surfaces", side, side, (3, 3), (5, 7))
    cells = rng.permutation(9)[: int(rng.integers(5, 8))]
    step = float(rng.uniform(0.17, 0.3))
    low = float(rng.uniform(0.55, 1.5 - step))
    first, second = {DARKER[0]: (low, low + step), DARKER[1]: (low + step, low), DARKER[2]: (low, low)}[answer]
    shades = [first, second, *rng.uniform(0.5, 1.55, len(cells) - 2)]
    radius = round(side / 3 * 0.4 * 2) / 2
    objects, marks = [], []
    for k, (cell, shade) in enumerate(zip(cells, shades, strict=True)):
        x, y = place(layout, int(cell), radius, rng.random(), rng.random())
        objects.append(Object(pick(rng, ("circle", "square", "hexagon")), "gray", x, y, radius, shade=round(shade, 3)))
        if k < 2:
            half = max(5, side // 24)
            marks.append(Mark("letter", (x - half, y - half, x + half + 1, y + half + 1), "AB"[k]))
    return Scene(side, side, tuple(objects), grid=(3, 3), marks=tuple(marks))


@dataclass(frozen=True)
class Panel:
    """One picture of a puzzle: ``count`` equal objects."""

    shape: str
    color: str
    count: int = 1
    quarter: int = 0
    """Quarter turns, for arrows."""


def pattern(rng: np.random.Generator, style: Style, buckets: Container[int], name: str) -> Item:
    """Three panels follow a rule; which of four comes next?"""
    while True:
        row, answer, wrong = _sequence(rng, style.vocabulary == "easy")
        shown = [answer, *wrong]
        order = [int(k) for k in rng.permutation(4)]
        scene = _panels(max(style.width, SMALLEST), row, [shown[k] for k in order])
        if scene.bucket() in buckets:
            break
    scene = replace(scene, background=replace(sample_background(rng, style), kind="flat", base=(236, 236, 232)))
    frames = tuple((0, mark.box) for mark in scene.marks if mark.kind == "frame")
    right = order.index(0)
    return Item(
        name,
        (View(scene, f"{name}_1.png"),),
        pick(rng, PATTERN_TEXTS),
        "ABCD"[right],
        ("A", "B", "C", "D"),
        (*frames[:3], frames[3 + right]),
        "pattern",
        task="IQ_Test",
    )


PATTERN_TEXTS = (
    "The top row follows a rule. Which of the pictures A, B, C and D belongs in place of the question mark?",
    "Which picture continues the top row, A, B, C or D?",
)


def _sequence(rng: np.random.Generator, easy: bool) -> tuple[list[Panel], Panel, list[Panel]]:
    """Three panels, the right fourth one, and three wrong ones that each break the rule or change something else."""
    palette = EASY_COLORS if easy else FULL_COLORS
    color, second, third = (palette[k] for k in rng.permutation(len(palette))[:3])
    shape, other_shape = (EASY_SHAPES[k] for k in rng.permutation(len(EASY_SHAPES))[:2])
    rule = pick(rng, ("count", "turn", "color", "shape"))
    base = Panel(shape, color)
    if rule == "count":
        rising = rng.random() < 0.5
        counts = [1, 2, 3, 4] if rising else [4, 3, 2, 1]
        row = [replace(base, count=n) for n in counts]
        wrong = [replace(base, count=n) for n in counts[1:3]] + [replace(row[3], color=second)]
    elif rule == "turn":
        start, step = int(rng.integers(4)), pick(rng, (1, 3))
        row = [Panel("arrow", color, 1, (start + step * k) % 4) for k in range(4)]
        wrong = [row[0], row[1], replace(row[3], color=second)]
    elif rule == "color":
        count = int(rng.integers(1, 5))
        row = [Panel(shape, c, count) for c in (color, second, color, second)]
        wrong = [row[0], replace(row[3], color=third), replace(row[3], shape=other_shape)]
    else:
        count = int(rng.integers(1, 5))
        row = [Panel(s, color, count) for s in (shape, other_shape, shape, other_shape)]
        wrong = [row[0], replace(row[3], color=second), replace(row[3], count=count % 4 + 1)]
    return row[:3], row[3], wrong


def _panels(side: int, row: list[Panel], offered: list[Panel]) -> Scene:
    """Both rows on one canvas: the sequence with a question mark on top, the lettered options below."""
    cell = side // 4
    height = int(cell * 2.75)
    objects: list[Object] = []
    marks: list[Mark] = []
    for top, panels in ((2, row), (height - cell + 1, offered)):
        for k, panel in enumerate(panels):
            x = k * cell + 2
            marks.append(Mark("frame", (x, top, x + cell - 4, top + cell - 4)))
            objects += _fill_panel(panel, x, top, cell - 4)
            if panels is offered:
                plate = max(11, cell // 3)
                left = x + (cell - 4 - plate) // 2
                marks.append(Mark("letter", (left, top - plate - 2, left + plate, top - 2), "ABCD"[k]))
    x = 3 * cell + 2
    marks.append(Mark("letter", (x, 2, x + cell - 4, cell - 2), "?"))
    return Scene(4 * cell, height, tuple(objects), grid=(8, 6), marks=tuple(marks))


def _fill_panel(panel: Panel, x: int, y: int, side: int) -> list[Object]:
    """The objects of a panel, always at the same places for the same number."""
    turn = 90 * panel.quarter
    if panel.count == 1:
        spots, radius = [(0.5, 0.5)], side * 0.36
    else:
        spots, radius = [(0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)][: panel.count], side * 0.19
    size = round(radius * 2) / 2
    return [
        Object(panel.shape, panel.color, int(x + fx * side), int(y + fy * side), size, rotation=turn)
        for fx, fy in spots
    ]
