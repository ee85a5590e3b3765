"""Splits: what they hold, that they share nothing, and that a seed fixes every byte."""

import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import realvr
from realvr.errors import UserError
from realvr.world import benchmarks
from realvr.world.recipes import TRAILS_WITHIN
from realvr.world.scene import BUCKETS
from realvr.world.splits import SPLITS, Recipe, build, drawn, items, leaks, samples
from realvr.world.trails import board
from world_solver import solve

SMALL = {"hrbench-4k": 4, "hrbench-8k": 4, "counterfactual": 12, "trails-pairs": 12, "mmvp": 20, "practice": 160}


def test_buckets_are_disjoint_and_all_used():
    """Of scenes and of boards of arrows: a board is no scene of the other splits."""
    trails = [split.buckets for name, split in SPLITS.items() if Recipe(name).of_trails]
    scenes = [split.buckets for name, split in SPLITS.items() if not Recipe(name).of_trails]
    for family, number in ((scenes, BUCKETS), ([*trails, *TRAILS_WITHIN.values()], board.BUCKETS)):
        assert sorted(bucket for buckets in family for bucket in buckets) == list(range(number))
    assert len({split.number for split in SPLITS.values()}) == len(SPLITS)


@pytest.fixture(scope="module")
def everything():
    return {name: list(items(Recipe(name, seed=3, count=SMALL.get(name, 60)))) for name in SPLITS}


def test_no_scene_layout_or_question_is_in_two_splits(everything):
    assert leaks(everything) == []


def test_no_leak_either_where_all_splits_share_one_canvas():
    """Same seed, same size, same vocabulary: only the buckets keep them apart."""
    names = (
        "curriculum",
        "curriculum-test",
        "dialogues",
        "train-boxes",
        "train-plain",
        "practice",
        "validation",
        "mmvp",
        "counterfactual",
    )
    assert leaks({name: items(Recipe(name, seed=0, count=40, size=(48, 48))) for name in names}) == []


def test_the_leak_check_finds_leaks(everything):
    assert leaks({"a": everything["validation"][:5], "b": everything["validation"][4:9]})
    assert any("question" in line for line in leaks({"a": everything["mmvp"][:1], "b": everything["mmvp"][:1]}))


def test_ids_are_unique_and_boxes_where_promised(everything):
    for name, found in everything.items():
        assert len({item.id for item in found}) == len(found), name
        assert all(item.boxes for item in found) or name in ("train-plain", "mme-realworld", "sequels", "practice")
    assert not any(item.boxes for item in everything["train-plain"])


@pytest.mark.parametrize("name", [name for name in SPLITS if name != "hrbench-8k"])
def test_a_unit_is_the_same_alone_and_in_the_whole_to_the_byte(name):
    recipe = Recipe(name, seed=5, count=3)
    units = recipe.units()
    whole = list(samples(recipe))
    last = drawn(recipe, units[-1])
    assert [sample.content() for sample in whole[-len(last) :]] == [sample.content() for sample in last]
    other = drawn(Recipe(name, seed=6, count=3), units[-1])
    assert [sample.content() for sample in other] != [sample.content() for sample in last]


def test_workers_change_nothing():
    recipe = Recipe("train-boxes", seed=1, count=70)
    one, two = list(samples(recipe)), list(samples(recipe, workers=2))
    assert [pickle.dumps(sample) for sample in one] == [pickle.dumps(sample) for sample in two]


