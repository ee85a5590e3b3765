"""Single looks at a board, for training a model from nothing: what is where, and one step at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from realvr.world.sampling import pick
from realvr.world.trails.board import Cell, cells_of, place, step
from realvr.world.trails.draws import shuffled
from realvr.world.trails.picture import name
from realvr.world.trails.plan import Plan
from realvr.world.trails.questions import Asked, ask_end
from realvr.world.trails.sampling import Trail
from realvr.world.words import DIRECTIONS, WITHHELD_WORDS, with_article

END_SHARE = 0.3
"""Share of questions about a whole trail among the lessons."""
WORDINGS = {
    "points": (
        "Which way does the {start} point?",
        "In which direction is the {start} pointing?",
        "Look at the {start}. Where does it point?",
    ),
    "at": ("What is at {place}?", "Look at {place}. What is there?"),
    "where": ("Where is the {thing}?", "In which row and column is the {thing}?"),
    "step_at": (
        "Follow the arrow at {place} one step. What is there?",
        "Go one step from {place}, where the arrow points. What do you find?",
    ),
    "step": (
        "Start at the {start} and follow it one step. What is there?",
        "Go one step from the {start}, where it points. What do you find?",
    ),
}


def _circles(trail: Trail) -> list[Cell]:
    return trail.board.where("circle")


def _two_and_two(rng: np.random.Generator, trail: Trail, answer: str) -> tuple[str, ...]:
    """The answer among two arrows and two circles, so that neither is the better guess."""
    arrows = [with_article(f"{direction} arrow") for direction in DIRECTIONS]
    circles = [with_article(name(trail.board, cell)) for cell in _circles(trail)]
    shown = [answer]
    for group in (arrows, circles):
        others = shuffled(rng, [option for option in group if option != answer])
        shown += others[: 1 if answer in group else 2]
    return shuffled(rng, shown)


def _points(rng: np.random.Generator, trail: Trail) -> Asked:
    text = pick(rng, WORDINGS["points"]).format(start=trail.start_name)
    return Asked("points", text, trail.start.what, shuffled(rng, list(DIRECTIONS)), trail.cells[:1], 0)


def _at(rng: np.random.Generator, trail: Trail) -> Asked:
    """Half the time a circle, else an arrow (not the start, which has a color to be named by)."""
    wanted = ("circle",) if rng.random() < 0.5 else DIRECTIONS
    fits = [
        cell for cell in cells_of(trail.board.grid) if trail.board.at(cell).what in wanted and cell != trail.cells[0]
    ]
    cell = pick(rng, fits)
    answer = with_article(name(trail.board, cell))
    text = pick(rng, WORDINGS["at"]).format(place=place(cell))
    return Asked("at", text, answer, _two_and_two(rng, trail, answer), (cell,), 0)


def _where(rng: np.random.Generator, trail: Trail) -> Asked:
    """A circle, or the start; never one whose color is a withheld word. Options are the other places of the kind."""
    options = [*_circles(trail), *([] if trail.start_by == "place" else trail.cells[:1])]
    cell = pick(rng, [option for option in options if trail.board.at(option).color not in WITHHELD_WORDS])
    thing = trail.start_name if cell == trail.cells[0] else name(trail.board, cell)
    others = shuffled(rng, [place(option) for option in options if option != cell])[:3]
    text = pick(rng, WORDINGS["where"]).format(thing=thing)
    return Asked("where", text, place(cell), shuffled(rng, [place(cell), *others]), (cell,), 0)


def _one_step(rng: np.random.Generator, trail: Trail, kind: str, cell: Cell, there: Cell) -> Asked:
    answer = with_article(name(trail.board, there))
    text = pick(rng, WORDINGS[kind]).format(start=trail.start_name, place=place(cell))
    return Asked(kind, text, answer, _two_and_two(rng, trail, answer), (cell, there), 1)


def _step(rng: np.random.Generator, trail: Trail) -> Asked:
    return _one_step(rng, trail, "step", *trail.cells[:2])


def _step_at(rng: np.random.Generator, trail: Trail) -> Asked:
    """From any arrow that leads to an arrow or a circle, neither of them the start; half the time to a circle."""
    board = trail.board
    steps = [
        (cell, step(cell, board.at(cell).what))
        for cell in cells_of(board.grid)
        if board.at(cell).what in DIRECTIONS and cell != trail.cells[0]
    ]
    steps = [(cell, there) for cell, there in steps if board.has(there) and there != trail.cells[0]]
    steps = [(cell, there) for cell, there in steps if board.at(there).what]
    if not steps:  # all others point off a small board
        return _step(rng, trail)
    to_circle = bool(rng.random() < 0.5)
    wanted = [each for each in steps if (board.at(each[1]).what == "circle") == to_circle]
    return _one_step(rng, trail, "step_at", *pick(rng, wanted or steps))


LESSONS: dict[str, Callable[[np.random.Generator, Trail], Asked]] = {
    "points": _points,
    "at": _at,
    "where": _where,
    "step_at": _step_at,
    "step": _step,
}
KINDS: tuple[str, ...] = (*LESSONS, "end")


def ask_lesson(rng: np.random.Generator, trail: Trail, plan: Plan, kinds: tuple[str, ...]) -> Asked:
    """A lesson of one of ``kinds``; without a choice, whole trails have their own share."""
    if not kinds:
        kinds = ("end",) if rng.random() < END_SHARE else tuple(LESSONS)
    kind = pick(rng, kinds)
    return ask_end(rng, trail, plan) if kind == "end" else LESSONS[kind](rng, trail)
