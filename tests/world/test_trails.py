"""Trails: answers and ordered evidence against a solver that reads pixels, and that nothing but following helps."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from realvr.errors import UserError
from realvr.world.splits import SPLITS, Recipe, drawn, items
from realvr.world.trails import follow
from realvr.world.trails.plan import START_COLORS, Plan
from realvr.world.words import WITHHELD_WORDS
from trail_solver import described, look, solve

FAMILY = [name for name in SPLITS if name.startswith("trails")]


def agrees(item, board):
    answer, cells = solve(board, item.text)
    trail = item.meta["trail"]
    assert answer == item.answer == item.choices["ABCD".index(item.letter)], item.id
    assert [list(cell) for cell in cells] == trail["cells"], item.id
    width, height = item.views[0].size
    rows, columns = trail["grid"]
    for (_, (x0, y0, x1, y1)), (row, column) in zip(item.boxes, cells, strict=True):
        assert (x0, y0) == (round(column * width / columns), round(row * height / rows))
        assert (x1, y1) == (round((column + 1) * width / columns), round((row + 1) * height / rows))
    if item.kind == "end":
        assert item.tags["arrows"] == str(len(cells) - 1)


@pytest.mark.parametrize("name", ["trails", "trails-train", "trails-lessons"])
def test_a_solver_that_reads_pixels_agrees(name):
    for item in items(Recipe(name, seed=2, count=150)):
        rows, columns = item.meta["trail"]["grid"]
        seen = look(item.views[0].pixels(), rows, columns)
        assert seen == described(item), item.id
        entries = [[f"circle {color}" if kind == "circle" else kind for color, kind in row] for row in seen]
        assert entries == item.meta["trail"]["board"]
        agrees(item, seen)


@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_solver_agrees_on_many_trails(count):
    arrows, letters = Counter(), Counter()
    for item in items(Recipe("trails", seed=7, count=count)):
        agrees(item, described(item))
        arrows[int(item.tags["arrows"])] += 1
        letters[item.letter] += 1
    assert sorted(arrows) == list(range(1, 8)) and sorted(letters) == list("ABCD")
    for found, values in ((arrows, 7), (letters, 4)):  # uniform, within five standard deviations
        for number in found.values():
            assert abs(number - count / values) < 5 * (count / values * (1 - 1 / values)) ** 0.5


def test_follow_stops_at_a_circle_and_says_where_there_is_none():
    board = [["right", "down", "left"], ["circle red", "left", ""], ["up", "left", "right"]]
    assert follow(board, (0, 0)) == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert follow(board, (2, 1)) == [(2, 1), (2, 0), (1, 0)]
    assert follow(board, (1, 0)) == [(1, 0)]
    assert follow(board, (2, 2)) is None  # off the board
    assert follow(board, (1, 2)) is None  # nothing to follow
    assert follow([["right", "left"]], (0, 0)) is None  # in a circle
    assert follow(board, (3, 0)) is None


def test_nothing_but_following_finds_the_circle():
    """From the start, the direction of its arrow and the places of the circles, no guess is much better than chance
    for trails of three arrows and more; neither is the circle that most arrows lead to, over all lengths."""
    hits = defaultdict(list)
    rng = np.random.default_rng(0)
    for item in items(Recipe("trails", seed=4, count=1500)):
        board = np.array(item.meta["trail"]["board"])
        start, *_, end = [tuple(cell) for cell in item.meta["trail"]["cells"]]
        arrows = int(item.tags["arrows"])
        circles = [tuple(cell) for cell in np.argwhere(np.char.startswith(board, "circle")).tolist()]
        ahead = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}[board[start]]
        ends = Counter(way[-1] for cell in np.ndindex(board.shape) if (way := follow(board.tolist(), cell)))

        def off(cell, by=(0, 0), start=start):
            return abs(cell[0] - start[0] - by[0]) + abs(cell[1] - start[1] - by[1])

        guesses = {
            "nearest": {cell: off(cell) for cell in circles},
            "farthest": {cell: -off(cell) for cell in circles},
            "nearest to the second cell": {cell: off(cell, ahead) for cell in circles},
            "ahead": {
                cell: -((cell[0] - start[0]) * ahead[0] + (cell[1] - start[1]) * ahead[1]) / off(cell)
                for cell in circles
            },
            "most led to": {cell: -ends[cell] for cell in circles},
        }
        for name, cost in guesses.items():
            best = [cell for cell in circles if cost[cell] == min(cost.values())]
            right = best[rng.integers(len(best))] == end
            hits[name].append(right)
            if arrows >= 3:
                hits[f"{name}, long"].append(right)
    share = {name: np.mean(found) for name, found in hits.items()}
    share.pop("most led to, long")  # a long trail is itself a lot of arrows that lead to its end
    assert all(value < 0.35 for name, value in share.items() if name.endswith(", long")), share
    assert share["most led to"] < 0.35 and max(share.values()) < 0.48, share


def test_colors_of_start_and_circles():
    """The start is the only colored arrow, no circle has its color, and no withheld word refers to it."""
    starts, answers = Counter(), Counter()
    for item in items(Recipe("trails", seed=5, count=400)):
        table = item.meta["objects"]
        colored = [entry["color"] for entry in table if entry["shape"] != "circle" and entry["color"] != "black"]
        circles = [entry["color"] for entry in table if entry["shape"] == "circle"]
        assert len(colored) == 1 and len(set(circles)) == 4 and colored[0] not in circles
        assert sorted(item.choices) == sorted(circles) and f"the {colored[0]} arrow" in item.text
        assert item.tags["withheld"] == "no" and not any(word in item.text for word in WITHHELD_WORDS)
        starts[colored[0]] += 1
        answers[item.answer] += 1
    assert set(starts) == set(START_COLORS) and len(answers) == 8


def test_lessons_ask_everything_and_name_nothing_by_a_withheld_word():
    found = list(items(Recipe("trails-lessons", seed=1, count=800)))
    kinds = Counter(item.kind for item in found)
    assert set(kinds) == {"points", "at", "where", "step_at", "step", "end"} and 190 <= kinds["end"] <= 290
    letters = defaultdict(Counter)
    for item in found:
        assert not any(f"the {word}" in item.text for word in WITHHELD_WORDS)
        assert len(set(item.choices)) == 4 and len(item.boxes) == len(item.meta["trail"]["cells"])
        letters[item.kind][item.letter] += 1
        colored = [entry for entry in item.meta["objects"] if entry["color"] != "black"]
        assert len(item.meta["objects"]) == 36 and item.meta["caption"].count(" row ") == len(colored) == 5
    assert all(set(each) == set("ABCD") for each in letters.values())
    only = items(Recipe("trails-lessons", seed=1, count=20, kinds=("where", "step")))
    assert {item.kind for item in only} == {"where", "step"}


def test_a_picture_writes_nothing_outside_its_cells():
    """Turning one arrow, or recoloring a circle, changes no pixel of another cell."""
    item = next(items(Recipe("trails", seed=0, count=1)))
    scene = item.views[0].scene
    before = item.views[0].pixels()
    for index, thing in enumerate(scene.objects):
        change = {"color": "white"} if thing.shape == "circle" else {"rotation": thing.rotation + 90}
        after = type(item.views[0])(scene.edit(index, **change), "x.png").pixels()
        rows, columns = np.nonzero((before != after).any(2))
        assert set(zip((rows // 8).tolist(), (columns // 8).tolist(), strict=True)) == {divmod(index, 6)}


def test_splits_of_trails_share_no_place_of_circles():
    owners = defaultdict(set)
    for name in FAMILY:
        for item in items(Recipe(name, seed=0, count=30 if name == "trails-pairs" else 300)):
            board = item.meta["trail"]["board"]
            owners[str([[what[:6] == "circle" for what in row] for row in board])].add(name)
    assert all(len(names) == 1 for names in owners.values())


def test_captions_and_boxes_survive_in_a_sample():
    recipe = Recipe("trails", seed=0, count=1)
    (sample,) = drawn(recipe, ("", 0))
    assert sample.images[0].size == (48, 48) and len(sample.boxes) == len(sample.meta["trail"]["cells"])
    assert all(np.isclose(box.xyxy[2] - box.xyxy[0], 1 / 6) for box in sample.boxes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"trail": Plan(grid=(7, 7))}, "grid 7x7 does not fit a canvas of 48x48"),
        ({"kinds": ("color",)}, "no kind of question 'color' in split trails"),
        ({"kinds": ("points",)}, "there are end"),
    ],
)
def test_bad_recipes_are_named(fields, named):
    with pytest.raises(UserError, match=named):
        Recipe("trails", **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"arrows": (0, 3)}, "arrows 0-3"),
        ({"arrows": (5, 3)}, "arrows 5-3"),
        ({"grid": (3, 3), "arrows": (1, 6)}, "3x3 cells has room for 5 at most"),
        ({"grid": (2, 6)}, "grid 2x6"),
    ],
)
def test_boards_that_cannot_be_are_named(fields, named):
    with pytest.raises(UserError, match=named):
        Plan(**fields)


def test_other_splits_have_no_grid():
    with pytest.raises(UserError, match="split blink has no trails"):
        Recipe("blink", trail=Plan(arrows=(1, 4)))
