"""What a question asks, as data, and its answer in a given scene.

A query is independent of its wording. `evaluate` returns None where the scene leaves room for doubt (two objects fit
the description, centres too close to call), and such a question is never posed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from realvr.world.sampling import SOLID
from realvr.world.scene import Object, Scene
from realvr.world.words import WITHHELD_WORDS, plural

EXTREMES = ("leftmost", "rightmost", "topmost", "bottommost")
SIDES = ("left", "right", "above", "below")
SAME = "the same number"


@dataclass(frozen=True)
class Description:
    """A noun phrase: the attributes that are mentioned, the others empty."""

    size: str = ""
    texture: str = ""
    color: str = ""
    shape: str = ""

    def fits(self, item: Object) -> bool:
        """Whether it describes the object; what it leaves out may be anything."""
        return (
            self.size in ("", item.size)
            and self.texture in ("", item.texture)
            and self.color in ("", item.color)
            and self.shape in ("", item.shape)
        )

    def matches(self, scene: Scene) -> list[int]:
        """Indices of the objects it fits."""
        return [k for k, item in enumerate(scene.objects) if self.fits(item)]

    def near_misses(self, scene: Scene) -> list[int]:
        """Indices of the objects that fail it in exactly one attribute."""
        names = [field.name for field in fields(self) if getattr(self, field.name)]
        wrong = [sum(getattr(item, name) != getattr(self, name) for name in names) for item in scene.objects]
        return [k for k, count in enumerate(wrong) if count == 1]

    def words(self) -> tuple[str, ...]:
        """Its words in the order of English."""
        return tuple(word for word in (self.size, self.texture, self.color, self.shape) if word)

    def __str__(self) -> str:
        return " ".join((*self.words(), *(() if self.shape else ("object",))))


@dataclass(frozen=True)
class Query:
    """``kind`` names a row of `phrasing.PHRASINGS`; ``a`` and ``b`` are what it is about, ``place`` is where."""

    kind: str
    a: Description = Description()
    b: Description = Description()
    place: str = ""

    def withheld(self) -> bool:
        """Whether it refers to something by a withheld word."""
        return any(word in WITHHELD_WORDS for word in (*self.a.words(), *self.b.words(), self.place))


@dataclass(frozen=True)
class Outcome:
    """An answer and the indices of the objects that support it."""

    answer: str
    evidence: tuple[int, ...]


ATTRIBUTES = ("color", "shape", "texture", "size", "direction")


def _attribute(query: Query, scene: Scene) -> Outcome | None:
    found = query.a.matches(scene)
    value = getattr(scene.objects[found[0]], query.kind) if len(found) == 1 else ""
    return Outcome(value, (found[0],)) if value else None


def _count(query: Query, scene: Scene) -> Outcome | None:
    found = query.a.matches(scene)
    return Outcome(str(len(found)), tuple(found or query.a.near_misses(scene)))


def _exist(query: Query, scene: Scene) -> Outcome | None:
    found = query.a.matches(scene)
    return Outcome("yes" if found else "no", tuple(found or query.a.near_misses(scene)))


def _position(query: Query, scene: Scene) -> Outcome | None:
    found = query.a.matches(scene)
    region = scene.region(scene.objects[found[0]]) if len(found) == 1 else ""
    return Outcome(region, (found[0],)) if region else None


def _at(query: Query, scene: Scene) -> Outcome | None:
    regions = [scene.region(item) for item in scene.objects]
    found = [k for k, region in enumerate(regions) if region == query.place]
    # An object whose region is unclear might be counted in by a person if it lies next to the region asked about.
    unclear = [item for region, item in zip(regions, scene.objects, strict=True) if not region]
    if len(found) != 1 or any(_near(scene, item, query.place) for item in unclear):
        return None
    return Outcome(getattr(scene.objects[found[0]], query.kind.removeprefix("at_")), (found[0],))


def _near(scene: Scene, item: Object, place: str) -> bool:
    """Whether an object close to a border of the thirds may be seen as lying in ``place``."""
    width, height = scene.size
    shifts = ((round(dx * width), round(dy * height)) for dx in (-0.06, 0, 0.06) for dy in (-0.06, 0, 0.06))
    moved = (replace(item, x=item.x + dx, y=item.y + dy) for dx, dy in shifts)
    return any(scene.region(other, margin=0) == place for other in moved)


def side(a: Object, b: Object, horizontal: bool) -> str:
    """Where ``a`` lies from ``b`` along one axis, or '' if their boxes overlap along it."""
    low, high = (0, 2) if horizontal else (1, 3)
    if a.box[high] <= b.box[low]:
        return "left" if horizontal else "above"
    if b.box[high] <= a.box[low]:
        return "right" if horizontal else "below"
    return ""


def _two(query: Query, scene: Scene) -> tuple[int, int] | None:
    found_a, found_b = query.a.matches(scene), query.b.matches(scene)
    if len(found_a) != 1 or len(found_b) != 1 or found_a == found_b:
        return None
    return found_a[0], found_b[0]


def _relation(query: Query, scene: Scene) -> Outcome | None:
    pair = _two(query, scene)
    if pair is None:
        return None
    a, b = (scene.objects[k] for k in pair)
    horizontal = query.kind == "relation_x" or query.place in ("left", "right")
    where = side(a, b, horizontal)
    if not where:
        return None
    if query.kind == "holds":
        return Outcome("yes" if where == query.place else "no", pair)
    return Outcome(where, pair)


def overlap(a: Object, b: Object) -> bool:
    """Whether one object clearly hides part of the other."""
    solid = a.shape in SOLID and b.shape in SOLID
    return solid and math.hypot(a.x - b.x, a.y - b.y) < 0.7 * (a.radius + b.radius)


def _front(query: Query, scene: Scene) -> Outcome | None:
    pair = _two(query, scene)
    if pair is None or not overlap(scene.objects[pair[0]], scene.objects[pair[1]]):
        return None
    return Outcome(f"the {query.a if pair[0] > pair[1] else query.b}", pair)


def _bigger(query: Query, scene: Scene) -> Outcome | None:
    pair = _two(query, scene)
    if pair is None:
        return None
    a, b = (scene.objects[k] for k in pair)
    if max(a.radius, b.radius) < 1.4 * min(a.radius, b.radius):
        return None
    return Outcome(f"the {query.a if a.radius > b.radius else query.b}", pair)


def _more(query: Query, scene: Scene) -> Outcome | None:
    found_a, found_b = query.a.matches(scene), query.b.matches(scene)
    if not found_a or not found_b or set(found_a) & set(found_b):
        return None
    more = query.a if len(found_a) > len(found_b) else query.b
    answer = SAME if len(found_a) == len(found_b) else plural(str(more))
    return Outcome(answer, (*found_a, *found_b))


def _extreme(query: Query, scene: Scene) -> Outcome | None:
    horizontal = query.place in ("leftmost", "rightmost")
    sign = 1 if query.place in ("leftmost", "topmost") else -1
    reach = [sign * (item.x if horizontal else item.y) for item in scene.objects]
    order = sorted(range(len(reach)), key=reach.__getitem__)
    gap = 0.07 * (scene.width if horizontal else scene.height)
    if len(order) < 2 or reach[order[1]] - reach[order[0]] < gap:
        return None
    return Outcome(getattr(scene.objects[order[0]], query.kind.removeprefix("extreme_")), (order[0],))


_EVALUATORS = {
    **dict.fromkeys(ATTRIBUTES, _attribute),
    "count": _count,
    "exist": _exist,
    "position": _position,
    "at_color": _at,
    "at_shape": _at,
    "relation_x": _relation,
    "relation_y": _relation,
    "holds": _relation,
    "front": _front,
    "bigger": _bigger,
    "more": _more,
    "extreme_color": _extreme,
    "extreme_shape": _extreme,
}


def evaluate(query: Query, scene: Scene) -> Outcome | None:
    """The answer to ``query`` in ``scene``, or None where it is not well posed."""
    return _EVALUATORS[query.kind](query, scene)
