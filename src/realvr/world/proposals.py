"""One proposer per kind of question: given a scene, a query that it answers, aimed at a wanted answer.

Each takes the scene, the generator and ``u``, a number in [0, 1) drawn once per sample before any scene is tried: the
wanted answer is read off ``u``, so that answers stay balanced however many scenes had to be rejected. None means that
this scene cannot serve; the caller tries the next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from realvr.world.queries import ATTRIBUTES, EXTREMES, SIDES, Description, Query, overlap, side
from realvr.world.sampling import pick
from realvr.world.scene import Scene
from realvr.world.words import COLORS, DIRECTIONS, EASY_COLORS, EASY_SHAPES, REGIONS, SHAPES, SIZES, TEXTURES

Proposer = Callable[[Scene, np.random.Generator, float], "Query | None"]
NAMED = ("size", "texture", "color", "shape")
FULL_COLORS = tuple(color for color in COLORS if color != "gray")


def describe_uniquely(
    scene: Scene, index: int, rng: np.random.Generator, without: tuple[str, ...] = ()
) -> Description | None:
    """The shortest phrase that fits only this object and mentions none of ``without``; ties fall to chance."""
    item = scene.objects[index]
    usable = [name for name in NAMED if name not in without and getattr(item, name)]
    if all(other.texture == "plain" for other in scene.objects):
        usable = [name for name in usable if name != "texture"]
    order = [usable[k] for k in rng.permutation(len(usable))]
    for length in range(1, len(order) + 1):
        for names in combinations(order, length):
            found = Description(**{name: getattr(item, name) for name in names})
            if found.matches(scene) == [index]:
                return found
    return None


def values(attribute: str, scene: Scene) -> tuple[str, ...]:
    """The answers a question about an attribute can have in scenes of this kind."""
    if scene.vocabulary == "easy":
        easy = {"color": EASY_COLORS, "shape": EASY_SHAPES}
        if attribute in easy:
            return easy[attribute]
    return {"color": FULL_COLORS, "shape": SHAPES, "texture": TEXTURES, "size": SIZES, "direction": DIRECTIONS}[
        attribute
    ]


def aim(options: tuple[str, ...], u: float) -> str:
    """The wanted answer for ``u``: uniform over ``options``."""
    return options[min(int(u * len(options)), len(options) - 1)]


def _attribute(attribute: str) -> Proposer:
    without = (attribute,) if attribute != "direction" else ()

    def propose(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
        wanted = aim(values(attribute, scene), u)
        hits = [k for k, item in enumerate(scene.objects) if getattr(item, attribute) == wanted]
        if not hits:
            return None
        found = describe_uniquely(scene, pick(rng, hits), rng, without)
        if found is None or (attribute == "direction" and found.shape != "arrow"):
            return None
        return Query(attribute, found)

    return propose


def _phrases(scene: Scene) -> list[Description]:
    """Phrases of one or two attributes made of what the scene holds."""
    seen = {
        (name, getattr(item, name))
        for item in scene.objects
        for name in ("color", "shape", "texture")
        if getattr(item, name) != "plain"
    }
    parts = sorted(seen)
    pairs = [{p[0]: p[1], q[0]: q[1]} for p, q in combinations(parts, 2) if p[0] != q[0]]
    return [Description(**{name: value}) for name, value in parts] + [Description(**pair) for pair in pairs]


def _count(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    if scene.grid == (3, 3):  # hardly two objects look alike there: count them all, three to five
        return Query("count") if len(scene.objects) == 3 + int(u * 3) else None
    wanted = 1 + int(u * 4)
    fitting = [found for found in _phrases(scene) if len(found.matches(scene)) == wanted]
    return Query("count", pick(rng, fitting)) if fitting else None


def _exist(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    """Half the phrases fit something; the other half mix attributes that are there, in different objects."""
    pairs = [found for found in _phrases(scene) if len(found.words()) == 2]
    present = u < 0.5
    fitting = [found for found in pairs if bool(found.matches(scene)) == present]
    return Query("exist", pick(rng, fitting)) if fitting else None


def _position(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    wanted = aim(REGIONS, u)
    hits = [k for k, item in enumerate(scene.objects) if scene.region(item) == wanted]
    found = describe_uniquely(scene, pick(rng, hits), rng) if hits else None
    return Query("position", found) if found else None


def _at(kind: str) -> Proposer:
    attribute = kind.removeprefix("at_")

    def propose(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
        wanted = aim(values(attribute, scene), u)
        places = [scene.region(item) for item in scene.objects if getattr(item, attribute) == wanted]
        places = [place for place in places if place]
        return Query(kind, place=pick(rng, places)) if places else None

    return propose


def _extreme(kind: str) -> Proposer:
    return lambda scene, rng, u: Query(kind, place=pick(rng, EXTREMES))


def _two(
    scene: Scene, rng: np.random.Generator, a: int, b: int, without: tuple[str, ...] = ()
) -> tuple[Description, Description] | None:
    first, second = describe_uniquely(scene, a, rng, without), describe_uniquely(scene, b, rng, without)
    return (first, second) if first and second else None


def _relation(kind: str) -> Proposer:
    options = {"relation_x": SIDES[:2], "relation_y": SIDES[2:]}

    def propose(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
        a, b = (int(k) for k in rng.permutation(len(scene.objects))[:2])
        place = ""
        if kind == "holds":
            # u's upper half wants "no"; the side asked about is drawn apart from it.
            place = pick(rng, SIDES)
            where = side(scene.objects[a], scene.objects[b], place in SIDES[:2])
            if (where == place) != (u < 0.5):
                return None
        elif side(scene.objects[a], scene.objects[b], kind == "relation_x") != aim(options[kind], u):
            return None
        found = _two(scene, rng, a, b)
        return Query(kind, *found, place=place) if found else None

    return propose


def _front(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    pairs = [
        (i, j) for i, j in combinations(range(len(scene.objects)), 2) if overlap(scene.objects[i], scene.objects[j])
    ]
    if not pairs:
        return None
    low, high = pick(rng, pairs)
    found = _two(scene, rng, *((high, low) if u < 0.5 else (low, high)))
    return Query("front", *found) if found else None


def _bigger(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    a, b = (int(k) for k in rng.permutation(len(scene.objects))[:2])
    if (scene.objects[a].radius > scene.objects[b].radius) != (u < 0.5):
        return None
    found = _two(scene, rng, a, b, ("size",))
    return Query("bigger", *found) if found else None


def _more(scene: Scene, rng: np.random.Generator, u: float) -> Query | None:
    attribute = pick(rng, ("color", "shape"))
    options = sorted({getattr(item, attribute) for item in scene.objects})
    if len(options) < 2:
        return None
    i, j = (int(k) for k in rng.permutation(len(options))[:2])
    a, b = Description(**{attribute: options[i]}), Description(**{attribute: options[j]})
    difference = len(a.matches(scene)) - len(b.matches(scene))
    # Close calls only: a lead of three can be seen without counting.
    if abs(difference) > 2 or (difference > 0) - (difference < 0) != int(u * 3) - 1:
        return None
    return Query("more", a, b)


PROPOSERS: dict[str, Proposer] = {
    **{name: _attribute(name) for name in ATTRIBUTES},
    "count": _count,
    "exist": _exist,
    "position": _position,
    "at_color": _at("at_color"),
    "at_shape": _at("at_shape"),
    "relation_x": _relation("relation_x"),
    "relation_y": _relation("relation_y"),
    "holds": _relation("holds"),
    "front": _front,
    "bigger": _bigger,
    "more": _more,
    "extreme_color": _extreme("extreme_color"),
    "extreme_shape": _extreme("extreme_shape"),
}
