"""Where a thought is moved to, and the numbers of steering: small boards and records written by hand."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import pytest
from PIL import Image

from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.residual_summary import halves
from realvr.diagnostics.steer import Steer, SteerSettings
from realvr.diagnostics.steer_moves import (
    NO_ANSWER,
    NO_PLACE,
    OTHER_QUESTION,
    SEVERAL,
    Move,
    check,
    control_seed,
    move_at,
    steerable,
)
from realvr.diagnostics.steer_summary import outcome, summarise_steer
from realvr.errors import UserError
from realvr.world.splits import Recipe, samples

# The own trail goes right along the first row to the red circle. The second row leads left to blue, what lies below its
# right end leads there too, and two arrows point at each other.
BOARD = [
    ["right", "right", "right", "circle red"],
    ["circle blue", "left", "left", "left"],
    ["right", "left", "circle green", "up"],
    ["up", "right", "right", "up"],
]
CELLS = [[0, 0], [0, 1], [0, 2], [0, 3]]
LEADS_ELSEWHERE = {(1, 1): 2, (1, 2): 3, (1, 3): 4, (2, 3): 5, (3, 3): 6, (3, 2): 7, (3, 1): 8}
"""Arrows off the trail that lead to another circle (all to blue), and the cells of their way, both ends included."""


def picture(name: str = "p") -> ImageRef:
    return ImageRef.from_image(name, Image.new("RGB", (48, 48)))


def boxes(cells: Any, image: int = 0) -> list[Box]:
    return [Box(image, (c / 4, r / 4, (c + 1) / 4, (r + 1) / 4)) for r, c in cells]


def trail(id: str = "a", **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "answer": "red",
        "boxes": boxes(CELLS),
        "meta": {"trail": {"grid": [4, 4], "cells": CELLS, "board": BOARD}},
    }
    return Sample.ask(id, [picture()], "Where does it end?", **fields | changes)


def cell_of(box: Any, side: int = 4) -> tuple[int, int]:
    """Row and column of the cell that a box is, to rounding."""
    x0, y0, x1, y1 = (value * side for value in box)
    row, column = round(y0), round(x0)
    assert (x0, y0, x1, y1) == pytest.approx((column, row, column + 1, row + 1), abs=1e-4)
    return row, column


# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize(("latents", "step"), [(4, 1), (8, 1), (8, 3), (8, 6), (8, 7), (5, 3)])
def test_every_arrow_that_leads_elsewhere_in_time_is_chosen_and_no_other(latents: int, step: int) -> None:
    in_time = {cell for cell, length in LEADS_ELSEWHERE.items() if step + length - 1 <= latents}
    found: Counter[tuple[int, int]] = Counter()
    for number in range(40 * len(in_time)):
        move = move_at(trail(str(number)), step, latents)
        assert isinstance(move, Move) and move.cell is not None and move.answer == "blue" and move.image == 0
        assert cell_of(move.box) == move.cell
        found[move.cell] += 1
    assert set(found) == in_time and min(found.values()) >= 15, "drawn evenly"


def test_what_is_expected_after_a_move() -> None:
    ways = {
        (2, 3): [(1, 3), (1, 2), (1, 1), (1, 0)],
        (1, 2): [(1, 1), (1, 0)],
        (1, 1): [(1, 0)],
        (1, 3): [(1, 2), (1, 1), (1, 0)],
    }
    seen = set()
    for number in range(60):
        move = move_at(trail(str(number)), 2, 6)
        assert isinstance(move, Move) and move.cell is not None and move.own is not None
        way = ways[move.cell]
        assert [cell_of(box) for box in move.new] == (way + [way[-1]] * 4)[:4]  # steps 3 to 6, the last repeated
        assert [cell_of(box) for box in move.old] == [(0, 2), (0, 3), (0, 3), (0, 3)]
        assert cell_of(move.own) == (0, 1) and not move.ended
        seen.add(move.cell)
    assert len(seen) == 4
    late = move_at(trail(), 5, 8)
    assert isinstance(late, Move) and late.own is not None and late.ended and cell_of(late.own) == (0, 3)
    at_the_end = move_at(trail(), 4, 8)
    assert isinstance(at_the_end, Move) and at_the_end.ended


def test_the_choice_depends_on_seed_sample_and_step_alone() -> None:
    def cells(seed: int, step: int) -> list[Any]:
        moves = [move_at(trail(str(number)), step, 8, seed) for number in range(30)]
        return [move.cell for move in moves if isinstance(move, Move)]

    assert cells(0, 1) == cells(0, 1)
    assert cells(0, 1) != cells(1, 1) and cells(0, 1) != cells(0, 2)
    assert move_at(trail("7"), 2, 8) == move_at(trail("7", tags={"more": "tags"}), 2, 8)


def test_an_id_may_hold_half_a_surrogate_pair() -> None:
    """As JSON data may; ordinary ids draw what they always drew."""
    odd = "a\ud800"
    assert isinstance(move_at(trail(odd), 2, 4), Move) and control_seed(0, odd, 2) != control_seed(0, "a", 2)
    assert sorted(map(len, halves([odd, "a", "b", "c"]))) == [2, 2]
    assert control_seed(0, "é", 2) == zlib.crc32("0\né\n2\nrandom".encode())


def test_reasons_why_there_is_no_place() -> None:
    assert move_at(trail(), 8, 8) == NO_PLACE  # whatever is put at the last step cannot be followed
    assert move_at(trail(answer="3"), 2, 8) == OTHER_QUESTION
    looked = {"trail": {"grid": [4, 4], "cells": [[0, 3]], "board": BOARD}}
    assert isinstance(move_at(trail(meta=looked), 2, 8), Move)  # the circle itself is a trail of one cell
    looked = {"trail": {"grid": [4, 4], "cells": [[0, 2]], "board": BOARD}}
    assert move_at(trail(meta=looked), 2, 8) == OTHER_QUESTION  # a single look, not a whole trail
    only = [["right", "circle red"], ["up", "circle red"]]
    same = {"trail": {"grid": [2, 2], "cells": [[0, 0], [0, 1]], "board": only}}
    assert move_at(trail(meta=same, boxes=[]), 1, 8) == NO_PLACE  # the other arrow joins the own trail
    two = [picture("p"), picture("q")]
    turns = [Message("user", "?", (0, 1))]
    plain = trail()
    assert move_at(Sample("t", two, turns, "red", meta=plain.meta), 2, 8) == SEVERAL
    shown = move_at(Sample("t", two, [Message("user", "?", (1, 0))], "red", meta=plain.meta, boxes=boxes(CELLS)), 2, 8)
    assert isinstance(shown, Move) and shown.image == 1, "counted as the prompt shows them"


def test_options_decide_which_circle_is_another() -> None:
    """Answers are letters where there are options, and a circle that is no option is no place to lead to."""
    sample = trail(answer="B", choices=["blue", "red", "green", "yellow"])
    move = move_at(sample, 2, 8)
    assert isinstance(move, Move) and move.answer == "blue"
    assert move_at(trail(answer="B", choices=["pink", "red", "green", "yellow"]), 2, 8) == NO_PLACE


def test_the_worlds_trails_can_be_moved() -> None:
    """Solved again: the place is an arrow off the trail, and following the board from it ends at the answer in time."""
    steps = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    moved = 0
    for sample in samples(Recipe("trails", seed=3, count=30)):
        check(sample)
        facts = sample.meta["trail"]
        for step in (2, 4, 6):
            move = move_at(sample, step, 8)
            if isinstance(move, str):
                assert move == NO_PLACE
                continue
            moved += 1
            assert move.cell is not None and list(move.cell) not in facts["cells"]
            (row, column), way = move.cell, []
            while facts["board"][row][column] in steps:
                down, right = steps[facts["board"][row][column]]
                row, column = row + down, column + right
                way.append((row, column))
            assert facts["board"][row][column] == f"circle {move.answer}" and move.answer in sample.choices
            assert move.answer != sample.answer_text and step + len(way) <= 8
            assert [cell_of(box, 6) for box in move.new] == (way + [way[-1]] * 8)[: 8 - step]
            assert [cell_of(box, 6) for box in move.old] == [
                tuple(facts["cells"][min(k, len(facts["cells"]) - 1)]) for k in range(step, 8)
            ]
    assert moved > 60


# ---------------------------------------------------------------------- places that the data lists


def listed(places: Any, **changes: Any) -> Sample:
    return Sample.ask("a", [picture()], "Which?", **{"answer": "red", "meta": {"steer": places}} | changes)


def test_listed_places() -> None:
    places = [{"box": [0, 0, 0.5, 0.5], "answer": "blue"}, {"box": [0.5, 0, 1, 1], "answer": "Red"}]
    move = move_at(listed(places), 3, 8)
    assert isinstance(move, Move)
    assert (move.box, move.answer, move.own, move.new, move.old) == ((0, 0, 0.5, 0.5), "blue", None, (), ())
    with_boxes = move_at(listed(places, boxes=boxes([(0, 1), (2, 2)])), 3, 8)
    assert isinstance(with_boxes, Move) and with_boxes.own == (0.5, 0.5, 0.75, 0.75)
    assert move_at(listed(places[1:]), 3, 8) == NO_ANSWER
    assert steerable(listed(places)) and steerable(trail()) and not steerable(listed([], meta={}))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (listed([{"box": [0, 0, 2, 1], "answer": "blue"}]), "does not lie in the picture"),
        (listed([{"box": [0.5, 0, 0.5, 1], "answer": "blue"}]), "does not lie in the picture"),
        (listed([{"box": [0, 0, 1], "answer": "blue"}]), "meta['steer'] is not"),
        (listed([{"answer": "blue"}]), "meta['steer'] is not"),
        (listed([{"box": [0, 0, 1, 1], "answer": "x"}], answer="A", choices=["red", "blue"]), "names no option"),
        (listed([{"box": [0, 0, 1, 1], "answer": "blue", "image": 3}]), "meta['steer'] is not"),
        (trail(meta={"trail": {"grid": [4, 4], "cells": CELLS}}), "meta['trail'] is not"),
        (trail(meta={"trail": {"grid": [4, 3], "cells": CELLS, "board": BOARD}}), "the board is not 4 x 3"),
        (trail(meta={"trail": {"grid": [4, 4], "cells": [], "board": BOARD}}), "there is no cell"),
        (trail(meta={"trail": "long"}), "meta['trail'] is not"),
    ],
)
def test_what_cannot_be_read_is_named(sample: Sample, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check(sample)
    assert words in str(caught.value) and str(caught.value).startswith("a: ") and "\n" not in str(caught.value)


# ---------------------------------------------------------------------- numbers


def record(id: str, step: int, said: str | None, **changes: Any) -> dict[str, Any]:
    """The own answer is A, that of the new place B."""
    return {
        "id": id, "step": step, "latents": 6, "skipped": None, "ended": False, "old_truth": "A", "new_truth": "B",
        "extracted": {"free": "A", "moved": said, "own_place": "A", "put_back": "A"}, "unchanged": True, "error": None,
        "later": {"moved": [True, True, True, False], "own_place": [True] * 4, "free": [True, True, False, False]},
        "choices": ["one", "two", "three"],
    } | changes  # fmt: skip


RECORDS = [
    record("x", 2, "B"),
    record("y", 2, "A", ended=True, later={"moved": [False] * 4, "own_place": [True, False] * 2, "free": [True] * 4}),
    record("z", 2, "C", unchanged=False),
    record(
        "w",
        2,
        None,
        extracted={"free": None, "moved": None, "put_back": None},
        later={"moved": [], "own_place": [], "free": []},
    ),
    {"id": "v", "step": 2, "skipped": NO_PLACE, "error": None},
    {"id": "u", "step": 2, "skipped": OTHER_QUESTION, "error": None},
    {"id": "t", "error": "gone"},
    record("x", 4, "two", later={"moved": [True, True], "own_place": [True] * 2, "free": [True] * 2}),
    *({"id": name, "step": 4, "skipped": NO_PLACE, "error": None} for name in "yzwvu"),
]


def test_shares_by_hand() -> None:
    found = summarise_steer(RECORDS)
    assert (found["latents"], found["questions"], found["errors"]) == (6, 6, 1)
    second, fourth = found["steps"]
    assert [step["step"] for step in found["steps"]] == [2, 4]
    for name in ("new", "old", "neither", "unreadable"):
        assert (second["moved"][name]["count"], second["moved"][name]["of"]) == (1, 4), name
    assert (second["own_place"]["old"]["count"], second["own_place"]["old"]["of"]) == (3, 3)
    assert (second["free"]["old"]["count"], second["free"]["unreadable"]["count"]) == (3, 1)
    assert second["later_moved"]["mean"] == pytest.approx((75 + 0 + 75) / 3) and second["later_moved"]["pairs"] == 3
    assert second["later_own_place"]["mean"] == pytest.approx((100 + 50 + 100) / 3)
    assert second["later_free"]["mean"] == pytest.approx((50 + 100 + 50) / 3)
    assert (second["unchanged"]["count"], second["unchanged"]["of"]) == (3, 4)
    assert (second["under_way"]["new"]["of"], second["ended"]["old"]["count"], second["ended"]["old"]["of"]) == (
        3,
        1,
        1,
    )
    assert second["skipped"] == {NO_PLACE: 1, OTHER_QUESTION: 1} and fourth["skipped"] == {NO_PLACE: 5}
    assert fourth["moved"]["new"]["rate"] == 1.0 and outcome(RECORDS[7]) == "new", "words for a letter"
    # Questions x, y, z, w: x followed at both of its steps.
    assert found["follows"]["mean"] == pytest.approx(25.0) and found["follows"]["pairs"] == 4


def test_tables_figure_and_the_empty_case() -> None:
    steer = Steer()
    figures, moved, shams, progress, *told = steer.draw([Shown("m", summarise_steer(RECORDS))])
    assert [row[1] for row in moved.rows] == ["z_2", "z_4"] and moved.rows[0][3].value == 25.0
    assert shams.rows[0][-1].below.endswith("3/4") and [row[2] for row in progress.rows] == ["goes on", "has ended"]
    assert "follows the move 25.0 % at z_2, 100.0 % at z_4" in str(figures.figures[0][1])
    assert f"m, z_4: 5 questions are not moved: 5 because {NO_PLACE}." in [text.text for text in told]
    nothing = summarise_steer(RECORDS[4:7])
    assert nothing["steps"][0]["questions"] == 0 and nothing["follows"]["mean"] is None
    assert steer.drawn([Shown("m", nothing)]) and steer.markdown(nothing, "m") and steer.csv_rows(nothing, "m")
    assert summarise_steer([])["steps"] == [] and steer.drawn([Shown("m", summarise_steer([]))])


def test_steps_of_a_span() -> None:
    assert (
        SteerSettings().steps(8) == (2, 4, 6)
        and SteerSettings().steps(6) == (2, 4)
        and SteerSettings().steps(2) == (1,)
    )
    assert SteerSettings(at="6,2,2").steps(6) == (2, 6)
    for text, words in (("0", "counted from 1"), ("2;4", "write steps"), ("", "write steps")):
        with pytest.raises(UserError, match=words):
            SteerSettings(at=text)
    with pytest.raises(UserError, match="there is no step 9; the span has K = 8"):
        SteerSettings(at="2,9").steps(8)
