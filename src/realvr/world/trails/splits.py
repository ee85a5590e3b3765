"""Items of the splits of trails."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from realvr.world.items import Item, View
from realvr.world.scene import Scene
from realvr.world.trails import lessons, questions
from realvr.world.trails.board import Board
from realvr.world.trails.picture import caption, scene_of, table
from realvr.world.trails.plan import Plan
from realvr.world.trails.questions import Asked
from realvr.world.trails.sampling import sample_trail

KINDS: dict[str, tuple[str, ...]] = {
    "trails": questions.KINDS,
    "trails-train": questions.KINDS,
    "trails-lessons": lessons.KINDS,
}
"""Kinds of question that each split can hold."""


def build(
    rng: np.random.Generator,
    split: str,
    number: int,
    size: tuple[int, int],
    plan: Plan,
    kinds: tuple[str, ...],
    buckets: Container[int],
) -> list[Item]:
    """The items of one unit."""
    trail = sample_trail(rng, plan, buckets)
    asked = lessons.ask_lesson(rng, trail, kinds) if split == "trails-lessons" else questions.ask_end(rng, trail)
    scene = scene_of(trail.board, plan, size, rng)
    meta = {"caption": caption(trail.board), "objects": table(trail.board, size)}
    return [_item(split, f"{split}-{number}", f"{split}/{number}.png", trail.board, scene, asked, meta=meta)]


def _item(split: str, id: str, file: str, board: Board, scene: Scene, asked: Asked, **fields: Any) -> Item:
    """One question about one board. Boxes are whole cells, in the order in which one looks at them."""
    trail = {"grid": list(board.grid), "cells": [list(cell) for cell in asked.cells], "board": board.entries}
    return Item(
        id,
        (View(scene, file),),
        asked.text,
        asked.answer,
        asked.choices,
        tuple((0, board.box(cell, scene.size)) for cell in asked.cells),
        asked.kind,
        task=split,
        tags={"kind": asked.kind, "arrows": str(asked.arrows), "withheld": "no"} | fields.pop("tags", {}),
        meta={"trail": trail} | fields.pop("meta", {}),
        **fields,
    )
