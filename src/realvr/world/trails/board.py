"""A board of arrows and circles, and the one rule of it: go to the cell that the arrow points to."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from realvr.world.scene import PixelBox

Cell = tuple[int, int]
"""Row and column, counted from 0."""
Grid = tuple[int, int]
"""Rows and columns."""

STEPS: dict[str, Cell] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
CIRCLES = 4
"""Circles of a board, each of another color: the options of a question about the end."""


def follow(board: Sequence[Sequence[str]], start: Cell) -> list[Cell] | None:
    """Cells from ``start`` up to and including the circle; None where the way leaves the board, loops or stops.

    ``board`` holds rows of "up", "right", "down", "left", "circle COLOR" or "" (nothing to follow).
    """
    row, column = start
    way: list[Cell] = []
    seen = set()
    while 0 <= row < len(board) and 0 <= column < len(board[row]) and (row, column) not in seen:
        way.append((row, column))
        seen.add((row, column))
        what = board[row][column]
        if what.startswith("circle"):
            return way
        if what not in STEPS:
            return None
        down, right = STEPS[what]
        row, column = row + down, column + right
    return None


def step(cell: Cell, direction: str) -> Cell:
    """The cell next to ``cell``, on the board or not."""
    down, right = STEPS[direction]
    return cell[0] + down, cell[1] + right


def towards(here: Cell, there: Cell) -> str:
    """Direction from a cell to its neighbor."""
    return next(name for name in STEPS if step(here, name) == there)


def distance(a: Cell, b: Cell) -> int:
    """Steps between two cells, along rows and columns."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def place(cell: Cell) -> str:
    """A cell in words, counted from 1."""
    return f"row {cell[0] + 1}, column {cell[1] + 1}"


def cells_of(grid: Grid) -> list[Cell]:
    """Every cell, row by row."""
    return [(row, column) for row in range(grid[0]) for column in range(grid[1])]


BUCKETS = 64
"""Boards fall into this many buckets; splits own disjoint ones (see `realvr.world.recipes`)."""


def bucket(grid: Grid, circles: Iterable[Cell]) -> int:
    """Which of the `BUCKETS` a board falls into: by where its circles lie.

    By nothing else, so that turned arrows, other colors and swapped circles leave a board in its bucket: an edited pair
    stays together, and boards of two splits differ at least in where a circle is.
    """
    return zlib.crc32(repr((grid, sorted(circles))).encode()) % BUCKETS


@dataclass(frozen=True)
class Thing:
    """What a cell shows. ``what`` is an arrow's direction, ``circle``, or empty for something in the way."""

    what: str
    color: str
    shape: str

    @property
    def entry(self) -> str:
        """As `follow` reads it."""
        return f"circle {self.color}" if self.what == "circle" else self.what


@dataclass(frozen=True)
class Board:
    """What lies where."""

    rows: tuple[tuple[Thing, ...], ...]

    @property
    def grid(self) -> Grid:
        """Rows and columns."""
        return len(self.rows), len(self.rows[0])

    @property
    def entries(self) -> list[list[str]]:
        """As `follow` reads it, and as samples hold it."""
        return [[thing.entry for thing in row] for row in self.rows]

    def at(self, cell: Cell) -> Thing:
        """What stands in a cell."""
        return self.rows[cell[0]][cell[1]]

    def has(self, cell: Cell) -> bool:
        """Whether a cell lies on the board."""
        return 0 <= cell[0] < self.grid[0] and 0 <= cell[1] < self.grid[1]

    def where(self, what: str) -> list[Cell]:
        """Cells of one content, row by row."""
        return [cell for cell in cells_of(self.grid) if self.at(cell).what == what]

    def put(self, cell: Cell, **changes: str) -> Board:
        """The board with one cell changed."""
        rows = [list(row) for row in self.rows]
        rows[cell[0]][cell[1]] = replace(self.at(cell), **changes)
        return Board(tuple(tuple(row) for row in rows))

    def follow(self, start: Cell) -> list[Cell] | None:
        """Cells of the trail from a cell to its circle; None where it leaves the board or never ends."""
        return follow(self.entries, start)

    def box(self, cell: Cell, size: tuple[int, int]) -> PixelBox:
        """The cell in pixels of a canvas of ``size`` (width, height)."""
        (rows, columns), (row, column) = self.grid, cell
        xs = [round(k * size[0] / columns) for k in (column, column + 1)]
        ys = [round(k * size[1] / rows) for k in (row, row + 1)]
        return xs[0], ys[0], xs[1], ys[1]
