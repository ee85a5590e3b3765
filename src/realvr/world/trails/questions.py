"""Questions about whole trails, with their options and the cells that support the answer, in order."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from realvr.errors import UserError
from realvr.world.questions import MAX_TRIES
from realvr.world.sampling import pick
from realvr.world.trails.board import Board, Cell
from realvr.world.trails.draws import choose, shuffled
from realvr.world.trails.plan import Plan
from realvr.world.trails.sampling import Trail, sample_trail, second_start
from realvr.world.words import DIRECTIONS

WORDINGS = {
    "end": (
        "Start at the {start} and follow the arrows. What color is the circle where you end?",
        "Follow the arrows from the {start}. Which color does the circle at the end have?",
        "Begin at the {start} and go where the arrows point. What is the color of the circle that you reach?",
    ),
    "arrows": (
        "Start at the {start} and follow the arrows to a circle. How many arrows do you follow, the first included?",
        "How many arrows lead from the {start} to a circle, the first included?",
    ),
    "turn": (
        "Start at the {start} and follow the arrows to a circle. Is your last turn left, right, or is there no turn?",
        "Follow the arrows from the {start} to a circle. Which way do you turn last: left, right, or no turn at all?",
    ),
    "meet": (
        "Follow the arrows from the {start} and from the {other}. Do you end at the same circle?",
        "Start once at the {start} and once at the {other}. Do the arrows lead to the same circle?",
    ),
}
KINDS: tuple[str, ...] = tuple(WORDINGS)
STRAIGHT = "no turn"
SWITCH = "switch"
"""A kind of split ``trails`` alone, four questions at a time: see `sample_switch`."""


@dataclass(frozen=True)
class Asked:
    """``cells`` support the answer, in the order in which one looks at them."""

    kind: str
    text: str
    answer: str
    choices: tuple[str, ...]
    cells: tuple[Cell, ...]
    arrows: int
    """How many arrows one follows."""


def _worded(rng: np.random.Generator, kind: str, trail: Trail, other: Trail | None = None) -> str:
    names = {"start": trail.start_name} | ({"other": other.start_name} if other else {})
    return pick(rng, WORDINGS[kind]).format(**names)


def ask_end(rng: np.random.Generator, trail: Trail, plan: Plan) -> Asked:
    """Which circle the trail ends at; the options are the circles of the board."""
    text = _worded(rng, "end", trail)
    colors = [trail.board.at(cell).color for cell in trail.board.where("circle")]
    return Asked("end", text, trail.end.color, shuffled(rng, colors), trail.cells, trail.arrows)


def _ask_arrows(rng: np.random.Generator, trail: Trail, plan: Plan) -> Asked:
    """How long the trail is. Every length that a trail may have is as likely an option as another."""
    low, high = plan.arrows[0], max(plan.arrows[1], plan.arrows[0] + 3)
    others = shuffled(rng, [n for n in range(low, high + 1) if n != trail.arrows])[:3]
    choices = tuple(str(n) for n in shuffled(rng, [trail.arrows, *others]))
    return Asked("arrows", _worded(rng, "arrows", trail), str(trail.arrows), choices, trail.cells, trail.arrows)


def _ask_turn(rng: np.random.Generator, trail: Trail, plan: Plan) -> Asked:
    """To which side one turns last, as seen by who walks; a straight trail has no turn."""
    ways = [DIRECTIONS.index(trail.board.at(cell).what) for cell in trail.cells[:-1]]
    turns = [(after - before) % 4 for before, after in zip(ways, ways[1:], strict=False) if after != before]
    answer = {1: "right", 3: "left"}[turns[-1]] if turns else STRAIGHT
    choices = shuffled(rng, ["left", "right", STRAIGHT])
    return Asked("turn", _worded(rng, "turn", trail), answer, choices, trail.cells, trail.arrows)


def _ask_meet(rng: np.random.Generator, plan: Plan, buckets: Container[int]) -> tuple[Trail, Asked]:
    """Whether two trails end at the same circle, yes and no equally often. Evidence is the first trail, then the
    second."""
    meets = bool(rng.random() < 0.5)
    for _ in range(MAX_TRIES):
        both = second_start(rng, sample_trail(rng, plan, buckets), plan, meets)
        if both:
            one, two = both
            text, answer = _worded(rng, "meet", one, two), "yes" if meets else "no"
            cells, arrows = one.cells + two.cells, one.arrows + two.arrows
            return one, Asked("meet", text, answer, shuffled(rng, ["yes", "no"]), cells, arrows)
    raise UserError(
        f"no board of {plan.grid[0]}x{plan.grid[1]} cells has two trails to ask about; ask for other arrows"
    )


def sample_switch(rng: np.random.Generator, plan: Plan, buckets: Container[int]) -> tuple[Board, list[Asked]]:
    """A board with two starts whose trails end at different circles (so that they share no cell), and four questions:
    about the end of the first trail in two wordings, and about that of the second in two."""
    for _ in range(MAX_TRIES):
        both = second_start(rng, sample_trail(rng, plan, buckets), plan, meets=False)
        if both:
            board = both[0].board
            choices = shuffled(rng, [board.at(cell).color for cell in board.where("circle")])
            found = []
            for trail in both:
                for wording in shuffled(rng, WORDINGS["end"])[:2]:
                    text = wording.format(start=trail.start_name)
                    found.append(Asked("end", text, trail.end.color, choices, trail.cells, trail.arrows))
            return board, found
    raise UserError(
        f"no board of {plan.grid[0]}x{plan.grid[1]} cells has two trails apart from each other; ask for other arrows"
    )


ASKERS: dict[str, Callable[[np.random.Generator, Trail, Plan], Asked]] = {
    "end": ask_end,
    "arrows": _ask_arrows,
    "turn": _ask_turn,
}


def sample_asked(
    rng: np.random.Generator, plan: Plan, kinds: tuple[str, ...], buckets: Container[int]
) -> tuple[Trail, Asked]:
    """A board and a question of one of ``kinds`` about it; without a choice, about the end."""
    kind = choose(rng, kinds) if kinds else "end"
    if kind == "meet":
        return _ask_meet(rng, plan, buckets)
    trail = sample_trail(rng, plan, buckets)
    return trail, ASKERS[kind](rng, trail, plan)
