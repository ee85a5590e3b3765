"""What can be chosen about trails: grids, lengths, clutter, starts, kinds, free answers, and trails in other splits."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from realvr.data.export import write
from realvr.data.reading import read
from realvr.errors import UserError
from realvr.world.making import MakeSettings, ShowSettings, make, show
from realvr.world.splits import Recipe, items, samples
from realvr.world.trails.plan import Plan, parse_arrows, parse_grid
from trail_solver import described, look, solve

KINDS = ("end", "arrows", "turn", "meet")
PLANS = {
    "3x3": (Plan((3, 3), (1, 4)), (48, 48)),
    "4x4": (Plan((4, 4), (1, 7)), (48, 48)),
    "5x5": (Plan((5, 5), (1, 9)), (80, 80)),
    "long": (Plan((6, 6), (1, 12)), (48, 48)),
    "wide": (Plan((4, 6), (2, 4)), (130, 90)),
    "shape": (Plan(start="shape"), (96, 96)),
    "place": (Plan(start="place"), (48, 48)),
}
"""Plans and canvases of which the solver can read the pixels."""


def agrees(item, board, low, high):
    answer, cells = solve(board, item.text)
    assert item.answer == answer and item.meta["trail"]["cells"] == [list(cell) for cell in cells], item.text
    assert not item.choices or (answer in item.choices and len(set(item.choices)) == len(item.choices))
    assert item.tags["kind"] == item.kind and len(item.boxes) == len(cells)
    circles = sum(board[r][c][1] == "circle" for r, c in cells)
    arrows = len(cells) - circles
    if item.kind in KINDS:
        assert int(item.tags["arrows"]) == arrows and low * circles <= arrows <= high * circles
        assert circles == (2 if item.kind == "meet" else 1)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("split", ["trails", "trails-lessons"])
def test_a_solver_that_reads_pixels_agrees_on_every_plan(name, split):
    plan, size = PLANS[name]
    kinds = KINDS if split == "trails" else ()
    for item in items(Recipe(split, seed=3, count=24, size=size, kinds=kinds, trail=plan)):
        board = look(item.views[0].pixels(), *plan.grid)
        assert board == described(item), item.id
        agrees(item, board, *plan.arrows)


@pytest.mark.parametrize("start", ["color", "shape", "place"])
@pytest.mark.parametrize("split", ["trails", "trails-lessons"])
def test_clutter_hides_the_way_and_does_not_change_it(start, split):
    """The table says what the scene draws, the solver follows it (and finds one cell for every name), and there is
    something of everything."""
    plan = Plan(clutter=True, start=start)
    seen = Counter()
    for item in items(Recipe(split, seed=4, count=40, size=(192, 192), kinds=KINDS * (split == "trails"), trail=plan)):
        board = described(item)
        agrees(item, board, *plan.arrows)
        scene = item.views[0].scene
        for thing, entry in zip(scene.objects, item.meta["objects"], strict=True):
            noun, _, direction = entry["shape"].partition(" ")
            assert thing.color == entry["color"] and thing.shape.endswith(noun)
            assert not direction or ("up", "right", "down", "left")[thing.rotation // 90] == direction
            x0, y0, x1, y1 = thing.box
            assert entry["box"][0] <= x0 and entry["box"][1] <= y0 and x1 <= entry["box"][2] and y1 <= entry["box"][3]
            seen[thing.shape] += 1
        seen[scene.background.kind] += 1
    styles, things = {"thick arrow", "arrow", "thin arrow"}, {"square", "star", "heart", "cross", "moon"}
    assert styles | things | {"flat", "gradient", "noise", "stripes", "tiles"} <= set(seen)
    starts = {"triangle", "pentagon", "chevron"}
    assert starts & set(seen) == (starts if start == "shape" else set())


@pytest.mark.slow
@pytest.mark.parametrize("clutter", [False, True])
def test_a_solver_agrees_on_many_trails_of_every_kind(clutter):
    for start in ("color", "shape", "place"):
        plan = Plan(clutter=clutter, start=start)
        for item in items(Recipe("trails", seed=8, count=3_500, size=(96, 96), kinds=KINDS, trail=plan)):
            agrees(item, described(item), *plan.arrows)


def test_kinds_are_equally_common_and_their_answers_spread():
    found = list(items(Recipe("trails", seed=6, count=600, kinds=KINDS)))
    kinds = Counter(item.kind for item in found)
    assert all(110 <= kinds[kind] <= 190 for kind in KINDS)
    answers = {kind: Counter(item.answer for item in found if item.kind == kind) for kind in KINDS}
    assert 50 <= answers["meet"]["yes"] / kinds["meet"] * 100 <= 65 or answers["meet"]["no"] * 100 / kinds["meet"] >= 35
    assert set(answers["turn"]) == {"left", "right", "no turn"} and set(answers["arrows"]) == set("1234567")
    assert {len(item.choices) for item in found if item.kind == "arrows"} == {4}


def test_free_answers_are_the_same_questions_without_options():
    for split, kinds in (("trails", KINDS), ("trails-lessons", ()), ("trails-pairs", ())):
        with_options = list(items(Recipe(split, seed=1, count=6, kinds=kinds)))
        free = list(items(Recipe(split, seed=1, count=6, kinds=kinds, trail=Plan(answers="free"))))
        assert free == [replace(item, choices=()) for item in with_options]
        assert all(item.sample().answer == item.answer for item in free)


def test_trails_in_a_training_split_come_only_when_asked_for(tmp_path):
    """In the layout of the split, with the order of the boxes kept; boards of a bucket of their own."""
    usual = list(items(Recipe("train-boxes", seed=2, count=30)))
    assert not any("trail" in item.meta for item in usual)
    mixed = Recipe("train-boxes", seed=2, count=40, kinds=("color", "trails"))
    found = list(items(mixed))
    trails = [item for item in found if "trail" in item.meta]
    assert 10 <= len(trails) <= 30 and {item.kind for item in found} == {"color", "end"}
    assert {bool(item.choices) for item in trails} == {True, False}
    for item in trails:
        agrees(item, described(item), 1, 7)
        assert item.id.startswith("world/train/") and item.views[0].size == (128, 128)
    made = list(samples(mixed))
    write(made, "visual-cot", tmp_path / "viscot_world.json")
    back = list(read(tmp_path / "viscot_world.json"))
    assert [sample.content() for sample in back] == [sample.content() for sample in made]
    plain = list(items(Recipe("train-plain", seed=2, count=20, kinds=("trails",))))
    assert all("trail" in item.meta and not item.boxes for item in plain)


def test_a_sequel_asks_about_its_second_board():
    """Both turns are right, with their own ordered evidence; half of the second boards are edits of the first."""
    edited = 0
    for item in items(Recipe("trails-sequels", seed=1, count=40)):
        sample = item.sample()
        (first, reply, last), boards = sample.turns, [look(view.pixels(), 6, 6) for view in item.views]
        assert (first.images, reply.images, last.images) == ((0,), (), (1,))
        text, *options, _ = first.text.split("\n")
        for index, board, question, said, boxes in (
            (0, boards[0], text, options["ABCD".index(reply.text[8])][4:], sample.earlier_boxes[0]),
            (1, boards[1], last.text, sample.answer_text, sample.boxes),
        ):
            answer, cells = solve(board, question)
            assert said == answer and {box.image for box in boxes} == {index}
            corners = [(c / 6, r / 6, (c + 1) / 6, (r + 1) / 6) for r, c in cells]
            assert np.allclose([box.xyxy for box in boxes], corners)
        same = sum(a == b for one, two in zip(*boards, strict=True) for a, b in zip(one, two, strict=True))
        shown = [f"({letter}) {choice}" for letter, choice in zip("ABCD", item.choices, strict=True)]
        assert (same >= 34) == (text == last.text and options == shown)
        edited += same >= 34
    assert 10 <= edited <= 30


def test_a_switch_asks_two_questions_of_one_board_in_two_wordings_each():
    """Right by the independent solver, on one picture; other trails, other answers, the same options."""
    found = list(items(Recipe("trails", seed=3, count=30, kinds=("switch",))))
    assert len(found) == 4 * 30
    for start in range(0, len(found), 4):
        four = found[start : start + 4]
        samples_of = [item.sample() for item in four]
        assert len({item.views[0].name for item in four}) == 1 and len({item.choices for item in four}) == 1
        board = look(four[0].views[0].pixels(), 6, 6)
        for sample in samples_of:
            answer, cells = solve(board, sample.question)
            assert sample.answer_text == answer
            assert [tuple(cell) for cell in sample.meta["trail"]["cells"]] == [tuple(cell) for cell in cells]
        one, again, two, twice = samples_of
        assert one.boxes == again.boxes and two.boxes == twice.boxes and one.answer == again.answer != two.answer
        assert len({sample.question for sample in samples_of}) == 4 and not set(one.boxes) & set(two.boxes)
        assert [(item.tags["switch"], item.tags["wording"]) for item in four] == [
            ("1", "1"),
            ("1", "2"),
            ("2", "1"),
            ("2", "2"),
        ]
    mixed = list(items(Recipe("trails", seed=3, count=20, kinds=("end", "switch"))))
    assert 20 < len(mixed) < 80 and len({item.id for item in mixed}) == len(mixed)
    with pytest.raises(UserError, match="no kind of question 'switch'"):
        Recipe("trails-train", kinds=("switch",))


@pytest.mark.parametrize(("layout", "file"), [("visual-cot", "viscot.json"), ("lvr", "lvr.json"), ("jsonl", "x.jsonl")])
def test_the_order_of_boxes_survives_where_a_layout_has_boxes(tmp_path, layout, file):
    made = list(samples(Recipe("trails", seed=0, count=12)))
    write(made, layout, tmp_path / file)
    back = list(read(tmp_path / file, layout))
    assert [sample.content() for sample in back] == [sample.content() for sample in made]
    assert any(sorted(box.xyxy for box in sample.boxes) != [box.xyxy for box in sample.boxes] for sample in back)


def test_a_board_can_be_made_and_shown_from_the_command_line(tmp_path):
    settings = MakeSettings(
        tmp_path,
        split=("trails",),
        count=4,
        size="64x48",
        grid="3x4",
        arrows="2-3",
        clutter=True,
        start="place",
        kinds=("arrows",),
        answers="free",
        workers=1,
    )
    (made,) = make(settings)
    rows = list(read(made.files[0]))
    assert [sample.answer for sample in rows if sample.answer not in ("2", "3")] == [] and len(rows) == 4
    assert all(sample.meta["trail"]["grid"] == [3, 4] and not sample.choices for sample in rows)
    assert make(settings)[0].rows == 4  # the same recipe again
    with pytest.raises(UserError, match="made another way"):
        make(replace(settings, arrows="2-4"))
    assert show(ShowSettings(tmp_path / "sheet.png", split="trails-pairs", limit=3, clutter=True)) == 3


@pytest.mark.parametrize(
    ("make_it", "named"),
    [
        (lambda: Plan(start="name"), "start 'name': choose color, shape or place"),
        (lambda: Plan(answers="long"), "answers 'long': choose options or free"),
        (lambda: Plan((4, 4), (1, 12)), "4x4 cells has room for 9 at most"),
        (lambda: Plan((16, 16), (1, 60)), "room for 24 at most"),
        (lambda: parse_grid("6 by 6"), "grid '6 by 6': write ROWSxCOLUMNS"),
        (lambda: parse_arrows("many"), "arrows 'many': write FEWEST-MOST"),
        (lambda: Recipe("trails-pairs", kinds=("turn",)), "no kind of question 'turn' in split trails-pairs"),
        (lambda: Recipe("validation", kinds=("trails",)), "no kind of question 'trails'"),
        (lambda: Recipe("train-boxes", trail=Plan(clutter=True)), "split train-boxes has no trails; .* kind trails"),
        (lambda: Recipe("train-boxes", kinds=("trails",), withheld="only"), "withheld word"),
        (lambda: Recipe("trails", withheld="only"), "withheld word"),
        (lambda: Recipe("train-boxes", size=(40, 40), kinds=("trails",)), "grid 6x6 does not fit a canvas of 40x40"),
        (lambda: list(items(Recipe("trails-pairs", count=1, trail=FULL))), "allow no turn_beside"),
    ],
)
def test_what_cannot_be_is_named(make_it, named, monkeypatch):
    monkeypatch.setattr("realvr.world.trails.pairs.TRIES", 40)
    with pytest.raises(UserError, match=named):
        make_it()


FULL = Plan((3, 3), (5, 5))
"""Every arrow of such a board is on the trail."""


def test_grids_and_lengths_are_read_as_written():
    assert parse_grid("4x6") == (4, 6) and parse_grid("5") == (5, 5) and parse_grid(" 3X4 ") == (3, 4)
    assert parse_arrows("1-12") == (1, 12) and parse_arrows("5") == (5, 5)


def test_a_trail_of_a_given_length_can_end_anywhere():
    """Ends of short trails are not all beside the border, nor all in the middle."""
    ends = [item.meta["trail"]["cells"][-1] for item in items(Recipe("trails", count=200, trail=Plan(arrows=(2, 2))))]
    assert len(np.unique(ends, axis=0)) > 25
