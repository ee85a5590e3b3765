"""Independent answers to the puzzles of the BLINK-like benchmark, from the scene descriptions alone (see `solver`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.world.scene import Object, Scene
from world_solver import Unsolvable


def solve_jigsaw(holed: Scene, candidates: Sequence[Scene]) -> int:
    """Which candidate agrees with the first picture on every object that reaches out of the gap (0 or 1)."""
    gap = next(mark.box for mark in holed.marks if mark.kind == "hole")

    def reaches_in_and_out(item: Object) -> bool:
        x0, y0, x1, y1 = item.x - item.radius, item.y - item.radius, item.x + item.radius, item.y + item.radius
        inside = x1 > gap[0] and y1 > gap[1] and x0 < gap[2] and y0 < gap[3]
        return inside and (x0 < gap[0] or y0 < gap[1])

    wanted = {item for item in holed.objects if reaches_in_and_out(item)}
    fitting = [k for k, scene in enumerate(candidates) if {i for i in scene.objects if reaches_in_and_out(i)} == wanted]
    if len(fitting) != 1 or not wanted:
        raise Unsolvable(f"{len(fitting)} candidates fit")
    return fitting[0]


def solve_pattern(scene: Scene) -> str:
    """Letter of the option that continues the row in every respect."""
    frames = sorted((mark.box for mark in scene.marks if mark.kind == "frame"), key=lambda box: (box[1], box[0]))
    seen = [_read(scene, frame) for frame in frames]
    row, offered = seen[:3], seen[3:]
    fitting = [
        k for k, panel in enumerate(offered) if all(_follows([p[i] for p in row], panel[i], i) for i in range(4))
    ]
    if len(fitting) != 1:
        raise Unsolvable(f"{len(fitting)} options continue the row")
    return "ABCD"[fitting[0]]


def _read(scene: Scene, frame: tuple[int, int, int, int]) -> tuple[str, str, int, int]:
    """Shape, color, number and heading (degrees) of what a frame holds."""
    x0, y0, x1, y1 = frame
    inside = [item for item in scene.objects if x0 < item.x < x1 and y0 < item.y < y1]
    return inside[0].shape, inside[0].color, len(inside), inside[0].rotation % 360


def _follows(values: list[Any], value: Any, which: int) -> bool:
    """Whether ``value`` continues three: all equal, every second equal, or an even step (numbers and headings)."""
    a, b, c = values
    if a == b == c:
        return bool(value == a)
    if a == c and which < 2:
        return bool(value == b)
    step = b - a
    if which == 2:
        return bool(c - b == step and value == c + step)
    return bool((c - b) % 360 == step % 360 and value == (c + step) % 360)
