"""Boards as scenes to draw, as tables and as captions."""

from __future__ import annotations

from typing import Any

import numpy as np

from realvr.world.sampling import pick
from realvr.world.scene import Background, Object, Scene
from realvr.world.trails.board import Board, Cell, cells_of
from realvr.world.words import DIRECTIONS, with_article

TONES = ((217, 207, 191), (202, 202, 202), (182, 192, 210))
"""Flat backgrounds: sand, gray, pale blue."""
REACH = {"circle": 0.95}
"""How far an outline reaches from its centre, in radii, where it is not that of an arrow."""


def sample_ground(rng: np.random.Generator) -> Background:
    """What a board lies on."""
    return Background("flat", pick(rng, TONES))


def scene_of(board: Board, size: tuple[int, int], background: Background) -> Scene:
    """The board as a scene. Everything stays within its own cell, so that an edited cell changes no other."""
    objects = tuple(_object(board, cell, size) for cell in cells_of(board.grid))
    return Scene(*size, objects, background, grid=(board.grid[1], board.grid[0]), vocabulary="easy")


def _object(board: Board, cell: Cell, size: tuple[int, int]) -> Object:
    thing = board.at(cell)
    x0, y0, x1, y1 = board.box(cell, size)
    # Around the centre of a pixel and within the cell; a quarter of a pixel is what drawing may add to an outline.
    half = (min(x1 - x0, y1 - y0) - 1) // 2 + 0.25
    turn = 90 * DIRECTIONS.index(thing.what) if thing.what in DIRECTIONS else 0
    radius = half / REACH.get(thing.shape, 1.0)
    return Object(
        thing.shape, thing.color, (x0 + x1 - 1) // 2, (y0 + y1 - 1) // 2, radius, texture="flat", rotation=turn
    )


def place(cell: Cell) -> str:
    """A cell in words, counted from 1."""
    return f"row {cell[0] + 1}, column {cell[1] + 1}"


def name(board: Board, cell: Cell) -> str:
    """What a cell shows, in words: arrows by direction, circles by color."""
    thing = board.at(cell)
    return f"{thing.color} circle" if thing.what == "circle" else f"{thing.what} arrow"


def table(board: Board, size: tuple[int, int]) -> list[dict[str, Any]]:
    """One row a cell. An arrow's direction is part of its shape, since it is what a model must see of it."""
    rows = []
    for cell in cells_of(board.grid):
        thing = board.at(cell)
        shape = thing.shape if thing.what not in DIRECTIONS else f"arrow {thing.what}"
        rows.append({"shape": shape, "color": thing.color, "cell": list(cell), "box": list(board.box(cell, size))})
    return rows


def caption(board: Board) -> str:
    """One sentence about everything that is not a black arrow, row by row."""
    parts = []
    for cell in cells_of(board.grid):
        thing = board.at(cell)
        if thing.what == "circle":
            parts.append(f"{with_article(thing.color)} circle at {place(cell)}")
        elif thing.color != "black":
            parts.append(f"{with_article(thing.color)} arrow pointing {thing.what} at {place(cell)}")
    return f"The image shows {', '.join(parts[:-1])} and {parts[-1]}."
