"""What a user can choose about trails, and what fits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from realvr.errors import UserError
from realvr.world.trails.board import CIRCLES, Grid
from realvr.world.words import EASY_COLORS, WITHHELD_WORDS

SMALLEST_CELL = 8
"""Pixels: below that an arrow's direction is a guess."""
SIDES = range(3, 17)
"""Rows or columns that a board may have."""
LONGEST = 24
"""Arrows on a trail. A random way that does not cross itself soon gets stuck beyond that."""


ARROW = "thick arrow"
START_COLORS = tuple(color for color in EASY_COLORS if color not in WITHHELD_WORDS)
"""Colors that a question refers to an arrow by."""
START_SHAPES = ("triangle", "pentagon", "chevron")
"""Shapes with a point that show a direction as an arrow does, and that a question refers to."""
Start = Literal["color", "shape", "place"]
"""What a question names the arrow by that one starts from."""
Answers = Literal["options", "free"]


@dataclass(frozen=True)
class Plan:
    """``grid`` is (rows, columns); ``arrows`` the (fewest, most) arrows on a trail.

    ``clutter`` adds shapes that lead nowhere, colored arrows, arrows of several styles and backgrounds of all kinds.
    """

    grid: Grid = (6, 6)
    arrows: tuple[int, int] = (1, 7)
    clutter: bool = False
    start: Start = "color"
    answers: Answers = "options"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("start", self.start, get_args(Start)),
            ("answers", self.answers, get_args(Answers)),
        ):
            if value not in known:
                raise UserError(f"{name} {value!r}: choose {', '.join(known[:-1])} or {known[-1]}")
        rows, columns = self.grid
        if rows not in SIDES or columns not in SIDES:
            raise UserError(f"grid {rows}x{columns}: {SIDES[0]} to {SIDES[-1]} rows and columns")
        low, high = self.arrows
        if not 1 <= low <= high:
            raise UserError(f"arrows {low}-{high}: write FEWEST-MOST, from 1 up")
        if high > self.room:
            raise UserError(f"arrows {low}-{high}: a grid of {rows}x{columns} cells has room for {self.room} at most")

    @property
    def room(self) -> int:
        """The longest trail that a board has room for without crossing itself, all circles beside it."""
        cells = self.grid[0] * self.grid[1]
        return min(cells // 2 + 1, cells - CIRCLES, LONGEST)

    def fit(self, size: tuple[int, int]) -> None:
        """Refuse a canvas (width, height) on which the cells would be too small."""
        rows, columns = self.grid
        if size[0] < columns * SMALLEST_CELL or size[1] < rows * SMALLEST_CELL:
            raise UserError(
                f"grid {rows}x{columns} does not fit a canvas of {size[0]}x{size[1]} pixels: cells need "
                f"{SMALLEST_CELL} pixels, {columns * SMALLEST_CELL}x{rows * SMALLEST_CELL} in all"
            )


def parse_grid(text: str) -> Grid:
    """``6x6`` or ``6`` as (rows, columns)."""
    match = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text.strip().lower())
    if match is None:
        raise UserError(f"grid {text!r}: write ROWSxCOLUMNS, such as 6x6")
    return int(match[1]), int(match[2] or match[1])


def parse_arrows(text: str) -> tuple[int, int]:
    """``1-7`` or ``5`` as (fewest, most)."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None:
        raise UserError(f"arrows {text!r}: write FEWEST-MOST, such as 1-7, or one number")
    return int(match[1]), int(match[2] or match[1])
