"""Edited pairs: a board, one edit of it, and the same question about both.

Two edits turn an arrow: one on the trail, so that it ends at another circle, or one beside it, which changes nothing.
Two keep the way and change where it ends: ``recolor_end`` gives the last circle a color that no circle has, nor the
start, and
``swap_circles`` lets two circles change places, in half of the pairs the last one with another.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from realvr.errors import UserError
from realvr.world.trails.board import STEPS, Board, Cell
from realvr.world.trails.draws import between, choose, shuffled
from realvr.world.trails.plan import Plan
from realvr.world.trails.questions import Asked, ask_end
from realvr.world.trails.sampling import Trail, neighbors, sample_trail
from realvr.world.words import EASY_COLORS

PAIRS_PER_EDIT = 256
TRIES, PATIENCE = 1000, 100
"""Boards tried for a pair, and for one wish of length and place."""


@dataclass(frozen=True)
class Pair:
    """Two boards that differ in the cells ``touched``, and what is asked of each."""

    original: Trail
    edited: Trail
    before: Asked
    after: Asked
    touched: tuple[Cell, ...]

    @property
    def parts_at(self) -> int | None:
        """Number, from 1, of the first cell in which the two trails differ; None where they take the same way."""
        return _first_difference(self.original.cells, self.edited.cells)

    @property
    def changes_at(self) -> int | None:
        """Number, from 1, of the first cell on the way that looks different, or is another; None where none does."""
        shown = [[(cell, trail.board.at(cell)) for cell in trail.cells] for trail in (self.original, self.edited)]
        return _first_difference(*shown)


def _first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    return next((k for k, (a, b) in enumerate(zip_longest(one, two), 1) if a != b), None)


Edited = tuple[Board, tuple[Cell, ...]]
Editor = Callable[[np.random.Generator, Trail, Plan, float], "Edited | None"]
"""Takes a number in [0, 1) that was drawn once a pair, so that what is wished by it stays evenly spread."""


def _turn_on_trail(rng: np.random.Generator, trail: Trail, plan: Plan, u: float) -> Edited | None:
    """One of the arrows of the trail, any of them alike, turned so that the way ends at another circle in time."""
    cell = trail.cells[int(u * trail.arrows)]
    for direction in shuffled(rng, [name for name in STEPS if name != trail.board.at(cell).what]):
        board = trail.board.put(cell, what=direction)
        way = board.follow(trail.cells[0])
        if way and way[-1] != trail.cells[-1] and len(way) <= plan.arrows[1] + 1:
            return board, (cell,)
    return None


def _turn_beside(rng: np.random.Generator, trail: Trail, plan: Plan, u: float) -> Edited | None:
    """An arrow next to a cell of the trail, but not on it."""
    near = {there for cell in trail.cells for there in neighbors(cell, plan.grid, trail.cells)}
    arrows = sorted(cell for cell in near if trail.board.at(cell).what in STEPS)
    if not arrows:
        return None
    cell = choose(rng, arrows)
    turned = choose(rng, [name for name in STEPS if name != trail.board.at(cell).what])
    return trail.board.put(cell, what=turned), (cell,)


def _recolor_end(rng: np.random.Generator, trail: Trail, plan: Plan, u: float) -> Edited:
    taken = {trail.board.at(cell).color for cell in (trail.cells[0], *trail.board.where("circle"))}
    color = choose(rng, [color for color in EASY_COLORS if color not in taken])
    return trail.board.put(trail.cells[-1], color=color), (trail.cells[-1],)


def _swap_circles(rng: np.random.Generator, trail: Trail, plan: Plan, u: float) -> Edited:
    """The last circle and another, or two others."""
    end = trail.cells[-1]
    others = [cell for cell in trail.board.where("circle") if cell != end]
    one, two = (others[k] for k in rng.permutation(len(others))[:2].tolist())
    one = end if u < 0.5 else one
    board, colors = trail.board, (trail.board.at(one).color, trail.board.at(two).color)
    return board.put(one, color=colors[1]).put(two, color=colors[0]), (one, two)


EDITS: dict[str, Editor] = {
    "turn_on_trail": _turn_on_trail,
    "turn_beside": _turn_beside,
    "recolor_end": _recolor_end,
    "swap_circles": _swap_circles,
}


def sample_pair(rng: np.random.Generator, plan: Plan, edit: str, buckets: Container[int]) -> Pair:
    """A pair with the same words and options on both sides. No edit moves a circle to a cell without one, so both
    boards lie in the same bucket."""
    arrows, u = between(rng, *plan.arrows), rng.random()
    for attempt in range(TRIES):
        if attempt and attempt % PATIENCE == 0:  # a full board may allow no edit of this trail at this arrow
            arrows, u = between(rng, *plan.arrows), rng.random()
        original = sample_trail(rng, plan, buckets, arrows=arrows)
        done = EDITS[edit](rng, original, plan, u)
        if done is None:
            continue
        board, touched = done
        way = board.follow(original.cells[0])
        if way is None:
            continue
        edited = replace(original, board=board, cells=tuple(way))
        before = ask_end(rng, original, plan)
        choices = _offering(rng, before.choices, before.answer, edited.end.color)
        before = replace(before, choices=choices)
        after = replace(before, answer=edited.end.color, cells=edited.cells, arrows=edited.arrows)
        return Pair(original, edited, before, after, touched)
    rows, columns = plan.grid
    low, high = plan.arrows
    raise UserError(f"boards of {rows}x{columns} cells with trails of {low} to {high} arrows allow no {edit}")


def _offering(rng: np.random.Generator, choices: tuple[str, ...], *answers: str) -> tuple[str, ...]:
    """The options with both answers among them: a new one takes the place of a wrong one."""
    offered = list(choices)
    for answer in answers:
        if answer not in offered:
            offered[choose(rng, [k for k, choice in enumerate(offered) if choice not in answers])] = answer
    return tuple(offered)
