"""Random boards with a trail of a wanted length, on which guessing does not pay."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from realvr.errors import UserError
from realvr.world.questions import MAX_TRIES
from realvr.world.sampling import ANY_BUCKET
from realvr.world.trails.board import (
    CIRCLES,
    STEPS,
    Board,
    Cell,
    Grid,
    Thing,
    bucket,
    cells_of,
    step,
    towards,
)
from realvr.world.trails.plan import Plan
from realvr.world.words import EASY_COLORS, WITHHELD_WORDS

T = TypeVar("T")
ARROW = "thick arrow"
START_COLORS = tuple(color for color in EASY_COLORS if color not in WITHHELD_WORDS)
"""Colors that a question refers to an arrow by."""


@dataclass(frozen=True)
class Trail:
    """A board and the way through it: the cell to start from first, the circle last."""

    board: Board
    cells: tuple[Cell, ...]

    @property
    def start(self) -> Thing:
        return self.board.at(self.cells[0])

    @property
    def end(self) -> Thing:
        return self.board.at(self.cells[-1])

    @property
    def arrows(self) -> int:
        return len(self.cells) - 1


def choose(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One element of a sequence: a tenth of what `realvr.world.sampling.pick` costs, and a board takes a hundred."""
    return options[int(rng.random() * len(options))]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included."""
    return low + int(rng.random() * (high + 1 - low))


def sample_trail(
    rng: np.random.Generator, plan: Plan, buckets: Container[int] = ANY_BUCKET, arrows: int | None = None
) -> Trail:
    """The number of arrows is fixed first, then boards tried until one has room for it and lies in ``buckets``."""
    arrows = between(rng, *plan.arrows) if arrows is None else arrows
    for _ in range(MAX_TRIES):
        way = _walk(rng, plan.grid, [_anywhere(rng, plan.grid)], arrows)
        others = way and _other_circles(rng, plan, way)
        if way and others and bucket(plan.grid, [way[-1], *others]) in buckets:
            return Trail(_filled(rng, plan, way, others), tuple(way))
    rows, columns = plan.grid
    raise UserError(f"no board of {rows}x{columns} cells with a trail of {arrows} arrows was found; ask for fewer")


def _anywhere(rng: np.random.Generator, grid: Grid) -> Cell:
    return between(rng, 0, grid[0] - 1), between(rng, 0, grid[1] - 1)


def _walk(rng: np.random.Generator, grid: Grid, begun: Sequence[Cell], arrows: int) -> list[Cell] | None:
    """A way of ``arrows`` steps that starts as ``begun`` and does not cross itself, or None where it got stuck."""
    way = list(begun)
    while len(way) <= arrows:
        free = neighbors(way[-1], grid, way)
        if not free:
            return None
        way.append(choose(rng, free))
    return way


def neighbors(cell: Cell, grid: Grid, taken: Container[Cell]) -> list[Cell]:
    """Neighbors on the board that are not taken."""
    near = (step(cell, name) for name in STEPS)
    return [(r, c) for r, c in near if 0 <= r < grid[0] and 0 <= c < grid[1] and (r, c) not in taken]


def _other_circles(rng: np.random.Generator, plan: Plan, way: Sequence[Cell]) -> list[Cell] | None:
    """Where the other circles lie: where other trails with the same first arrow, of any length, could have ended.

    So nothing but following tells them apart: neither distance from the start nor the direction of its arrow. (A trail
    of one arrow has no other such end; the others are then farther away.)
    """
    low = max(plan.arrows[0], 2)
    high = max(plan.arrows[1], low + 2)
    found: list[Cell] = []
    for _ in range(12 * CIRCLES):
        other = _walk(rng, plan.grid, way[:2], between(rng, low, high))
        if other and other[-1] not in way and other[-1] not in found:
            found.append(other[-1])
        if len(found) == CIRCLES - 1:
            return found
    return None


def _filled(rng: np.random.Generator, plan: Plan, way: Sequence[Cell], others: Sequence[Cell]) -> Board:
    """The board: the trail, a false trail to each other circle, and arrows that point anywhere in the cells left."""
    pointing = {here: towards(here, there) for here, there in zip(way, way[1:], strict=False)}
    circles = [way[-1], *others]
    taken = {*pointing, *circles}
    for circle in others:  # as long as the real one may be: a circle that nothing leads to would be no option
        here = circle
        for _ in range(between(rng, *plan.arrows)):
            free = neighbors(here, plan.grid, taken)
            if not free:
                break
            there = choose(rng, free)
            pointing[there] = towards(there, here)
            taken.add(there)
            here = there
    start_color = choose(rng, START_COLORS)
    left = [color for color in EASY_COLORS if color != start_color]
    colors = dict(zip(circles, (left[k] for k in rng.permutation(len(left)).tolist()), strict=False))
    anywhere = [tuple(STEPS)[k] for k in rng.integers(len(STEPS), size=plan.grid[0] * plan.grid[1]).tolist()]

    def thing(cell: Cell, else_: str) -> Thing:
        if cell in colors:
            return Thing("circle", colors[cell], "circle")
        return Thing(pointing.get(cell, else_), start_color if cell == way[0] else "black", ARROW)

    filled = [thing(cell, direction) for cell, direction in zip(cells_of(plan.grid), anywhere, strict=True)]
    columns = plan.grid[1]
    return Board(tuple(tuple(filled[k : k + columns]) for k in range(0, len(filled), columns)))
