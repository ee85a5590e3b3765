"""Counterfactual pairs: one picture, one edit, one question, asked of both.

Edits: ``color_change``, ``object_removal``, ``shape_swap`` (an object takes another shape) and ``spatial_swap`` (two
objects change places). In most pairs the edit changes the right answer; the others are controls, where it touches
something the question is not about and the answer must stay. The shares of the former are those of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import numpy as np

from realvr.errors import UserError
from realvr.world.proposals import values
from realvr.world.queries import overlap
from realvr.world.questions import MAX_TRIES, Question, Withheld, ask, options
from realvr.world.sampling import ANY_BUCKET, Style, pick, sample_scene, settle, shows
from realvr.world.scene import Scene
from realvr.world.words import DIRECTIONS, TEXTURES

PAIRS_PER_EDIT = 512
CHANGED_SHARE: dict[str, float] = {
    "color_change": 442 / 512,
    "object_removal": 417 / 512,
    "shape_swap": 433 / 512,
    "spatial_swap": 435 / 512,
}
"""Share of pairs whose answer changes, as in the paper's table of paired counterfactual behavior."""
EDITS: tuple[str, ...] = tuple(CHANGED_SHARE)

KINDS: dict[str, tuple[str, ...]] = {
    "color_change": ("color", "at_color", "extreme_color", "count", "exist"),
    "object_removal": ("exist", "count", "extreme_color", "extreme_shape"),
    "shape_swap": ("shape", "at_shape", "extreme_shape", "count", "exist"),
    "spatial_swap": ("position", "at_color", "at_shape", "relation_x", "relation_y", "holds"),
}
"""What is asked under each edit: the same for changed pairs and controls, so that a question gives nothing away."""


def kinds_for(edit: str, style: Style) -> tuple[str, ...]:
    """`KINDS`, less counting in the easy vocabulary: no two objects there share a color or a shape."""
    return tuple(kind for kind in KINDS[edit] if style.vocabulary != "easy" or kind != "count")


@dataclass(frozen=True)
class Pair:
    """``touched`` holds the indices of the edited objects in the original scene."""

    edit: str
    original: Scene
    edited: Scene
    before: Question
    after: Question
    touched: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """Whether the edit changes the answer."""
        return self.before.answer != self.after.answer


def is_changed(edit: str, index: int) -> bool:
    """Whether pair ``index`` of an edit is to change its answer: spread evenly, exact over `PAIRS_PER_EDIT`."""
    share = CHANGED_SHARE[edit]
    return int((index + 1) * share + 0.5) > int(index * share + 0.5)


Edited = tuple[Scene, tuple[int, ...]]
Editor = Callable[[np.random.Generator, Scene, int], "Edited | None"]


def recolor(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """Another color; in the easy vocabulary one that is not in the scene yet."""
    taken = {item.color for item in scene.objects} if scene.vocabulary == "easy" else {scene.objects[index].color}
    free = [color for color in values("color", scene) if color not in taken]
    return (scene.edit(index, color=pick(rng, free)), (index,)) if free else None


def remove(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """The object is gone."""
    return scene.without(index), (index,)


def reshape(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """Another shape, one that still shows the object's texture."""
    item = scene.objects[index]
    taken = {other.shape for other in scene.objects} if scene.vocabulary == "easy" else {item.shape}
    free = [shape for shape in values("shape", scene) if shape not in taken]
    free = [shape for shape in free if shows(shape, item.size, item.radius, item.texture)]
    rotation = item.rotation - 90 * round(item.rotation / 90)
    return (scene.edit(index, shape=pick(rng, free), rotation=rotation), (index,)) if free else None


def swap(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """The object changes places with another; neither may overlap a third, which would change what is hidden."""
    item = scene.objects[index]
    others = [k for k in range(len(scene.objects)) if k != index and _free(scene, k)]
    if not others or not _free(scene, index):
        return None
    other = pick(rng, others)
    there = scene.objects[other]
    objects = list(scene.objects)
    objects[index], objects[other] = (
        settle(scene, replace(item, x=there.x, y=there.y)),
        settle(scene, replace(there, x=item.x, y=item.y)),
    )
    return replace(scene, objects=tuple(objects)), (index, other)


def _free(scene: Scene, index: int) -> bool:
    return not any(overlap(scene.objects[index], other) for k, other in enumerate(scene.objects) if k != index)


def turn(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """An arrow points elsewhere."""
    item = scene.objects[index]
    if item.shape != "arrow":
        return None
    return scene.edit(index, rotation=item.rotation + 90 * int(rng.integers(1, len(DIRECTIONS)))), (index,)


def retexture(rng: np.random.Generator, scene: Scene, index: int) -> Edited | None:
    """Another texture, where the object is wide enough to show it."""
    item = scene.objects[index]
    others = [name for name in TEXTURES if name != item.texture and shows(item.shape, item.size, item.radius, name)]
    return (scene.edit(index, texture=pick(rng, others)), (index,)) if others else None


EDITORS: dict[str, Editor] = {
    "color_change": recolor,
    "object_removal": remove,
    "shape_swap": reshape,
    "spatial_swap": swap,
    "turn": turn,
    "retexture": retexture,
}


def edit_pair(
    rng: np.random.Generator,
    scene: Scene,
    question: Question,
    edit: str,
    *,
    changed: bool,
    buckets: Container[int] = ANY_BUCKET,
) -> Pair | None:
    """An edit of ``scene`` that does, or does not, change the answer; None where a few tries find none."""
    inside = set(question.evidence)
    targets = [k for k in range(len(scene.objects)) if (k in inside) == changed]
    # An answer of "no" or "none" has no object of its own: an edit elsewhere may change it.
    for _ in range(8):
        pool = targets or list(range(len(scene.objects)))
        done = EDITORS[edit](rng, scene, pick(rng, pool))
        if done is None:
            continue
        edited, touched = done
        after = question.asked_of(edited)
        if after is None or (after.answer != question.answer) != changed or edited.bucket() not in buckets:
            continue
        if not changed and inside & set(touched):
            continue
        return Pair(edit, scene, edited, question, after, touched)
    return None


def sample_pair(
    rng: np.random.Generator,
    style: Style,
    edit: str,
    *,
    changed: bool,
    buckets: Container[int] = ANY_BUCKET,
    count: int = 4,
    kinds: tuple[str, ...] | None = None,
    withheld: Withheld = "any",
) -> Pair:
    """A pair with the same words and the same options on both sides; both layouts lie in ``buckets``."""
    kind = pick(rng, kinds or kinds_for(edit, style))
    for _ in range(MAX_TRIES * 4):
        scene = sample_scene(rng, style, buckets)
        # No fixed wish for the answer here: a removal can only turn "yes" into "no", whatever one might want.
        question = ask(scene, kind, rng, count=0, withheld=withheld)
        pair = question and edit_pair(rng, scene, question, edit, changed=changed, buckets=buckets)
        if question and pair:
            return _with_options(rng, pair, count)
    raise UserError(f"{style.name} scenes allow no {edit} with a question of kind {kind!r}")


def _with_options(rng: np.random.Generator, pair: Pair, count: int) -> Pair:
    """Offer both answers, each among the others in random order."""
    if not count:
        return pair
    offered = list(options(pair.before.query, pair.before.answer, pair.original, rng, count))
    if pair.after.answer not in offered:
        wrong = [k for k, choice in enumerate(offered) if choice != pair.before.answer]
        offered[pick(rng, wrong)] = pair.after.answer
    choices = tuple(offered)
    return replace(pair, before=replace(pair.before, choices=choices), after=replace(pair.after, choices=choices))
