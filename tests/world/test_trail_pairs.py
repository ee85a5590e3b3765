"""Edited boards: each edit changes exactly what it should, in the picture, on the way and in the answer."""

from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest

from realvr.diagnostics.pairs import pair_up
from realvr.world.splits import Recipe, items, samples
from trail_solver import look, solve


@pytest.fixture(scope="module")
def found():
    every = list(items(Recipe("trails-pairs", seed=1, count=40)))
    return list(zip(every[::2], every[1::2], strict=True))


def read(item):
    """The board as seen, the way and the answer."""
    board = look(item.views[0].pixels(), 6, 6)
    return board, *solve(board, item.text)[::-1]


def first_difference(one, two):
    return next((k for k, (a, b) in enumerate(zip_longest(one, two), 1) if a != b), None)


def test_edits_change_exactly_what_they_should(found):
    for original, edited in found:
        (board, way, answer), (board_2, way_2, answer_2) = read(original), read(edited)
        edit = original.tags["edit"]
        differ = [(r, c) for r in range(6) for c in range(6) if board[r][c] != board_2[r][c]]
        # The picture: in the cells that the meta data names, and nowhere else.
        boxes = [[c * 8, r * 8, c * 8 + 8, r * 8 + 8] for r, c in differ]
        assert sorted(boxes) == sorted(original.meta["edited_boxes_px"]) == sorted(edited.meta["edited_boxes_px"])
        rows, columns, _ = np.nonzero(original.views[0].pixels() != edited.views[0].pixels())
        assert {(r // 8, c // 8) for r, c in zip(rows.tolist(), columns.tolist(), strict=True)} == set(differ)
        # The answers and the ways, each side's own.
        for item, cells, right in ((original, way, answer), (edited, way_2, answer_2)):
            assert item.answer == right and right in item.choices and len(set(item.choices)) == 4
            assert item.meta["trail"]["cells"] == [list(cell) for cell in cells]
            assert [box for _, box in item.boxes] == [(c * 8, r * 8, c * 8 + 8, r * 8 + 8) for r, c in cells]
            assert item.tags["arrows"] == str(len(cells) - 1) and 2 <= len(cells) <= 8
            assert item.meta["trail"]["parts_at"] == first_difference(way, way_2)
            shown = [[(cell, seen[cell[0]][cell[1]]) for cell in w] for w, seen in ((way, board), (way_2, board_2))]
            assert item.meta["trail"]["changes_at"] == first_difference(*shown)
            assert item.tags["changed"] == ("yes" if answer != answer_2 else "no")
        turned = {cell for cell in differ if board[cell[0]][cell[1]][1] != board_2[cell[0]][cell[1]][1]}
        if edit == "turn_on_trail":
            assert len(differ) == 1 and turned == set(differ) <= set(way) and answer != answer_2
            assert original.meta["trail"]["parts_at"] == way.index(differ[0]) + 2
        elif edit == "turn_beside":
            ((row, column),) = turned
            assert differ == [(row, column)] and (row, column) not in way and way == way_2 and answer == answer_2
            assert any(abs(row - r) + abs(column - c) == 1 for r, c in way)
        elif edit == "recolor_end":
            assert (
                differ == [way[-1]] and not turned and way == way_2 and answer_2 not in {c for r in board for c, _ in r}
            )
        else:
            assert edit == "swap_circles" and len(differ) == 2 and not turned and way == way_2
            assert (answer != answer_2) == (way[-1] in differ)


def test_how_often_an_edit_changes_the_answer(found):
    counts = Counter((original.tags["edit"], original.tags["changed"]) for original, _ in found)
    assert counts["turn_on_trail", "yes"] == counts["recolor_end", "yes"] == counts["turn_beside", "no"] == 40
    assert 10 <= counts["swap_circles", "yes"] <= 30
    parted = Counter(original.meta["trail"]["parts_at"] for original, _ in found)
    assert all(parted[at] for at in range(2, 7)), parted


def test_the_diagnostics_read_them_as_pairs():
    pairs, report = pair_up(samples(Recipe("trails-pairs", seed=0, count=3)))
    assert [pair.edit for pair in pairs[::3]] == ["turn_on_trail", "turn_beside", "recolor_end", "swap_circles"]
    assert not any(report.counts().values()) and [pair.changed for pair in pairs[:6]] == [True] * 3 + [False] * 3
