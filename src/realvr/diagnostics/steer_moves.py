"""Where a thought is moved to: the place that is put into the span at step t, and what follows if the model goes on
from there. No torch.

The rule for a trail: of the arrows that are not on the sample's own trail, those whose trail ends in a circle with
another answer and reaches it by step K; one of them is drawn, by the seed, the sample's id and the step alone. Data
without trails may list places itself: ``meta["steer"] = [{"box": [x0, y0, x1, y1], "answer": "…"}, …]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realvr.answers import canonical_answer, equal
from realvr.data.boxes import XYXY, canvas_size, cell_box, clip_box, prompt_boxes
from realvr.data.sample import Sample
from realvr.diagnostics.numbers import hashed
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.world.trails import follow

OTHER_QUESTION = "the question does not ask for the circle at the end of its trail"
NO_PLACE = "no arrow off the trail leads to another circle in time"
NO_ANSWER = "no place with another answer is listed"
SEVERAL = "several pictures are shown, and no box says which holds the trail"
Cell = tuple[int, int]


@dataclass(frozen=True)
class Move:
    """One latent to be replaced. Boxes are fractions of picture ``image``, counted in the order of the prompt."""

    step: int
    image: int
    box: XYXY
    """The place that is put into the span."""
    answer: str
    """Right if the answer follows."""
    own: XYXY | None = None
    """The sample's own place at this step; None where no evidence says it."""
    new: tuple[XYXY, ...] = ()
    """Where the latents after this step are on the new trail, up to K; empty where that is not known."""
    old: tuple[XYXY, ...] = ()
    """Where they are on the sample's own trail."""
    cell: Cell | None = None
    """Row and column of the place on its board, from 0."""
    ended: bool = False
    """Whether the own trail has reached its end at this step."""
    distance: int | None = None
    """Cells of the board from the own place to the new one; None where the board is not known."""


def steerable(sample: Sample) -> bool:
    """Whether a sample says where its thought could be moved to."""
    return "trail" in sample.meta or "steer" in sample.meta


def move_at(sample: Sample, step: int, latents: int, seed: int = 0) -> Move | str:
    """The place for one step of a span of K latents, or why there is none."""
    drawn = np.random.default_rng([seed, hashed(f"{sample.id}\n{step}")])
    return _listed(sample, step, drawn) if "trail" not in sample.meta else _off_trail(sample, step, latents, drawn)


# ---------------------------------------------------------------------- trails


def check(sample: Sample) -> None:
    """Refuse a sample whose trail or places cannot be read."""
    what = "trail" if "trail" in sample.meta else "steer"
    try:
        if what == "trail":
            _trail(sample)
        else:
            _places(sample)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        form = {
            "trail": '{"grid": [rows, columns], "cells": [[row, column], …], "board": [["up", "circle red", …], …]}',
            "steer": '[{"box": [x0, y0, x1, y1], "answer": "…"}, …], boxes in fractions',
        }
        found = f" ({error})" if isinstance(error, ValueError) else ""
        raise UserError(f"{sample.source or sample.id}: meta['{what}'] is not {form[what]}{found}") from None


def _trail(sample: Sample) -> tuple[Grid, list[Cell], list[list[str]]]:
    trail = sample.meta["trail"]
    rows, columns = (int(value) for value in trail["grid"])
    board = [[str(entry) for entry in row] for row in trail["board"]]
    if len(board) != rows or any(len(row) != columns for row in board):
        raise ValueError(f"the board is not {rows} x {columns}")
    cells = [(int(row), int(column)) for row, column in trail["cells"]]
    if not cells:
        raise ValueError("there is no cell")
    return Grid(rows, columns), cells, board


