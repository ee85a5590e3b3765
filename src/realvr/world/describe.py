"""Dense descriptions of a scene, for training a model from nothing: captions, tables, cell labels, dialogues.

Answer letters alone do not teach a small model to see; these say what is where.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.world.queries import Query
from realvr.world.questions import Question, Withheld, ask, options
from realvr.world.sampling import pick
from realvr.world.scene import Object, Scene
from realvr.world.words import COLORS, SHAPES, with_article

CAPTION_HEADS = ("The image shows {list}.", "There are {n} objects: {list}.", "I see {list}.")


def _reading_order(scene: Scene) -> list[Object]:
    """Row by row, left to right."""
    return sorted(scene.objects, key=lambda item: scene.cell(item)[::-1])


def name_of(item: Object) -> str:
    """Everything that can be said of an object: ``small striped red circle``."""
    texture = item.texture if item.texture != "plain" else ""
    return " ".join(word for word in (item.size, texture, item.color, item.shape) if word)


def caption(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """One sentence that names every object and its place. Without a generator, always the first wording."""
    parts = [f"{with_article(name_of(item))} at the {scene.region(item, margin=0)}" for item in _reading_order(scene)]
    listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
    head = CAPTION_HEADS[0] if rng is None else pick(rng, CAPTION_HEADS)
    return str(head.format(list=listed, n=len(parts)))


def table(scene: Scene) -> list[dict[str, Any]]:
    """One row an object, in reading order, with its pixel box and layout cell (column, row)."""
    return [
        {
            "shape": item.shape,
            "color": item.color,
            "size": item.size,
            "texture": item.texture,
            "direction": item.direction,
            "region": scene.region(item, margin=0),
            "cell": list(scene.cell(item)),
            "box": list(item.box),
        }
        for item in _reading_order(scene)
    ]


def cell_labels(scene: Scene) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Color and shape of every layout cell, each (rows, columns): 0 for an empty cell, else 1 + index of the word."""
    columns, rows = scene.grid
    colors, shapes = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    for item in scene.objects:
        column, row = scene.cell(item)
        colors[row, column] = 1 + list(COLORS).index(item.color)
        shapes[row, column] = 1 + SHAPES.index(item.shape)
    return colors, shapes


FOLLOW_UPS = {"color": "And what color is it?", "shape": "And what shape is it?", "position": "And where is it?"}
ABOUT_ONE = ("color", "shape", "position", "at_color", "at_shape")
"""Kinds that single out one object, which "it" can then mean."""


def dialogue(
    scene: Scene, rng: np.random.Generator, kinds: tuple[str, ...], *, count: int = 4, withheld: Withheld = "any"
) -> tuple[Question, Question] | None:
    """Two questions about one scene. Half the time the second says "it" and means the object of the first."""
    about_one = tuple(kind for kind in kinds if kind in ABOUT_ONE)
    follows = bool(about_one) and rng.random() < 0.5
    first = ask(scene, pick(rng, about_one if follows else kinds), rng, count=count, withheld=withheld)
    if first is None:
        return None
    if follows:
        second = _follow_up(scene, first, rng, count)
    else:
        second = ask(scene, pick(rng, kinds), rng, count=count, withheld=withheld)
    return (first, second) if second is not None and second.text != first.text else None


def _follow_up(scene: Scene, first: Question, rng: np.random.Generator, count: int) -> Question | None:
    """What else there is to ask about the one object the first question was about."""
    item = scene.objects[first.evidence[0]]
    known = {first.kind.removeprefix("at_")} | {"position" for _ in first.query.place[:1]}
    known |= {name for name in ("color", "shape") if getattr(first.query.a, name)}
    left = [name for name in FOLLOW_UPS if name not in known]
    name = pick(rng, left) if left else ""
    answer = scene.region(item) if name == "position" else getattr(item, name, "")
    if not answer:
        return None
    query = Query(name, first.query.a, place=first.query.place)
    shown = options(query, answer, scene, rng, count) if count else ()
    return Question(query, FOLLOW_UPS[name], answer, first.evidence, shown)
