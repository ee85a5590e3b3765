"""Outlines of the shapes as polygons in a unit frame (x right, y down, radius about 1)."""

from __future__ import annotations

import math
from functools import lru_cache

Point = tuple[float, float]
Outline = tuple[Point, ...]


def _arc(radius: float, start: float, stop: float, steps: int, cx: float = 0.0, cy: float = 0.0) -> list[Point]:
    """Points on a circle from angle ``start`` to ``stop`` in degrees, clockwise as seen on screen."""
    angles = [math.radians(start + (stop - start) * k / steps) for k in range(steps + 1)]
    return [(cx + radius * math.cos(a), cy + radius * math.sin(a)) for a in angles]


def _star() -> list[Point]:
    points = []
    for k in range(10):
        radius = 1.12 if k % 2 == 0 else 0.47
        angle = math.radians(-90 + 36 * k)
        points.append((radius * math.cos(angle), radius * math.sin(angle) + 0.08))
    return points


def _heart() -> list[Point]:
    points = []
    for k in range(48):
        t = 2 * math.pi * k / 48
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 16.5, -(y + 2.5) / 16.5))
    return points


def _moon() -> list[Point]:
    """A crescent: a disc less a disc shifted to the right; the two circles meet at x = 0.4."""
    bite_x, bite_r = 0.55, 0.78
    x = (1 - bite_r**2 + bite_x**2) / (2 * bite_x)
    outer = math.degrees(math.acos(x))
    inner = math.degrees(math.atan2(math.sqrt(1 - x * x), x - bite_x))
    points = _arc(1.0, outer, 360 - outer, 40) + _arc(bite_r, 360 - inner, inner, 30, cx=bite_x)
    return [(px + 0.2, py) for px, py in points]


def _cross() -> list[Point]:
    w, r = 0.33, 0.98
    return [(-w, -r), (w, -r), (w, -w), (r, -w), (r, w), (w, w), (w, r), (-w, r), (-w, w), (-r, w), (-r, -w), (-w, -w)]


_ARROW = [(0.0, -1.05), (0.85, -0.1), (0.34, -0.1), (0.34, 1.0), (-0.34, 1.0), (-0.34, -0.1), (-0.85, -0.1)]

_THICK_ARROW = [(0.0, -1.0), (1.0, 0.1), (0.45, 0.1), (0.45, 1.0), (-0.45, 1.0), (-0.45, 0.1), (-1.0, 0.1)]

_THIN_ARROW = [(0.0, -1.0), (0.7, -0.2), (0.24, -0.2), (0.24, 1.0), (-0.24, 1.0), (-0.24, -0.2), (-0.7, -0.2)]
_CHEVRON = [(0.0, -1.0), (1.0, 0.2), (1.0, 1.0), (0.4, 1.0), (0.0, 0.4), (-0.4, 1.0), (-1.0, 1.0), (-1.0, 0.2)]


@lru_cache(maxsize=32)
def outline(shape: str) -> Outline:
    """Outer polygon of ``shape``; an arrow points up."""
    if shape in ("circle", "ring"):
        return tuple(_arc(0.95, 0, 352.5, 47))
    makers = {"star": _star, "heart": _heart, "moon": _moon, "cross": _cross}
    if shape in makers:
        return tuple(makers[shape]())
    fixed = {
        "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
        "triangle": [(0.0, -1.0), (1.0, 0.78), (-1.0, 0.78)],
        "hexagon": _arc(1.0, 0, 300, 5),
        "arrow": _ARROW,
        "thick arrow": _THICK_ARROW,
        "thin arrow": _THIN_ARROW,
        "pentagon": [(0.0, -1.0), (1.0, -0.1), (1.0, 1.0), (-1.0, 1.0), (-1.0, -0.1)],
        "chevron": _CHEVRON,
    }
    return tuple(fixed[shape])


@lru_cache(maxsize=32)
def hole(shape: str) -> Outline:
    """Inner polygon cut out of ``shape`` (empty for all but the ring)."""
    return tuple(_arc(0.45, 0, 352.5, 47)) if shape == "ring" else ()


def rotated(points: Outline, degrees: float, scale: float) -> list[Point]:
    """``points`` turned clockwise by ``degrees`` and scaled."""
    c, s = math.cos(math.radians(degrees)) * scale, math.sin(math.radians(degrees)) * scale
    return [(x * c - y * s, x * s + y * c) for x, y in points]


@lru_cache(maxsize=65536)
def extent(shape: str, radius: float, degrees: float) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of the turned outline around the object's centre, in pixels."""
    points = rotated(outline(shape), degrees, radius)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    return min(xs), min(ys), max(xs), max(ys)
