"""The examples of the splits that `realvr.world.recipes` names.

An example is a pure function of (seed, split, part, number), so any of them can be made alone, in any order and in any
process, with the same bytes. Splits own disjoint buckets of layouts (`Scene.bucket`, blind to jitter and background),
so no scene, and not even a near-duplicate, is in two of them, whatever the seeds and sizes.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import numpy as np

from realvr.data.sample import ImageRef, Sample
from realvr.data.wording import asked, formatted
from realvr.errors import UserError
from realvr.world import benchmarks, describe
from realvr.world.edits import EDITS, is_changed, kinds_for, sample_pair
from realvr.world.items import Item, View, single
from realvr.world.questions import EASY_KINDS, FULL_KINDS, LETTERS, MAX_TRIES, sample_question
from realvr.world.recipes import SPLITS as SPLITS
from realvr.world.recipes import TRAILS_WITHIN
from realvr.world.recipes import Recipe as Recipe
from realvr.world.recipes import Unit as Unit
from realvr.world.sampling import Style, pick, sample_scene
from realvr.world.trails import pairs
from realvr.world.trails import splits as trails

PARTS = ("", *EDITS, *benchmarks.BLINK_TASKS, *pairs.EDITS)


def build(recipe: Recipe, unit: Unit) -> list[Item]:
    """The items of one unit: one, the two of a pair, or the four cycles of a question."""
    part, number = unit
    rng = np.random.default_rng([recipe.seed, recipe.info.number, PARTS.index(part), number])
    style, buckets = recipe.style(), recipe.info.buckets
    if recipe.of_trails:
        return trails.build(rng, _order(recipe), part, number)
    if recipe.split == "mmvp":
        return list(benchmarks.mmvp_pair(rng, number, style, buckets))
    if recipe.split == "blink":
        return [benchmarks.blink_item(rng, part, number, style, buckets)]
    if recipe.split.startswith("hrbench"):
        return benchmarks.hr_items(rng, number, style, buckets, recipe.resize)
    if recipe.split == "vstar":
        return [benchmarks.vstar_item(rng, number, style, buckets, recipe.resize)]
    if recipe.split == "mme-realworld":
        return [benchmarks.mme_item(rng, number, style, buckets)]
    if recipe.split == "counterfactual":
        return _counterfactual(rng, recipe, unit, style)
    if recipe.split == "dialogues":
        return [_dialogue(rng, recipe, number, style)]
    if recipe.split == "sequels":
        return [_sequel(rng, recipe, number, style)]
    if recipe.split == "practice":
        return [_practice(rng, recipe, number)]
    return [_question(rng, recipe, number, style)]


def _order(recipe: Recipe) -> trails.Order:
    return trails.Order(recipe.split, recipe.trail, recipe.canvas, recipe.kinds, recipe.info.buckets)


def _practice(rng: np.random.Generator, recipe: Recipe, number: int) -> Item:
    """One question as a benchmark asks it, in turn, with the words that the recipe allows."""
    part = benchmarks.PRACTICE[number % len(benchmarks.PRACTICE)]
    for _ in range(MAX_TRIES):
        item = benchmarks.practice_item(
            rng, part, number // len(benchmarks.PRACTICE), recipe.canvas, recipe.info.buckets
        )
        if recipe.words == "any" or item.tags.get("withheld") != "yes":
            break
    else:
        raise UserError(f"practice in the manner of {part} has no question with withheld words: {recipe.words}")
    meta = dict(item.meta)
    if len(item.views) == 1 and "withheld" in item.tags:  # a scene as others, not a puzzle
        scene = item.views[0].scene
        meta |= {"caption": describe.caption(scene, rng), "objects": describe.table(scene)}
    suffix = item.views[0].name.rpartition(".")[2]
    views = tuple(replace(view, name=f"practice/{number}-{k + 1}.{suffix}") for k, view in enumerate(item.views))
    tags = {name: value for name, value in item.tags.items() if name in ("kind", "withheld")} | {"manner": part}
    return replace(
        item,
        id=f"practice-{number}",
        views=views,
        task="practice",
        category=part,
        pair=None,
        cycle=None,
        tags=tags,
        meta=meta,
    )


def _kinds(recipe: Recipe, style: Style) -> tuple[str, ...]:
    return recipe.kinds or (EASY_KINDS if style.vocabulary == "easy" else FULL_KINDS)


def _question(rng: np.random.Generator, recipe: Recipe, number: int, style: Style) -> Item:
    # Training formats hold short free answers as well as options; the curriculum is multiple choice throughout.
    free = recipe.split in ("train-boxes", "train-plain", "validation") and rng.random() < 0.5
    kinds = _kinds(recipe, style)
    if "trails" in kinds and pick(rng, kinds) == "trails":
        return _trail(rng, recipe, number, free)
    kinds = tuple(kind for kind in kinds if kind != "trails")
    scene, question = sample_question(
        rng, style, kinds, buckets=recipe.info.buckets, count=0 if free else 4, withheld=recipe.words
    )
    name, fields = _named(recipe, number, question.kind)
    meta = {"caption": describe.caption(scene, rng), "objects": describe.table(scene)}
    item = single(name, scene, question, f"{recipe.split}/{number}.png", meta=meta, **fields)
    return replace(item, boxes=()) if recipe.split == "train-plain" else item


def _named(recipe: Recipe, number: int, kind: str) -> tuple[str, dict[str, Any]]:
    """Name, task and category of a single question, as the layout of its split wants them."""
    name = f"world/train/{number}" if recipe.split == "train-boxes" else f"{recipe.split}-{number}"
    task = {"train-boxes": "world", "train-plain": ""}.get(recipe.split, recipe.split)
    return name, {"task": task, "category": kind if recipe.split == "train-plain" else ""}


def _trail(rng: np.random.Generator, recipe: Recipe, number: int, free: bool) -> Item:
    """A trail among the questions of a training split."""
    plan = replace(recipe.trail, answers="free") if free else recipe.trail
    order = trails.Order(recipe.split, plan, recipe.canvas, (), TRAILS_WITHIN[recipe.split])
    (item,) = trails.build(rng, order, "", number)
    name, fields = _named(recipe, number, item.kind)
    return replace(item, id=name, boxes=() if recipe.split == "train-plain" else item.boxes, **fields)


def _dialogue(rng: np.random.Generator, recipe: Recipe, number: int, style: Style) -> Item:
    for _ in range(MAX_TRIES):
        scene = sample_scene(rng, style, recipe.info.buckets)
        turns = describe.dialogue(scene, rng, _kinds(recipe, style), count=0, withheld=recipe.words)
        if turns is not None:
            break
    else:
        raise UserError(f"no {style.name} scene serves a dialogue of kinds {', '.join(_kinds(recipe, style))}")
    first, second = turns
    meta = {"caption": describe.caption(scene, rng), "objects": describe.table(scene)}
    item = single(f"dialogues-{number}", scene, second, f"dialogues/{number}.png", task="dialogues", meta=meta)
    return replace(item, earlier=((first.text, first.answer),))


def _sequel(rng: np.random.Generator, recipe: Recipe, number: int, style: Style) -> Item:
    """A question with its answer, then another picture: half the time an edit of the first with the same question (the
    answer changes in half of these), else an unrelated one with a question of its own."""
    if rng.random() < 0.5:
        edit = pick(rng, EDITS)
        kinds = tuple(kind for kind in kinds_for(edit, style) if not recipe.kinds or kind in recipe.kinds)
        pair = sample_pair(
            rng,
            style,
            edit,
            changed=bool(rng.random() < 0.5),
            buckets=recipe.info.buckets,
            kinds=kinds or None,
            withheld=recipe.words,
        )
        (before, first), (after, second) = (pair.original, pair.before), (pair.edited, pair.after)
    else:
        (before, first), (after, second) = (
            sample_question(
                rng, style, _kinds(recipe, style), buckets=recipe.info.buckets, count=4, withheld=recipe.words
            )
            for _ in range(2)
        )
    letter = LETTERS[first.choices.index(first.answer)]
    item = single(f"sequels-{number}", after, second, f"sequels/{number}-2.png", task="sequels")
    return replace(
        item,
        views=(View(before, f"sequels/{number}-1.png"), *item.views),
        boxes=tuple((1, box) for _, box in item.boxes),
        earlier=((asked(first.text, first.choices), formatted(letter)),),
        earlier_boxes=(tuple((0, box) for box in first.boxes(before)),),
        fresh=True,
    )


def _counterfactual(rng: np.random.Generator, recipe: Recipe, unit: Unit, style: Style) -> list[Item]:
    edit, number = unit
    changed = is_changed(edit, number)
    pair = sample_pair(rng, style, edit, changed=changed, buckets=recipe.info.buckets, kinds=recipe.kinds or None)
    name = f"{edit}-{number}"
    # Where something was edited: the old place in the original, the new one in the edited picture.
    new = [k for k in pair.touched if k < len(pair.edited.objects)] if edit != "object_removal" else []
    places = {
        "original": [list(pair.original.objects[k].box) for k in pair.touched],
        "edited": [list(pair.edited.objects[k].box) for k in new],
    }
    sides = (("original", pair.original, pair.before), ("edited", pair.edited, pair.after))
    return [
        single(
            f"{name}-{side}",
            scene,
            question,
            f"counterfactual/{name}-{side}.png",
            task="counterfactual",
            category=edit,
            pair=name,
            tags={"edit": edit, "view": side, "changed": "yes" if changed else "no"},
            meta={"edited_boxes_px": places[side]},
        )
        for side, scene, question in sides
    ]


def items(recipe: Recipe) -> Iterator[Item]:
    """Everything in the split, not drawn yet."""
    for unit in recipe.units():
        yield from build(recipe, unit)


def drawn(recipe: Recipe, unit: Unit) -> list[Sample]:
    """The samples of one unit, with their pictures encoded; a picture that several share is drawn once."""
    pictures: dict[str, ImageRef] = {}
    found = []
    for item in build(recipe, unit):
        for view in item.views:
            if view.name not in pictures:
                pictures[view.name] = ImageRef.from_bytes(view.name, view.encode())
        found.append(item.sample([pictures[view.name] for view in item.views]))
    return found


def _drawn(recipe: Recipe, units: list[Unit]) -> list[list[Sample]]:
    return [drawn(recipe, unit) for unit in units]


def samples(recipe: Recipe, workers: int = 1) -> Iterator[Sample]:
    """The split as samples, in order, made by ``workers`` processes.

    More than one needs a program that can be imported again (a script guards its work with ``__name__ == "__main__"``).
    """
    units = recipe.units()
    if workers <= 1:
        for unit in units:
            yield from drawn(recipe, unit)
        return
    size = 1 if recipe.split.startswith("hrbench") or recipe.split == "vstar" else 32
    chunks = (units[k : k + size] for k in range(0, len(units), size))
    waiting: deque[Future[list[list[Sample]]]] = deque()
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            # A few chunks ahead, no more: pictures of 8K pixels must not pile up.
            for chunk in chunks:
                waiting.append(pool.submit(_drawn, recipe, chunk))
                if len(waiting) > 2 * workers:
                    yield from itertools.chain(*waiting.popleft().result())
            while waiting:
                yield from itertools.chain(*waiting.popleft().result())
    except BrokenProcessPool:
        raise UserError(
            "the worker processes ended at once: guard the script's work with `if __name__ == '__main__':`, "
            "or use one worker"
        ) from None


def leaks(splits: dict[str, Iterable[Item]]) -> list[str]:
    """Scenes, near-duplicate scenes and questions that are in more than one of the splits, in words; empty if none."""
    owner: dict[str, str] = {}
    found = []
    for name, members in splits.items():
        for item in members:
            keys = {f"layout {view.scene.layout_key()}" for view in item.views}
            keys |= {f"scene {view.scene.key()}" for view in item.views}
            keys |= {f"question {key} {item.text} {item.choices}" for key in keys}
            for key in sorted(keys):
                if owner.setdefault(key, name) != name:
                    found.append(f"{key} is in {owner[key]} and in {name}")
    return found
