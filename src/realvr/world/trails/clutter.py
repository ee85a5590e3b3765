"""What makes a board harder to read: things that lead nowhere, arrows in other colors and of other styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from realvr.world.trails.board import STEPS, Board, Cell, Thing
from realvr.world.trails.draws import choose
from realvr.world.trails.plan import ARROW, START_SHAPES
from realvr.world.words import EASY_COLORS, EASY_SHAPES

STYLES = (ARROW, "arrow", "thin arrow")
"""Outlines of an arrow."""
THINGS = tuple(shape for shape in EASY_SHAPES if shape not in ("circle", "ring", *START_SHAPES))
"""Shapes that no one takes for an arrow or for a circle."""
THING_SHARE, COLOR_SHARE = 0.12, 0.3
"""Share of cells off the trail with such a shape, and share of arrows with a color."""


def cluttered(rng: np.random.Generator, board: Board, way: Sequence[Cell]) -> Board:
    """The board with clutter. The ``way`` still leads on, and nothing but its start has the start's color."""
    colors = [color for color in EASY_COLORS if color != board.at(way[0]).color]

    def changed(cell: Cell, thing: Thing) -> Thing:
        if thing.what not in STEPS or cell == way[0]:
            return thing
        if cell not in way and rng.random() < THING_SHARE:
            return Thing("", choose(rng, colors), choose(rng, THINGS))
        color = choose(rng, colors) if rng.random() < COLOR_SHARE else thing.color
        return replace(thing, color=color, shape=choose(rng, STYLES))

    return Board(
        tuple(tuple(changed((r, c), thing) for c, thing in enumerate(row)) for r, row in enumerate(board.rows))
    )