def test_a_script_that_workers_cannot_import_fails_with_a_hint(tmp_path):
    code = "from realvr.world.splits import Recipe, samples\nlist(samples(Recipe('mmvp', count=2), workers=2))"
    source = str(Path(realvr.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        env=os.environ | {"PYTHONPATH": source},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode and "__main__" in done.stderr


def test_a_longer_split_starts_with_the_shorter_one():
    for name in ("blink", "counterfactual", "mmvp", "curriculum", "trails", "trails-pairs"):
        short = {item.id: item for item in items(Recipe(name, count=10))}
        longer = {item.id: item for item in items(Recipe(name, count=15))}
        assert set(short) <= set(longer) and all(longer[key] == item for key, item in short.items())


def test_usual_sizes_are_those_of_the_real_benchmarks():
    assert Counter(part for part, _ in Recipe("blink").units()) == {
        "Counting": 120,
        "IQ_Test": 150,
        "Jigsaw": 150,
        "Relative_Reflectance": 134,
        "Spatial_Relation": 143,
    }
    assert len(Recipe("mmvp").units()) == 150 and len(Recipe("hrbench-4k").units()) == 200
    assert Counter(part for part, _ in Recipe("counterfactual").units()) == dict.fromkeys(
        ("color_change", "object_removal", "shape_swap", "spatial_swap"), 512
    )


@pytest.mark.parametrize("name", ["counterfactual", "trails-pairs"])
def test_counterfactual_samples_share_question_options_and_pair(everything, name):
    found = everything[name]
    for one, two in zip(found[::2], found[1::2], strict=True):
        assert one.pair == two.pair and (one.tags["view"], two.tags["view"]) == ("original", "edited")
        assert (one.text, one.choices) == (two.text, two.choices)
        assert (one.answer != two.answer) == (one.tags["changed"] == "yes")
        assert one.meta["edited_boxes_px"] and all(view.name.endswith(".png") for view in (*one.views, *two.views))


def test_curriculum_withholds_words_and_its_test_split_does_not(everything):
    assert {item.tags["withheld"] for item in everything["curriculum"]} == {"no"}
    assert {item.tags["withheld"] for item in everything["curriculum-test"]} == {"yes", "no"}
    only = items(Recipe("curriculum-test", count=20, withheld="only"))
    assert {item.tags["withheld"] for item in only} == {"yes"}


def test_dialogues_have_two_turns_and_one_picture(everything):
    for item in everything["dialogues"][:10]:
        sample = item.sample()
        assert [turn.role for turn in sample.turns] == ["user", "assistant", "user"]
        assert [turn.images for turn in sample.turns] == [(0,), (), ()]


def test_cycles_share_one_drawing():
    recipe = Recipe("hrbench-4k", count=1)
    found = drawn(recipe, recipe.units()[0])
    assert len(found) == 4 and all(sample.images[0] is found[0].images[0] for sample in found)
    assert found[0].images[0].size == (3840, 2160)


def test_captions_and_tables_come_with_training_samples(everything):
    for name in ("curriculum", "train-boxes", "train-plain", "dialogues"):
        meta = everything[name][0].meta
        assert meta["caption"].endswith(".") and len(meta["objects"]) == len(everything[name][0].views[0].scene.objects)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"split": "imagenet"}, "imagenet"),
        ({"split": "blink", "count": 0}, "count is 0"),
        ({"split": "blink", "seed": -1}, "seed is -1"),
        ({"split": "blink", "size": (5, 5)}, "5x5"),
        ({"split": "curriculum", "kinds": ("colour",)}, "colour"),
        ({"split": "practice", "withheld": "only"}, "puzzles"),
        ({"split": "practice", "size": (500, 48)}, "canvas 500x48: sides up to 499"),
        ({"split": "practice", "resize": benchmarks.Resize(48 * 48, 8)}, "hrbench only"),
    ],
)
def test_bad_recipes_are_named(fields, named):
    with pytest.raises(UserError, match=named):
        Recipe(**fields)


def test_a_kind_that_a_style_cannot_ask_is_an_error_for_the_user():
    with pytest.raises(UserError, match="texture"):
        build(Recipe("curriculum", kinds=("texture",)), ("", 0))


def test_what_a_split_would_ignore_is_refused():
    for split, fields in (("mmvp", {"kinds": ("color",)}), ("blink", {"withheld": "only"})):
        with pytest.raises(UserError, match="can be chosen for"):
            Recipe(split, **fields)


def test_a_sequel_asks_about_its_second_picture():
    """The first exchange is complete and right, the last question comes with the last picture, and evidence lies
    there."""
    found = list(items(Recipe("sequels", seed=2, count=80)))
    assert {len(item.views) for item in found} == {2}
    edited = 0
    for item in found:
        sample = item.sample()
        first, reply, last = sample.turns
        assert (first.images, reply.images, last.images) == ((0,), (), (1,))
        assert first.text.endswith("</answer>.") and reply.text[8] in "ABCD" and "(A)" in first.text
        assert all(box.image == 1 for box in sample.boxes)
        (before,) = sample.earlier_boxes
        if first.text.split("\n")[0] != last.text:  # a question of its own about the first picture, with its evidence
            assert before
        assert all(box.image == 0 for box in before)
        assert item.tags["withheld"] == "no"
        assert first.text.startswith(last.text) == (first.text.split("\n")[0] == last.text)
        edited += first.text.split("\n")[0] == last.text
        for text, view, answer in (
            (first.text.split("\n")[0], item.views[0], first.text.split(f"({reply.text[8]}) ")[1].split("\n")[0]),
            (last.text, item.views[1], item.answer),
        ):
            assert solve(view.scene, text) == answer
    assert 20 <= edited <= 60


def test_practice_asks_as_the_benchmarks_do(everything):
    """The same sizes of pictures, numbers of options and kinds; no withheld words; captions where there is a scene."""
    found = everything["practice"]
    assert [item.tags["manner"] for item in found[:8]] == list(benchmarks.PRACTICE)
    assert not any(item.tags.get("withheld") == "yes" for item in found)
    assert all(("caption" in item.meta) == ("withheld" in item.tags) for item in found)
    small = {
        "mmvp": Recipe("mmvp", size=(48, 48), count=40),
        "hrbench": Recipe("hrbench-4k", size=(192, 192), count=10, resize=benchmarks.Resize(48 * 48, 8)),
        "mme-realworld": Recipe("mme-realworld", size=(128, 128), count=40),
    }
    real = {name: list(items(recipe)) for name, recipe in small.items()}
    real |= {
        task: [i for i in items(Recipe("blink", size=(48, 48), count=60)) if i.task == task]
        for task in benchmarks.BLINK_TASKS
    }
    for manner, theirs in real.items():
        ours = [item for item in found if item.tags["manner"] == manner]
        looks = [{(*(v.size for v in i.views), len(i.choices)) for i in group} for group in (ours, theirs)]
        assert looks[0] == looks[1], manner
        assert {item.kind for item in ours} <= {item.kind for item in theirs}, manner
