"""Questions about whole trails, with their options and the cells that support the answer, in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realvr.world.sampling import pick
from realvr.world.trails.board import Cell
from realvr.world.trails.sampling import Trail

WORDINGS = {
    "end": (
        "Start at the {start} and follow the arrows. What color is the circle where you end?",
        "Follow the arrows from the {start}. Which color does the circle at the end have?",
        "Begin at the {start} and go where the arrows point. What is the color of the circle that you reach?",
    ),
}
KINDS: tuple[str, ...] = tuple(WORDINGS)


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


def shuffled(rng: np.random.Generator, options: list[str]) -> tuple[str, ...]:
    """The options in random order."""
    return tuple(options[k] for k in rng.permutation(len(options)).tolist())


def ask_end(rng: np.random.Generator, trail: Trail) -> Asked:
    """Which circle the trail ends at; the options are the circles of the board."""
    text = pick(rng, WORDINGS["end"]).format(start=f"{trail.start.color} arrow")
    colors = [trail.board.at(cell).color for cell in trail.board.where("circle")]
    return Asked("end", text, trail.end.color, shuffled(rng, colors), trail.cells, trail.arrows)
