"""What a picture of the world shows: objects on a background, as plain data that can be hashed, saved and edited."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from realvr.world.shapes import extent
from realvr.world.words import DIRECTIONS, REGIONS

PixelBox = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels of the canvas (edges, so a single pixel has side 1)."""

BUCKETS = 32
"""Scenes fall into this many buckets by layout; splits own disjoint buckets (see `realvr.world.splits`)."""


def bucket_of(places: Iterable[tuple[int, int, str]]) -> int:
    """Bucket of a scene from the (column, row, color) of its objects.

    Only these, so that the sampler can reject a scene before building it; scenes of equal layout share them all.
    """
    return zlib.crc32(repr(sorted(places)).encode()) % BUCKETS


@dataclass(frozen=True)
class Object:
    """One thing in the picture. Positions are whole pixels, so that equal objects give equal pixels anywhere."""

    shape: str
    color: str
    x: int
    y: int
    radius: float
    size: str = ""
    """``small`` or ``large``; empty where sizes vary too smoothly to be named."""
    texture: str = "plain"
    rotation: int = 0
    """Degrees clockwise. An arrow's direction is the nearest quarter turn."""
    shade: float = 1.0
    """Multiplies the color; 1 everywhere but in the relative-brightness task."""

    @property
    def direction(self) -> str:
        """Where an arrow points; empty for other shapes."""
        return DIRECTIONS[round(self.rotation / 90) % 4] if self.shape.endswith("arrow") else ""

    @property
    def box(self) -> PixelBox:
        """Box of every pixel the outline reaches, hidden parts included, in whole pixels (not clipped to the canvas).

        Whole, because pixel formats such as Visual-CoT would round it; half a pixel of slack is for the smoothed edge.
        """
        left, top, right, bottom = extent(self.shape, self.radius, self.rotation)
        cx, cy = self.x + 0.5, self.y + 0.5
        low = math.floor(cx + left - 0.5), math.floor(cy + top - 0.5)
        return *low, math.ceil(cx + right + 0.5), math.ceil(cy + bottom + 0.5)


@dataclass(frozen=True)
class Background:
    """``seed`` fixes the pattern; ``base`` and ``accent`` are its two colors."""

    kind: str = "flat"
    base: tuple[int, int, int] = (225, 225, 220)
    accent: tuple[int, int, int] = (205, 208, 214)
    seed: int = 0


@dataclass(frozen=True)
class Mark:
    """Something drawn over the objects: a ``frame``, a ``letter`` (``text`` in a small plate) or a black ``hole``."""

    kind: str
    box: tuple[int, int, int, int]
    text: str = ""


@dataclass(frozen=True)
class Scene:
    """Objects in drawing order: a later one covers an earlier one."""

    width: int
    height: int
    objects: tuple[Object, ...]
    background: Background = Background()
    grid: tuple[int, int] = (3, 3)
    """Columns and rows of the layout the objects were placed on."""
    marks: tuple[Mark, ...] = ()
    vocabulary: str = "full"
    """``easy`` (8 colors, 8 shapes) or ``full``: what options may offer."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height

    def cell(self, item: Object) -> tuple[int, int]:
        """Column and row of the layout cell that holds an object's centre."""
        return item.x * self.grid[0] // self.width, item.y * self.grid[1] // self.height

    def region(self, item: Object, margin: float = 0.05) -> str:
        """Which ninth of the canvas the object lies in, or '' when its centre is too near a border to tell.

        ``margin`` is a fraction of the canvas.
        """
        fx, fy = (item.x + 0.5) / self.width, (item.y + 0.5) / self.height
        near = any(abs(f - third) < margin for f in (fx, fy) for third in (1 / 3, 2 / 3))
        return "" if near else REGIONS[min(int(fy * 3), 2) * 3 + min(int(fx * 3), 2)]

    def edit(self, index: int, **changes: Any) -> Scene:
        """The scene with one object's fields changed."""
        objects = list(self.objects)
        objects[index] = replace(objects[index], **changes)
        return replace(self, objects=tuple(objects))

    def without(self, index: int) -> Scene:
        """The scene with one object gone."""
        return replace(self, objects=self.objects[:index] + self.objects[index + 1 :])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `scene_from_dict` reads it back."""
        return asdict(self)

    def layout_key(self) -> str:
        """Hash of what is where, blind to jitter, background and drawing order: near-duplicates share it."""
        rows = sorted(
            f"{item.shape}/{item.color}/{item.size}/{item.texture}/{item.direction}/{item.shade:.3f}/{self.cell(item)}"
            for item in self.objects
        )
        text = f"{self.grid};" + ";".join(rows)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def bucket(self) -> int:
        """Which of the `BUCKETS` this scene falls into."""
        return bucket_of((*self.cell(item), item.color) for item in self.objects)

    def key(self) -> str:
        """Hash of the whole description: equal scenes draw equal pixels."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def scene_from_dict(value: dict[str, Any]) -> Scene:
    """Inverse of `Scene.to_dict` (also after a trip through JSON, which turns tuples into lists)."""
    background = dict(value["background"])
    for name in ("base", "accent"):
        background[name] = tuple(background[name])
    marks = tuple(Mark(mark["kind"], tuple(mark["box"]), mark["text"]) for mark in value["marks"])
    objects = tuple(Object(**item) for item in value["objects"])
    return Scene(
        value["width"],
        value["height"],
        objects,
        Background(**background),
        tuple(value["grid"]),
        marks,
        value["vocabulary"],
    )
