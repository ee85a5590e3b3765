"""Pixels: determinism, masks, boxes, and that drawing one object touches nothing else."""

import hashlib

import numpy as np
import pytest

from realvr.world.draw import mask, render, visible_mask
from realvr.world.items import View
from realvr.world.queries import overlap
from realvr.world.sampling import clutter, easy, full, huge, sample_scene
from realvr.world.scene import Background, Object, Scene
from realvr.world.words import COLORS, SHAPES

STYLES = [easy(48), full(128), clutter(320, 240), huge(192, 192)]


def scenes(style, count, seed=0):
    return [sample_scene(np.random.default_rng([seed, k]), style) for k in range(count)]


def test_same_scene_same_bytes():
    for scene in scenes(full(128), 5):
        assert render(scene).tobytes() == render(scene).tobytes()
        for name in ("a.png", "a.jpg"):
            digest = [hashlib.sha256(View(scene, name).encode()).hexdigest() for _ in range(2)]
            assert digest[0] == digest[1]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_taking_an_object_away_changes_only_its_own_pixels(style):
    for scene in scenes(style, 8, seed=1):
        picture = render(scene)
        assert picture.shape == (style.height, style.width, 3) and picture.dtype == np.uint8
        for index in range(len(scene.objects)):
            changed = (render(scene.without(index)) != picture).any(-1)
            touched = mask(scene, index, touched=True).full(scene)
            assert changed.any() and not (changed & ~touched).any()


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_boxes_hold_every_pixel_of_their_object_and_little_else(style):
    for scene in scenes(style, 8, seed=2):
        for index, item in enumerate(scene.objects):
            x0, y0, x1, y1 = item.box
            tight = mask(scene, index, touched=True).box()
            assert tight is not None
            assert x0 <= tight[0] and y0 <= tight[1] and tight[2] <= x1 and tight[3] <= y1
            solid = mask(scene, index).box()
            assert solid is not None
            assert max(abs(a - b) for a, b in zip(item.box, solid, strict=True)) <= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_shows_its_color_where_its_mask_says(shape):
    for color in COLORS:
        scene = Scene(64, 64, (Object(shape, color, 32, 32, 20, "large"),), Background("flat", (200, 200, 200)))
        inside = render(scene)[visible_mask(scene, 0).full(scene)]
        exact = (inside == np.asarray(COLORS[color], np.uint8)).all(-1).mean()
        assert exact > 0.5, f"{shape} {color}: {exact}"


def test_later_objects_cover_earlier_ones():
    below, above = Object("square", "red", 30, 32, 14), Object("circle", "blue", 40, 32, 14)
    scene = Scene(64, 64, (below, above))
    picture = render(scene)
    assert tuple(picture[32, 40]) == COLORS["blue"] and tuple(picture[32, 20]) == COLORS["red"]
    hidden = mask(scene, 0).pixels.sum() - visible_mask(scene, 0).pixels.sum()
    assert hidden > 50 and visible_mask(scene, 1).pixels.sum() == mask(scene, 1).pixels.sum()


def test_sampled_overlaps_hide_some_but_not_most_of_an_object():
    seen = 0
    for scene in scenes(full(128), 150, seed=3):
        for i, a in enumerate(scene.objects):
            for j in range(i + 1, len(scene.objects)):
                if overlap(a, scene.objects[j]):
                    share = visible_mask(scene, i).pixels.sum() / mask(scene, i).pixels.sum()
                    assert 0.6 < share < 0.9
                    seen += 1
    assert seen > 10


def test_true_8k_is_drawn_at_full_size():
    scene = sample_scene(np.random.default_rng(0), huge(7680, 4320))
    assert render(scene).shape == (4320, 7680, 3)
