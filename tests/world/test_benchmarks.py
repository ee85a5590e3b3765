"""The mini-benchmarks: right answers, and the properties that make them what they mirror."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from puzzle_solver import solve_jigsaw, solve_pattern
from realvr.errors import UserError
from realvr.world.benchmarks import (
    ABSENT,
    BLINK_TASKS,
    Resize,
    blink_item,
    hr_items,
    mme_item,
    mmvp_pair,
    vstar_item,
    world_style,
)
from realvr.world.draw import render
from realvr.world.sampling import clutter, huge
from realvr.world.scene import BUCKETS
from realvr.world.words import COLORS, SHAPES, SIZES
from world_solver import Unsolvable, solve

ATTRIBUTES = {"color": set(COLORS), "shape": set(SHAPES), "size": set(SIZES)}
ANY = range(BUCKETS)
STYLES = [world_style(128, 128), world_style(48, 48)]


@pytest.mark.parametrize("style", STYLES, ids=["full", "easy"])
def test_mmvp_pairs_differ_in_one_detail_and_in_the_answer(style):
    first = Counter()
    for k in range(64):
        one, two = mmvp_pair(np.random.default_rng([1, k]), k, style, ANY)
        assert one.text == two.text and one.choices == two.choices and len(one.choices) == 2
        assert {one.answer, two.answer} == set(one.choices) and one.pair == two.pair
        assert (one.id, two.id) == (str(2 * k + 1), str(2 * k + 2))
        for item in (one, two):
            assert solve(item.views[0].scene, item.text) == item.answer
        a, b = (item.views[0].scene for item in (one, two))
        assert len(set(a.objects) ^ set(b.objects)) <= 4
        first[one.letter] += 1
    assert 16 < first["A"] < 48


@pytest.mark.parametrize("style", STYLES, ids=["full", "easy"])
@pytest.mark.parametrize("task", BLINK_TASKS)
def test_blink_answers_are_right_and_balanced(style, task):
    letters = Counter()
    for k in range(80):
        item = blink_item(np.random.default_rng([2, k]), task, k, style, ANY)
        letters[item.letter] += 1
        assert item.task == task and item.id == f"val_{task}_{k + 1}" and item.boxes
        assert len(item.views) == (3 if task == "Jigsaw" else 1)
        assert len(item.choices) == {"Jigsaw": 2, "Spatial_Relation": 2, "Relative_Reflectance": 3}.get(task, 4)
        scene = item.views[0].scene
        if task == "Jigsaw":
            assert solve_jigsaw(scene, [view.scene for view in item.views[1:]]) == item.choices.index(item.answer)
        elif task == "IQ_Test":
            assert solve_pattern(scene) == item.answer
        else:
            assert solve(scene, item.text) == item.answer
    assert max(letters.values()) < 2.5 * min(letters.values()) and len(letters) == len(item.choices)


def test_jigsaw_candidates_differ_only_in_the_gap_and_the_right_one_fits_pixel_by_pixel():
    for k in range(20):
        item = blink_item(np.random.default_rng([3, k]), "Jigsaw", k, STYLES[0], ANY)
        holed, second, third = (view.pixels() for view in item.views)
        height, width = holed.shape[:2]
        assert not holed[height // 2 :, width // 2 :].any() and not np.array_equal(second, third)
        right = second if item.letter == "A" else third
        whole = holed.copy()
        whole[height // 2 :, width // 2 :] = right
        assert np.array_equal(whole, render(replace(item.views[0].scene, marks=())))


def test_marked_surfaces_have_the_brightness_that_the_answer_says():
    for k in range(40):
        item = blink_item(np.random.default_rng([4, k]), "Relative_Reflectance", k, STYLES[0], ANY)
        picture = item.views[0].pixels().astype(int).mean(-1)
        # Beside the letter, still on the surface.
        levels = [picture[(y0 + y1) // 2, x0 + 8] for _, (x0, y0, x1, y1) in item.boxes]
        difference = levels[0] - levels[1]
        expected = {"A is darker": difference < -15, "B is darker": difference > 15, "about the same": difference == 0}
        assert expected[item.answer]


HR = [
    (huge(3840, 2160), Resize(), (3840, 2160)),
    (huge(7680, 4320), Resize(), (7680, 4320)),
    (huge(192, 192), Resize(48 * 48, 8), (192, 192)),
]


@pytest.mark.parametrize(("style", "resize", "size"), HR, ids=["4k", "8k", "small"])
def test_hr_items_come_in_four_cycles_and_two_strata(style, resize, size):
    seen = Counter()
    for k in range(16):
        items = hr_items(np.random.default_rng([5, k]), k, style, ANY, resize)
        assert sorted(item.letter for item in items) == ["A", "B", "C", "D"]
        assert [item.cycle for item in items] == ["0", "1", "2", "3"]
        assert all(item.views is items[0].views for item in items) and items[0].views[0].name.endswith(".jpg")
        item = items[0]
        scene = item.views[0].scene
        assert scene.size == size and solve(scene, item.text) == item.answer
        assert (len(item.boxes) > 1) or item.category == "single" or item.kind == "count"
        scale = min(1.0, (resize.max_pixels / (size[0] * size[1])) ** 0.5)
        assert all(
            x0 >= -1 and y0 >= -1 and x1 <= size[0] + 1 and y1 <= size[1] + 1 for _, (x0, y0, x1, y1) in item.boxes
        )
        smallest = min(min(x1 - x0, y1 - y0) for _, (x0, y0, x1, y1) in item.boxes) * scale
        assert (smallest >= resize.patch) == (item.tags["stratum"] == "visible")
        assert min(item.meta["evidence_px"]) == pytest.approx(smallest, abs=0.01)
        seen[item.category, item.tags["stratum"]] += 1
    assert set(seen.values()) == {4} and len(seen) == 4


def test_hr_says_when_nothing_fits():
    with pytest.raises(UserError, match="3840x2160"):
        hr_items(np.random.default_rng(0), 0, huge(3840, 2160), ANY, Resize(48 * 48, 8))


@pytest.mark.parametrize(("style", "resize"), [(huge(2240, 1584), Resize()), (huge(192, 192), Resize(48 * 48, 8))])
def test_vstar_asks_about_small_things_in_two_categories(style, resize):
    seen, letters = Counter(), Counter()
    for k in range(50):
        item = vstar_item(np.random.default_rng([8, k]), k, style, ANY, resize)
        scene = item.views[0].scene
        assert solve(scene, item.text) == item.answer and item.views[0].name == f"{item.category}/{k}.jpg"
        assert len(item.choices) == (4 if item.category == "direct_attributes" else 2)
        scale = min(1.0, (resize.max_pixels / (scene.size[0] * scene.size[1])) ** 0.5)
        sides = [min(x1 - x0, y1 - y0) * scale for _, (x0, y0, x1, y1) in item.boxes]
        assert resize.patch <= min(sides) < 0.25 * min(scene.size)
        seen[item.category] += 1
        letters[item.letter] += 1
    assert seen == {"direct_attributes": 30, "relative_position": 20} and len(letters) == 4


@pytest.mark.parametrize("style", [clutter(), clutter(96, 96)], ids=["full", "easy"])
def test_mme_has_five_options_and_e_means_absent(style):
    letters = Counter()
    for k in range(150):
        item = mme_item(np.random.default_rng([6, k]), k, style, ANY)
        assert len(set(item.choices)) == 5 and item.choices[4] == ABSENT
        scene = item.views[0].scene
        if item.letter == "E":
            with pytest.raises(Unsolvable, match="0 objects"):
                solve(scene, item.text)
        else:
            assert solve(scene, item.text) == item.answer
        letters[item.letter] += 1
    assert set(letters) == set("ABCDE") and 15 <= letters["E"] <= 50


@pytest.mark.slow
def test_mme_absent_questions_are_worded_like_the_others():
    """The same attributes are named, so the words alone do not say that the answer is E."""
    forms = {True: Counter(), False: Counter()}
    for k in range(300):
        item = mme_item(np.random.default_rng([7, k]), k, clutter(), ANY)
        if item.kind != "count":
            words = set(item.text.rstrip("?").replace(".", "").split())
            named = tuple(sorted(kind for kind, all_of in ATTRIBUTES.items() if words & all_of))
            forms[item.letter == "E"][item.kind, named] += 1
    assert set(forms[True]) == set(forms[False])


def test_mme_answers_are_balanced_within_each_kind():
    found = [mme_item(np.random.default_rng([9, k]), k, clutter(), range(BUCKETS)) for k in range(300)]
    patterns = Counter(item.answer for item in found if item.kind == "texture" and item.answer != ABSENT)
    assert len(patterns) == 4 and max(patterns.values()) < 0.45 * patterns.total()
    assert 0.12 < sum(item.answer == ABSENT for item in found) / len(found) < 0.28
