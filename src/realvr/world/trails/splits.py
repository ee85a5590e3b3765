"""Items of the splits of trails."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from realvr.data.wording import asked as as_put
from realvr.data.wording import formatted
from realvr.world.items import Item, View
from realvr.world.questions import LETTERS
from realvr.world.scene import Scene
from realvr.world.trails import lessons, pairs, questions
from realvr.world.trails.board import Board
from realvr.world.trails.draws import choose
from realvr.world.trails.picture import caption, sample_ground, scene_of, table
from realvr.world.trails.plan import Plan
from realvr.world.trails.questions import Asked
from realvr.world.trails.sampling import sample_trail

KINDS: dict[str, tuple[str, ...]] = {
    "trails": (*questions.KINDS, questions.SWITCH),
    "trails-train": questions.KINDS,
    "trails-lessons": lessons.KINDS,
    "trails-pairs": ("end",),
    "trails-sequels": ("end",),
}
"""Kinds of question that each split can hold."""


@dataclass(frozen=True)
class Order:
    """What is wanted of a split: its boards, the canvas (width, height), kinds of question and buckets of its own."""

    split: str
    plan: Plan
    size: tuple[int, int]
    kinds: tuple[str, ...]
    buckets: Container[int]


def build(rng: np.random.Generator, order: Order, part: str, number: int) -> list[Item]:
    """The items of one unit."""
    if order.split == "trails-pairs":
        return _pair(rng, order, part, number)
    if order.split == "trails-sequels":
        return [_sequel(rng, order, number)]
    if questions.SWITCH in order.kinds:
        kind = choose(rng, order.kinds)
        if kind == questions.SWITCH:
            return _switch(rng, order, number)
        order = replace(order, kinds=(kind,))
    if order.split == "trails-lessons":
        trail = sample_trail(rng, order.plan, order.buckets)
        asked = lessons.ask_lesson(rng, trail, order.plan, order.kinds)
    else:
        trail, asked = questions.sample_asked(rng, order.plan, order.kinds, order.buckets)
    scene = scene_of(trail.board, order.size, sample_ground(rng, order.plan.clutter))
    meta = {"caption": caption(trail.board), "objects": table(trail.board, order.size)}
    return [_item(order, f"{order.split}-{number}", trail.board, scene, asked, meta=meta)]


def _switch(rng: np.random.Generator, order: Order, number: int) -> list[Item]:
    """Two questions about one board, each from a start of its own to a circle of its own, in two wordings each. All
    have the same options."""
    board, four = questions.sample_switch(rng, order.plan, order.buckets)
    scene = scene_of(board, order.size, sample_ground(rng, order.plan.clutter))
    meta = {"caption": caption(board), "objects": table(board, order.size)}
    found = []
    for place, asked in enumerate(four):
        tags = {"switch": str(place // 2 + 1), "wording": str(place % 2 + 1)}
        name = f"{order.split}-{number}-{place // 2 + 1}{'ab'[place % 2]}"
        item = _item(order, name, board, scene, asked, tags=tags, meta=dict(meta))
        found.append(replace(item, views=(View(scene, f"{order.split}/{number}.png"),)))
    return found


def _pair(rng: np.random.Generator, order: Order, edit: str, number: int) -> list[Item]:
    """The original and the edited board, each with its own trail."""
    pair = pairs.sample_pair(rng, order.plan, edit, order.buckets)
    ground, name = sample_ground(rng, order.plan.clutter), f"{edit}-{number}"
    found = []
    for view, trail, asked in (("original", pair.original, pair.before), ("edited", pair.edited, pair.after)):
        scene = scene_of(trail.board, order.size, ground)
        tags = {"edit": edit, "view": view, "changed": "yes" if pair.before.answer != pair.after.answer else "no"}
        meta = {"edited_boxes_px": [list(trail.board.box(cell, order.size)) for cell in pair.touched]}
        item = _item(order, f"{name}-{view}", trail.board, scene, asked, tags=tags, meta=meta, category=edit, pair=name)
        item.meta["trail"] |= {"parts_at": pair.parts_at, "changes_at": pair.changes_at}
        found.append(item)
    return found


def _sequel(rng: np.random.Generator, order: Order, number: int) -> Item:
    """A question with its answer, then another board: half the time an edit of the first with the same question, else
    an unrelated one with a question of its own."""
    if rng.random() < 0.5:
        pair = pairs.sample_pair(rng, order.plan, choose(rng, tuple(pairs.EDITS)), order.buckets)
        (one, first), (two, second) = (pair.original, pair.before), (pair.edited, pair.after)
        grounds = [sample_ground(rng, order.plan.clutter)] * 2
    else:
        (one, first), (two, second) = (
            questions.sample_asked(rng, order.plan, order.kinds, order.buckets) for _ in range(2)
        )
        grounds = [sample_ground(rng, order.plan.clutter) for _ in range(2)]
    before, after = (scene_of(trail.board, order.size, g) for trail, g in zip((one, two), grounds, strict=True))
    item = _item(order, f"{order.split}-{number}", two.board, after, second)
    choices = first.choices if item.choices else ()
    reply = LETTERS[choices.index(first.answer)] if choices else first.answer
    return replace(
        item,
        views=(View(before, f"{order.split}/{number}-1.png"), View(after, f"{order.split}/{number}-2.png")),
        boxes=tuple((1, box) for _, box in item.boxes),
        earlier=((as_put(first.text, choices), formatted(reply)),),
        earlier_boxes=(tuple((0, one.board.box(cell, order.size)) for cell in first.cells),),
        fresh=True,
    )


def _item(order: Order, id: str, board: Board, scene: Scene, asked: Asked, **fields: Any) -> Item:
    """One question about one board. Boxes are whole cells, in the order in which one looks at them."""
    trail = {"grid": list(board.grid), "cells": [list(cell) for cell in asked.cells], "board": board.entries}
    name = id.removeprefix(f"{order.split}-")
    return Item(
        id,
        (View(scene, f"{order.split}/{name}.png"),),
        asked.text,
        asked.answer,
        asked.choices if order.plan.answers == "options" else (),
        tuple((0, board.box(cell, scene.size)) for cell in asked.cells),
        asked.kind,
        task=order.split,
        tags={"kind": asked.kind, "arrows": str(asked.arrows), "withheld": "no"} | fields.pop("tags", {}),
        meta={"trail": trail} | fields.pop("meta", {}),
        **fields,
    )