def _off_trail(sample: Sample, step: int, latents: int, drawn: np.random.Generator) -> Move | str:
    grid, cells, board = _trail(sample)
    whole = follow(board, cells[0]) == cells  # a question about a single look lists other cells
    if not whole or not equal(_color(board, cells[-1]), sample.answer, sample.choices):
        return OTHER_QUESTION
    image = _image(sample)
    if image is None:
        return SEVERAL
    starts = [(row, column) for row in range(grid.rows) for column in range(grid.cols) if (row, column) not in cells]
    ways = [way for way in (follow(board, start) for start in starts) if way is not None]
    # The first cell of a way is put at this step, so its last is reached len - 1 steps later. A way of one cell is a
    # circle: an answer, not a place to go on from.
    fits = [way for way in ways if 1 < len(way) <= latents - step + 1 and _another(sample, _color(board, way[-1]))]
    if not fits:
        return NO_PLACE
    way = fits[int(drawn.integers(len(fits)))]
    later = latents - step
    return Move(
        step=step,
        image=image,
        box=cell_box(grid, *way[0]),
        answer=_color(board, way[-1]),
        own=_walk(grid, cells, step - 1, 1)[0],
        new=_walk(grid, way, 1, later),
        old=_walk(grid, cells, step, later),
        cell=way[0],
        ended=step >= len(cells),
        distance=grid_distance(way[0], cells[min(step, len(cells)) - 1]),
    )


def grid_distance(first: Cell, second: Cell) -> int:
    """Rows plus columns between two cells."""
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def box_distance(grid: Grid, first: XYXY, second: XYXY) -> int:
    """The same between the middles of two boxes, in visual tokens of the picture."""
    rows, columns = canvas_size(grid)
    (x, y), (u, v) = (((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in (first, second))
    return round(abs(y - v) * rows) + round(abs(x - u) * columns)


def control_seed(seed: int, name: str, step: int) -> int:
    """Of the random vector put at a step: the seed, the sample and the step alone decide it."""
    return hashed(f"{seed}\n{name}\n{step}\nrandom")


def _another(sample: Sample, color: str) -> bool:
    """Whether a color answers the question, and otherwise than right."""
    known = canonical_answer(color, sample.choices) is not None
    return known and not equal(color, sample.answer, sample.choices)


def _color(board: Sequence[Sequence[str]], cell: Cell) -> str:
    return board[cell[0]][cell[1]].removeprefix("circle ")


def _walk(grid: Grid, cells: Sequence[Cell], start: int, count: int) -> tuple[XYXY, ...]:
    """Boxes of ``count`` cells from number ``start`` (from 0) on, the last repeated."""
    return tuple(cell_box(grid, *cells[min(place, len(cells) - 1)]) for place in range(start, start + count))


def _image(sample: Sample) -> int | None:
    """The picture of the trail, in the order of the prompt."""
    pictures = {box.image for box in prompt_boxes(sample)}
    if not pictures and len(sample.shown) == 1:
        return 0
    return pictures.pop() if len(pictures) == 1 else None


# ---------------------------------------------------------------------- places that the data lists


def _places(sample: Sample) -> list[tuple[int, XYXY, str]]:
    """Picture (in the order of the prompt), box and answer of each."""
    order = {index: position for position, index in enumerate(sample.shown)}
    found = []
    for entry in sample.meta["steer"]:
        x0, y0, x1, y1 = (float(value) for value in entry["box"])
        box = clip_box((x0, y0, x1, y1))
        answer = canonical_answer(str(entry["answer"]), sample.choices)
        if box is None or not all(0 <= value <= 1 for value in (x0, y0, x1, y1)):
            raise ValueError(f"box {entry['box']} does not lie in the picture")
        if answer is None:
            raise ValueError(f"answer {entry['answer']!r} names no option")
        found.append((order[int(entry.get("image", 0))], box, answer))
    return found


def _listed(sample: Sample, step: int, drawn: np.random.Generator) -> Move | str:
    fits = [place for place in _places(sample) if not equal(place[2], sample.answer, sample.choices)]
    if not fits:
        return NO_ANSWER
    image, box, answer = fits[int(drawn.integers(len(fits)))]
    boxes = prompt_boxes(sample)
    own = boxes[min(step, len(boxes)) - 1] if boxes else None
    same = own is not None and own.image == image
    return Move(step, image, box, answer, own.xyxy if own is not None and same else None)


def as_json(move: Move) -> dict[str, Any]:
    """What a record keeps of it."""
    return {
        "image": move.image + 1,
        "box": [round(value, 4) for value in move.box],
        "cell": None if move.cell is None else list(move.cell),
        "ended": move.ended,
    }
