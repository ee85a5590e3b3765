"""Random boards with a trail of a wanted length, on which guessing does not pay."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from realvr.errors import UserError
from realvr.world.questions import MAX_TRIES
from realvr.world.trails.board import (
    BUCKETS,
    CIRCLES,
    STEPS,
    Board,
    Cell,
    Grid,
    Thing,
    bucket,
    cells_of,
    place,
    step,
    towards,
)
from realvr.world.trails.clutter import cluttered
from realvr.world.trails.draws import between, choose
from realvr.world.trails.plan import ARROW, START_COLORS, START_SHAPES, Plan, Start
from realvr.world.words import EASY_COLORS


@dataclass(frozen=True)
class Trail:
    """A board and the way through it: the cell to start from first, the circle last."""

    board: Board
    cells: tuple[Cell, ...]
    start_by: Start = "color"

    @property
    def start_name(self) -> str:
        """What a question calls the cell to start from."""
        if self.start_by == "place":
            return f"arrow at {place(self.cells[0])}"
        return self.start.shape if self.start_by == "shape" else f"{self.start.color} arrow"

    @property
    def start(self) -> Thing:
        """The arrow that the question names."""
        return self.board.at(self.cells[0])

    @property
    def end(self) -> Thing:
        """The circle that is asked for."""
        return self.board.at(self.cells[-1])

    @property
    def arrows(self) -> int:
        """Length of the trail; the circle does not count."""
        return len(self.cells) - 1


def sample_trail(
    rng: np.random.Generator, plan: Plan, buckets: Container[int] = range(BUCKETS), arrows: int | None = None
) -> Trail:
    """The number of arrows is fixed first, then boards tried until one has room for it and lies in ``buckets``."""
    arrows = between(rng, *plan.arrows) if arrows is None else arrows
    for _ in range(MAX_TRIES):
        way = _walk(rng, plan.grid, [_anywhere(rng, plan.grid)], arrows)
        others = way and _other_circles(rng, plan, way)
        if way and others and bucket(plan.grid, [way[-1], *others]) in buckets:
            board = _filled(rng, plan, way, others)
            board = cluttered(rng, board, way) if plan.clutter else board
            return Trail(board, tuple(way), plan.start)
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


@lru_cache(maxsize=64)
def _around(grid: Grid) -> dict[Cell, list[Cell]]:
    """Neighbors of every cell."""
    every = cells_of(grid)
    return {cell: [step(cell, name) for name in STEPS if step(cell, name) in every] for cell in every}


def neighbors(cell: Cell, grid: Grid, taken: Container[Cell]) -> list[Cell]:
    """Neighbors on the board that are not taken."""
    return [there for there in _around(grid)[cell] if there not in taken]


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
    start_color = choose(rng, START_COLORS) if plan.start == "color" else "black"
    start_shape = choose(rng, START_SHAPES) if plan.start == "shape" else ARROW
    left = [color for color in EASY_COLORS if color != start_color]
    colors = dict(zip(circles, (left[k] for k in rng.permutation(len(left)).tolist()), strict=False))
    anywhere = [tuple(STEPS)[k] for k in rng.integers(len(STEPS), size=plan.grid[0] * plan.grid[1]).tolist()]

    def thing(cell: Cell, else_: str) -> Thing:
        if cell in colors:
            return Thing("circle", colors[cell], "circle")
        if cell == way[0]:
            return Thing(pointing[cell], start_color, start_shape)
        return Thing(pointing.get(cell, else_), "black", ARROW)

    filled = [thing(cell, direction) for cell, direction in zip(cells_of(plan.grid), anywhere, strict=True)]
    columns = plan.grid[1]
    return Board(tuple(tuple(filled[k : k + columns]) for k in range(0, len(filled), columns)))


def second_start(rng: np.random.Generator, trail: Trail, plan: Plan, meets: bool) -> tuple[Trail, Trail] | None:
    """Both trails of a board that got a second cell to start from, whose trail does, or does not, end at the circle of
    the first; None where no arrow of the board serves."""
    ways = [way for cell in cells_of(plan.grid) if cell not in trail.cells and (way := trail.board.follow(cell))]
    fits = [
        way
        for way in ways
        if plan.arrows[0] < len(way) <= plan.arrows[1] + 1
        and (way[-1] == trail.cells[-1]) == meets
        and trail.cells[0] not in way
    ]
    if not fits:
        return None
    way, board = choose(rng, fits), trail.board
    known = [board.at(cell) for cell in (trail.cells[0], *board.where("circle"))]
    if plan.start == "color":
        color = choose(rng, [color for color in START_COLORS if color not in {thing.color for thing in known}])
        for cell in cells_of(plan.grid):  # clutter may have it
            if board.at(cell).color == color:
                board = board.put(cell, color="black")
        board = board.put(way[0], color=color, shape=ARROW)
    elif plan.start == "shape":
        shape = choose(rng, [shape for shape in START_SHAPES if shape != trail.start.shape])
        board = board.put(way[0], color="black", shape=shape)
    return replace(trail, board=board), replace(trail, board=board, cells=tuple(way))
