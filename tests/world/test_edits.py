"""Counterfactual pairs: shares of the paper, right answers on both sides, and edits that change only what they name."""

import numpy as np
import pytest

from realvr.world.draw import mask, render
from realvr.world.edits import CHANGED_SHARE, EDITS, PAIRS_PER_EDIT, is_changed, sample_pair
from realvr.world.sampling import easy, full
from world_solver import solve

PAPER = {"color_change": 442, "object_removal": 417, "shape_swap": 433, "spatial_swap": 435}


def pairs(style, edit, count, **how):
    for k in range(count):
        yield sample_pair(np.random.default_rng([3, k]), style, edit, changed=is_changed(edit, k), **how)


def test_shares_are_those_of_the_paper():
    assert set(EDITS) == set(PAPER) and PAIRS_PER_EDIT == 512
    for edit, changed in PAPER.items():
        assert sum(is_changed(edit, k) for k in range(512)) == changed
        assert 0.81 <= CHANGED_SHARE[edit] <= 0.87
        # Any prefix is close too, so that small demonstrations are not all controls.
        assert abs(sum(is_changed(edit, k) for k in range(64)) / 64 - CHANGED_SHARE[edit]) < 0.02


@pytest.mark.parametrize("style", [easy(48), full(128)], ids=["easy", "full"])
@pytest.mark.parametrize("edit", EDITS)
def test_both_answers_are_right_and_the_words_stay(style, edit):
    for k, pair in enumerate(pairs(style, edit, 60)):
        assert pair.changed == is_changed(edit, k)
        assert pair.before.text == pair.after.text and pair.before.choices == pair.after.choices
        assert len(set(pair.before.choices)) == len(pair.before.choices) >= 2
        assert solve(pair.original, pair.before.text) == pair.before.answer in pair.before.choices
        assert solve(pair.edited, pair.after.text) == pair.after.answer in pair.after.choices


@pytest.mark.parametrize("style", [easy(48), full(128)], ids=["easy", "full"])
@pytest.mark.parametrize("edit", EDITS)
def test_pixels_outside_the_edited_objects_are_identical(style, edit):
    for pair in pairs(style, edit, 30):
        allowed = np.zeros((style.height, style.width), bool)
        for index in pair.touched:
            allowed |= mask(pair.original, index, touched=True).full(pair.original)
            if edit != "object_removal":
                allowed |= mask(pair.edited, index, touched=True).full(pair.edited)
        changed = (render(pair.original) != render(pair.edited)).any(-1)
        assert changed.any() and not (changed & ~allowed).any()


@pytest.mark.parametrize("edit", EDITS)
def test_only_the_named_attribute_changes(edit):
    allowed = {"color_change": {"color"}, "shape_swap": {"shape", "rotation"}, "spatial_swap": {"x", "y"}}
    for pair in pairs(full(128), edit, 30):
        assert pair.original.background == pair.edited.background
        if edit == "object_removal":
            (gone,) = pair.touched
            assert pair.edited == pair.original.without(gone)
            continue
        for index, (old, new) in enumerate(zip(pair.original.objects, pair.edited.objects, strict=True)):
            different = {name for name in old.__dataclass_fields__ if getattr(old, name) != getattr(new, name)}
            assert different <= (allowed[edit] if index in pair.touched else set())


def test_controls_do_not_touch_what_supports_the_answer():
    for edit in EDITS:
        for pair in pairs(full(128), edit, 60):
            if not pair.changed:
                assert not set(pair.touched) & set(pair.before.evidence)


def test_edited_scenes_stay_in_the_buckets_of_their_split():
    for pair in pairs(easy(48), "color_change", 30, buckets=range(28, 32)):
        assert pair.original.bucket() >= 28 and pair.edited.bucket() >= 28
