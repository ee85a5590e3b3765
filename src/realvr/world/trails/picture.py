"""Boards as scenes to draw, as tables and as captions."""

from __future__ import annotations

from typing import Any

import numpy as np

from realvr.world.sampling import BACKGROUNDS, pick
from realvr.world.scene import Background, Object, Scene
from realvr.world.shapes import extent
from realvr.world.trails.board import Board, Cell, cells_of, place
from realvr.world.words import DIRECTIONS, with_article

TONES = ((217, 207, 191), (202, 202, 202), (182, 192, 210))
"""Flat backgrounds: sand, gray, pale blue."""


def sample_ground(rng: np.random.Generator, clutter: bool = False) -> Background:
    """What a board lies on: always light, since most arrows are black."""
    tone = pick(rng, TONES)
    if not clutter:
        return Background("flat", tone)
    step = int(rng.integers(12, 26))
    accent = (tone[0] - step, tone[1] - step, tone[2] - step)
    return Background(pick(rng, BACKGROUNDS), tone, accent, int(rng.integers(2**31)))


def scene_of(board: Board, size: tuple[int, int], background: Background) -> Scene:
    """The board as a scene. Everything stays within its own cell, so that an edited cell changes no other."""
    objects = tuple(_object(board, cell, size) for cell in cells_of(board.grid))
    return Scene(*size, objects, background, grid=(board.grid[1], board.grid[0]), vocabulary="easy")


def _object(board: Board, cell: Cell, size: tuple[int, int]) -> Object:
    thing = board.at(cell)
    x0, y0, x1, y1 = board.box(cell, size)
    # Around the centre of a pixel and within the cell; a quarter of a pixel is what drawing may add to an outline.
    side = min(x1 - x0, y1 - y0)
    half = min((side - 1) // 2 + 0.25, 0.44 * side)
    turn = 90 * DIRECTIONS.index(thing.what) if thing.what in DIRECTIONS else 0
    radius = half / max(map(abs, extent(thing.shape, 1.0, 0)))
    return Object(
        thing.shape, thing.color, (x0 + x1 - 1) // 2, (y0 + y1 - 1) // 2, radius, texture="flat", rotation=turn
    )


def name(board: Board, cell: Cell) -> str:
    """What a cell shows, in words: arrows by direction, everything else by color and shape."""
    thing = board.at(cell)
    return f"{thing.what} arrow" if thing.what in DIRECTIONS else f"{thing.color} {thing.shape}"


def table(board: Board, size: tuple[int, int]) -> list[dict[str, Any]]:
    """One row a cell. A direction is part of the shape, since it is what a model must see of an arrow."""
    rows = []
    for cell in cells_of(board.grid):
        thing = board.at(cell)
        kind = "arrow" if thing.shape.endswith("arrow") else thing.shape
        shape = f"{kind} {thing.what}" if thing.what in DIRECTIONS else kind
        rows.append({"shape": shape, "color": thing.color, "cell": list(cell), "box": list(board.box(cell, size))})
    return rows


def caption(board: Board) -> str:
    """One sentence about everything but the black arrows, row by row."""
    parts = []
    for cell in cells_of(board.grid):
        thing = board.at(cell)
        if thing.what not in DIRECTIONS:
            parts.append(f"{with_article(name(board, cell))} at {place(cell)}")
        elif thing.color != "black" or not thing.shape.endswith("arrow"):
            noun = f"{thing.color} arrow" if thing.shape.endswith("arrow") else f"{thing.color} {thing.shape}"
            parts.append(f"{with_article(noun)} pointing {thing.what} at {place(cell)}")
    return f"The image shows {', '.join(parts[:-1])} and {parts[-1]}."
