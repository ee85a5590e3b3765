"""Scenes as data: sampling, hashing, and the styles they come in."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.errors import UserError
from realvr.world.sampling import clutter, easy, full, huge, sample_scene, style_for
from realvr.world.scene import BUCKETS, scene_from_dict

STYLES = [easy(48), easy(64), full(128), clutter(), clutter(96, 96), huge(3840, 2160), huge(192, 192)]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.name}{style.width}")
def test_same_seed_same_scene_and_json_round_trip(style):
    one = sample_scene(np.random.default_rng([1, 2, 3]), style)
    two = sample_scene(np.random.default_rng([1, 2, 3]), style)
    assert one == two
    assert scene_from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert one.key() == two.key()
    assert one != sample_scene(np.random.default_rng([1, 2, 4]), style)


@given(seed=st.integers(0, 2**31), which=st.integers(0, len(STYLES) - 1))
@settings(max_examples=150, deadline=None)
def test_objects_lie_on_the_canvas_and_apart(seed, which):
    style = STYLES[which]
    scene = sample_scene(np.random.default_rng(seed), style)
    low, high = style.objects
    assert low <= len(scene.objects) <= high
    boxes = [item.box for item in scene.objects]
    for x0, y0, x1, y1 in boxes:
        assert x0 >= -1 and y0 >= -1 and x1 <= scene.width + 1 and y1 <= scene.height + 1
    if style.overlap == 0:
        for k, a in enumerate(boxes):
            for b in boxes[:k]:
                # Boxes have a pixel of slack on each side, so neighbours may share two.
                assert min(a[2], b[2]) - max(a[0], b[0]) <= 2 or min(a[3], b[3]) - max(a[1], b[1]) <= 2


@given(seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_easy_scenes_hold_three_to_five_distinct_objects(seed):
    scene = sample_scene(np.random.default_rng(seed), easy(48))
    assert 3 <= len(scene.objects) <= 5
    assert (
        len({item.color for item in scene.objects}) == len({item.shape for item in scene.objects}) == len(scene.objects)
    )
    cells = [scene.cell(item) for item in scene.objects]
    assert len(set(cells)) == len(cells)
    for (column, row), item in zip(cells, scene.objects, strict=True):
        x0, y0, x1, y1 = item.box
        # The evidence of an easy question covers the four 8-pixel patches of one cell and no other.
        assert column * 16 <= x0 < column * 16 + 8 < x1 <= column * 16 + 16
        assert row * 16 <= y0 < row * 16 + 8 < y1 <= row * 16 + 16


def test_layout_key_ignores_jitter_and_background_but_not_looks():
    scene = sample_scene(np.random.default_rng(5), full(128))
    item = scene.objects[0]
    dx = 1 if scene.cell(item) == scene.cell(scene.edit(0, x=item.x + 1).objects[0]) else -1
    assert scene.edit(0, x=item.x + dx).layout_key() == scene.layout_key()
    assert scene.edit(0, x=item.x + dx).key() != scene.key()
    assert scene.edit(0, color="white" if item.color != "white" else "red").layout_key() != scene.layout_key()
    assert 0 <= scene.bucket() < BUCKETS


def test_buckets_are_respected():
    for seed in range(20):
        assert sample_scene(np.random.default_rng(seed), easy(48), buckets=(3, 4)).bucket() in (3, 4)


@pytest.mark.parametrize("size", [(10, 10), (9000, 9000), (128, 8)])
def test_impossible_canvas_is_named(size):
    with pytest.raises(UserError, match=f"{size[0]}x{size[1]}"):
        style_for(*size)


def test_style_follows_the_canvas():
    assert [style_for(48).name, style_for(128).name, style_for(3840, 2160).name] == ["easy", "full", "huge"]
