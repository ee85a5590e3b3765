"""Six mini-benchmarks that test what the real ones test, item by item.

Every builder is a pure function of a generator and an index, so that any item can be made alone and in any process.
``buckets`` are the layouts the split owns (see `realvr.world.splits`).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from realvr.errors import UserError
from realvr.world import puzzles
from realvr.world.edits import sample_pair
from realvr.world.items import Item, single
from realvr.world.phrasing import phrase
from realvr.world.proposals import aim, values
from realvr.world.queries import Description, Query
from realvr.world.questions import MAX_TRIES, Question, ask, compose, sample_question
from realvr.world.sampling import Style, clutter, easy, full, huge, pick, sample_scene, settle, shows
from realvr.world.scene import Scene
from realvr.world.words import REGIONS

BLINK_TASKS: dict[str, int] = {
    "Counting": 120,
    "IQ_Test": 150,
    "Jigsaw": 150,
    "Relative_Reflectance": 134,
    "Spatial_Relation": 143,
}
"""The five subtasks behind the paper's BLINK number, with the rows of the real validation split."""

ABSENT = "The image does not feature what is asked about"
"""Text of option E in the MME-RealWorld-like benchmark."""

MMVP_EDITS: tuple[tuple[str, str], ...] = (
    ("color_change", "color"),
    ("retexture", "texture"),
    ("turn", "direction"),
    ("shape_swap", "shape"),
    ("object_removal", "count"),
    ("object_removal", "exist"),
    ("spatial_swap", "relation_x"),
    ("spatial_swap", "relation_y"),
)
"""The subtle differences between the two pictures of an MMVP-like pair: (edit, kind of question)."""


@dataclass(frozen=True)
class Resize:
    """What a model does to a large image before it looks: shrink to ``max_pixels``, cut into squares of ``patch``.

    The default is the paper's training limit of 5,120 visual tokens of 28 x 28 pixels.
    """

    max_pixels: int = 5120 * 28 * 28
    patch: int = 28

    def scale(self, width: int, height: int) -> float:
        """Factor applied to both sides; never above 1."""
        return min(1.0, math.sqrt(self.max_pixels / (width * height)))


def world_style(width: int, height: int) -> Style:
    """Ordinary scenes on a canvas: easy up to 64 pixels, else full."""
    return replace(easy() if max(width, height) <= 64 else full(), width=width, height=height)


def mmvp_pair(rng: np.random.Generator, index: int, style: Style, buckets: Container[int]) -> tuple[Item, Item]:
    """Two pictures that differ in one detail, one question, two options, different answers. ``index`` counts pairs."""
    usable = [
        entry for entry in MMVP_EDITS if style.vocabulary == "full" or entry[1] not in ("texture", "direction", "count")
    ]
    edit, kind = usable[index % len(usable)]
    pair = sample_pair(rng, style, edit, changed=True, buckets=buckets, count=2, kinds=(kind,))
    # Which picture comes first must not tell the answer: a removal would always go from more to fewer.
    sides = [(pair.original, pair.before), (pair.edited, pair.after)]
    order = (0, 1) if rng.random() < 0.5 else (1, 0)
    items = []
    for place, which in enumerate(order):
        number = 2 * index + place + 1
        scene, question = sides[which]
        items.append(
            single(str(number), scene, question, f"{number}.png", task="mmvp", pair=str(index + 1), tags={"edit": edit})
        )
    return items[0], items[1]


def blink_item(rng: np.random.Generator, task: str, index: int, style: Style, buckets: Container[int]) -> Item:
    """One row of a BLINK-like subtask."""
    name = f"val_{task}_{index + 1}"
    if task in ("Counting", "Spatial_Relation"):
        kind = "count" if task == "Counting" else "holds"
        scene, question = sample_question(rng, style, (kind,), buckets=buckets)
        return single(name, scene, question, f"{name}_1.png", task=task)
    makers = {"Jigsaw": puzzles.jigsaw, "Relative_Reflectance": puzzles.brightness, "IQ_Test": puzzles.pattern}
    return makers[task](rng, style, buckets, name)


PRACTICE: tuple[str, ...] = ("mmvp", *BLINK_TASKS, "hrbench", "mme-realworld")
"""In whose manner training questions can be asked."""


def practice_item(
    rng: np.random.Generator, part: str, index: int, canvas: tuple[int, int], buckets: Container[int]
) -> Item:
    """One question in the manner of ``part`` for a model that sees ``canvas``, on layouts of ``buckets``."""
    width, height = canvas
    if part == "mmvp":
        return pick(rng, mmvp_pair(rng, index, world_style(width, height), buckets))
    if part == "hrbench":
        # Four times as large as what is seen of it, and visual tokens of a sixth of a side.
        resize = Resize(width * height, min(width, height) // 6)
        return pick(rng, hr_items(rng, index, huge(4 * width, 4 * height), buckets, resize))
    if part == "mme-realworld":
        return mme_item(rng, index, clutter(max(width, 128), max(height, 128)), buckets)
    return blink_item(rng, part, index, world_style(width, height), buckets)


HR_KINDS: dict[str, tuple[str, ...]] = {
    "single": ("color", "shape", "direction"),
    "cross": ("relation_x", "relation_y", "count", "more"),
}


def hr_items(
    rng: np.random.Generator, index: int, style: Style, buckets: Container[int], resize: Resize | None = None
) -> list[Item]:
    """One question about tiny objects in a huge picture, in its four option cycles, which share one view.

    Even questions are visible (the smallest supporting object spans at least one patch after ``resize``), odd ones are
    not; they alternate in pairs between ``single`` and ``cross``.
    """
    resize = resize or Resize()
    visible, category = index % 2 == 0, ("single", "cross")[index // 2 % 2]
    kinds = HR_KINDS[category]
    if style.vocabulary == "easy":
        kinds = tuple(kind for kind in kinds if kind not in ("direction", "count", "more"))
    scene, question = _tiny(rng, style, kinds, buckets, visible, resize)
    scale = resize.scale(*scene.size)
    sides = [((x1 - x0) * scale, (y1 - y0) * scale) for x0, y0, x1, y1 in question.boxes(scene)]
    smallest = min(sides, key=min)
    meta = {
        "evidence_px": [round(value, 2) for value in smallest],
        "resize_max_pixels": resize.max_pixels,
        "patch": resize.patch,
        "resized": [round(side * scale) for side in scene.size],
    }
    tags = {"stratum": "visible" if visible else "invisible"}
    shown = _four(question, rng)
    items = []
    for cycle in range(4):
        turned = shown[cycle:] + shown[:cycle]
        items.append(
            replace(
                single(
                    str(4 * index + cycle),
                    scene,
                    question,
                    f"{index}.jpg",
                    task="hr_bench",
                    category=category,
                    tags=tags,
                ),
                choices=turned,
                cycle=str(cycle),
                meta=meta,
            )
        )
    view = items[0].views
    return [replace(item, views=view) for item in items]


def _four(question: Question, rng: np.random.Generator) -> tuple[str, ...]:
    """Four options; relations and comparisons, which have two or three answers, are filled up with plain wrong ones."""
    fillers = {"relation_x": ("above", "below"), "relation_y": ("left", "right"), "more": ("there are none of either",)}
    shown = [*question.choices, *fillers.get(question.kind, ())]
    return tuple(shown[k] for k in rng.permutation(len(shown)))


def _tiny(
    rng: np.random.Generator,
    style: Style,
    kinds: tuple[str, ...],
    buckets: Container[int],
    visible: bool,
    resize: Resize,
) -> tuple[Scene, Question]:
    """A question whose supporting objects have the wanted size after ``resize``."""
    patch = resize.patch / resize.scale(style.width, style.height)
    low, high = (0.62, 1.3) if visible else (0.18, 0.42)
    top = min(high * patch, 0.42 * style.cell)
    if top <= low * patch or top < 4:
        raise UserError(
            f"canvas {style.width}x{style.height}: no {'' if visible else 'in'}visible object fits when the image is "
            f"resized to {resize.max_pixels} pixels with patches of {resize.patch}; use another size or resize"
        )
    for _ in range(MAX_TRIES):
        scene, question = sample_question(rng, style, kinds, buckets=buckets)
        # Half of the others get such a size too, or size alone would tell what the question is about.
        others = [k for k in range(len(scene.objects)) if k not in question.evidence and rng.random() < 0.5]
        for index in (*question.evidence, *others):
            radius = round(float(rng.uniform(max(low * patch, 3.5), top)) * 2) / 2
            item = scene.objects[index]
            texture = item.texture if shows(item.shape, item.size, radius, item.texture) else "plain"
            settled = settle(scene, replace(item, radius=radius, texture=texture))
            scene = scene.edit(index, radius=radius, texture=texture, x=settled.x, y=settled.y)
        asked = question.asked_of(scene)
        if asked is None or asked.answer != question.answer or scene.bucket() not in buckets:
            continue
        sides = [min(x1 - x0, y1 - y0) for x0, y0, x1, y1 in asked.boxes(scene)]
        if (min(sides) >= patch) == visible:
            return scene, asked
    raise UserError(f"{style.name} scenes of {style.width}x{style.height} answer none of {', '.join(kinds)}")


VSTAR_KINDS: dict[str, tuple[str, ...]] = {
    "direct_attributes": ("color", "shape", "direction"),
    "relative_position": ("relation_x", "relation_y"),
}


def vstar_item(
    rng: np.random.Generator, index: int, style: Style, buckets: Container[int], resize: Resize | None = None
) -> Item:
    """A question about small but visible objects in a large picture: an attribute with four options in three of five,
    as in the real set, else which of two sides one object lies on."""
    category = "relative_position" if index % 5 in (1, 3) else "direct_attributes"
    kinds = tuple(kind for kind in VSTAR_KINDS[category] if style.vocabulary == "full" or kind != "direction")
    scene, question = _tiny(rng, style, kinds, buckets, True, resize or Resize())
    return single(str(index), scene, question, f"{category}/{index}.jpg", task="vstar", category=category)


MME_KINDS: tuple[str, ...] = ("color", "shape", "texture", "count", "position")
ABSENT_KINDS: tuple[str, ...] = ("color", "shape", "texture", "position")


def mme_item(rng: np.random.Generator, index: int, style: Style, buckets: Container[int]) -> Item:
    """A question about a crowd, with four options and an E that says it is not there; E is right in one of five."""
    absent = rng.random() < 0.2
    kinds = ABSENT_KINDS if absent else MME_KINDS
    if style.vocabulary == "easy":
        kinds = tuple(kind for kind in kinds if kind != "texture")
    kind, u = pick(rng, kinds), rng.random()
    for _ in range(MAX_TRIES):
        scene = sample_scene(rng, style, buckets)
        question = (_absent if absent else _present)(rng, scene, kind, u)
        if question is not None:
            break
    else:
        raise UserError(f"{style.name} scenes of {style.width}x{style.height} answer no question of kind {kind!r}")
    return single(
        str(index),
        scene,
        question,
        f"{index}.png",
        task="Reasoning" if kind == "count" else "Perception",
        category=kind,
        tags={"subtask": "Clutter"},
    )


def _named(rng: np.random.Generator, scene: Scene, kind: str, u: float) -> tuple[Question, tuple[str, ...]] | None:
    """A question about an object of the crowd, described by the attributes returned with it.

    ``u`` is drawn once a question and fixes the wanted answer: most objects are plain, most questions must not be.
    """
    names: tuple[str, ...] = {"color": ("texture", "shape"), "shape": ("texture", "color")}.get(
        kind, ("color", "shape")
    )
    if scene.vocabulary == "easy":
        names = tuple(name for name in names if name != "texture")
    # An arrow shows no texture, by which shapes are asked for here.
    can_be = REGIONS if kind == "position" else tuple(value for value in values(kind, scene) if value != "arrow")
    wanted = aim(can_be, u)
    models = [i for i in scene.objects if (scene.region(i) if kind == "position" else getattr(i, kind)) == wanted]
    if not models:
        return None
    model = pick(rng, models)
    wish = Description(**{name: getattr(model, name) for name in names})
    question = compose(Query(kind, wish), scene, rng) if wish.texture != "plain" else None
    return (question, names) if question else None


def _absent(rng: np.random.Generator, scene: Scene, kind: str, u: float) -> Question | None:
    """A question about an object that is not there, though others come close.

    It is worded, and has the options, of one about an object that is: nothing but the picture tells the two apart.
    """
    like = _named(rng, scene, kind, u)
    if like is None:
        return None
    question, names = like
    if len(names) == 1:  # a single word must be new
        wish = Description(**{name: pick(rng, values(name, scene)) for name in names})
    else:  # words of two objects that could be asked about, so that only their combination is missing
        other = _named(rng, scene, kind, rng.random())
        if other is None:
            return None
        kept = pick(rng, names)
        words = {name: (question if name == kept else other[0]).query.a for name in names}
        wish = Description(**{name: getattr(about, name) for name, about in words.items()})
    if wish.matches(scene):
        return None
    query = Query(kind, wish)
    evidence = tuple(wish.near_misses(scene)) if len(names) > 1 else ()
    text = phrase(query, int(rng.integers(12)))
    return Question(query, text, ABSENT, evidence, (*question.choices, ABSENT))


def _present(rng: np.random.Generator, scene: Scene, kind: str, u: float) -> Question | None:
    if kind == "count":
        question = ask(scene, kind, rng, u)
    else:
        named = _named(rng, scene, kind, u)
        question = named[0] if named else None
    return replace(question, choices=(*question.choices, ABSENT)) if question else None
