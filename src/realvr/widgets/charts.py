"""Small SVG figures, drawn by hand: they need no library, follow the page's colours and stay readable on a phone.

Every figure is 360 units wide, about as many as a phone has, so that text keeps its size. Colours are classes
(``c0`` … ``c7``) of the page's style sheet; series also differ in dash and marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 40
COLOURS = 8


@dataclass(frozen=True)
class Point:
    """A value with its interval, where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A series. ``style`` decides colour and marker, ``dashed`` the stroke, ``arm`` what a legend's button hides."""

    name: str
    points: Sequence[Point]
    style: int
    dashed: bool = False
    arm: int | None = None
    joined: bool = True


@dataclass(frozen=True)
class Bar:
    """A value with its interval, one row of a forest plot."""

    name: str
    value: float
    low: float | None
    high: float | None
    style: int
    group: str = ""


def lines(series: Sequence[Line], alt: str, x_label: str, y_label: str, include: Sequence[float] = ()) -> Markup:
    """Lines over a common x axis; points with an interval get whiskers. The y axis reaches the values ``include``."""
    points = [point for one in series for point in one.points]
    ys = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    y_ticks = ticks(min([*ys, *include]), max([*ys, *include]))
    whole = all(float(p.x).is_integer() for p in points)
    x_ticks = ticks(min(p.x for p in points), max(p.x for p in points), 5, tight=True, whole=whole)
    x_of = _scale(x_ticks[0], x_ticks[-1], LEFT + 12, WIDTH - RIGHT - 12)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = _axes(x_ticks, y_ticks, x_of, y_of, x_label, y_label)
    for place, one in enumerate(series):
        # Whiskers at the same x would hide each other: side by side.
        aside = 5 * (place - (len(series) - 1) / 2) if any(p.low is not None for p in points) else 0.0
        drawn = [(x_of(p.x) + aside, y_of(p.y)) for p in one.points]
        body = []
        if one.joined and len(drawn) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            body.append(f'<polyline class="line{" dashed" if one.dashed else ""}" points="{path}"/>')
        for point, (x, y) in zip(one.points, drawn, strict=True):
            if point.low is not None and point.high is not None:
                body.append(f'<path class="whisker" d="M{x:.1f} {y_of(point.low):.1f}V{y_of(point.high):.1f}"/>')
            if len(drawn) <= 24:
                body.append(_marker(x, y, one.style))
        arm = "" if one.arm is None else f' data-arm="{one.arm}"'
        parts.append(f'<g class="c{one.style % COLOURS}"{arm}><title>{escape(one.name)}</title>{"".join(body)}</g>')
    return _svg("".join(parts), HEIGHT, alt)


def forest(bars: Sequence[Bar], alt: str, x_label: str, zero: bool = True) -> Markup:
    """One row per value: a marker and its interval, rows of one group together under the group's name."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    row, head = 22, 20
    height = TOP + BOTTOM + row * len(bars) + head * sum(bool(name) for name in groups)
    values = [value for bar in bars for value in (bar.value, bar.low, bar.high) if value is not None]
    x_ticks = ticks(min([*values, 0.0] if zero else values), max([*values, 0.0] if zero else values), 5)
    left = min(146, 18 + 7 * max(len(_short(bar.name)) for bar in bars))
    x_of = _scale(x_ticks[0], x_ticks[-1], left, WIDTH - 22)
    bottom = height - BOTTOM
    parts = []
    for tick in x_ticks:
        x = x_of(tick)
        strong = " zero" if tick == 0 and x_ticks[0] < 0 else ""
        parts.append(f'<path class="rule{strong}" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{_tick(tick, x_ticks)}</text>')
    parts.append(
        f'<text x="{(left + WIDTH - 22) / 2:.0f}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    y = float(TOP)
    for name in groups:
        if name:
            y += head
            parts.append(f'<text class="strong" x="4" y="{y - 6:.1f}">{escape(name)}</text>')
        for bar in (one for one in bars if one.group == name):
            middle = y + row / 2
            parts.append(
                f'<text x="{left - 10:.0f}" y="{middle + 4:.1f}" text-anchor="end">{escape(_short(bar.name))}</text>'
            )
            whisker = ""
            if bar.low is not None and bar.high is not None:
                whisker = f'<path class="whisker" d="M{x_of(bar.low):.1f} {middle:.1f}H{x_of(bar.high):.1f}"/>'
            mark = _marker(x_of(bar.value), middle, bar.style)
            parts.append(f'<g class="c{bar.style % COLOURS}"><title>{escape(bar.name)}</title>{whisker}{mark}</g>')
            y += row
    return _svg("".join(parts), height, alt)


def swatch(style: int, dashed: bool = False) -> Markup:
    """The line and marker of a series, for a legend."""
    line = f'<path class="line{" dashed" if dashed else ""}" d="M1 8H27"/>'
    content = f'<g class="c{style % COLOURS}">{line}{_marker(14, 8, style)}</g>'
    return Markup(f'<svg class="swatch" viewBox="0 0 28 16" width="28" height="16" aria-hidden="true">{content}</svg>')


def ticks(low: float, high: float, most: int = 6, tight: bool = False, whole: bool = False) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``; ``tight`` keeps the ends, for an axis of steps."""
    if high - low < 1e-12:
        pad = abs(low) * 0.1 or 1.0
        low, high = (low, high + 1) if whole else (low - pad, high + pad)
    step = _nice((high - low) / max(most - 1, 1))
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    made = [round(i * step, 12) + 0.0 for i in range(first, last + 1)]
    if tight:  # the axis begins and ends with the data; a round number close to an end gives way to it
        inner = [tick for tick in made if low + 0.6 * step <= tick <= high - 0.6 * step]
        made = [low, *inner, high]
    return made


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step - 1e-12)


def _scale(low: float, high: float, first: float, last: float):  # type: ignore[no-untyped-def]
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _axes(x_ticks, y_ticks, x_of, y_of, x_label: str, y_label: str) -> list[str]:  # type: ignore[no-untyped-def]
    parts = []
    for tick in y_ticks:
        y = y_of(tick)
        strong = " zero" if tick == 0 and y_ticks[0] < 0 else ""
        parts.append(f'<path class="rule{strong}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick, y_ticks)}</text>')
    for place, tick in enumerate(x_ticks):
        anchor = "end" if place == len(x_ticks) - 1 and len(x_ticks) > 1 else "middle"
        x = x_of(tick) + (8 if anchor == "end" else 0)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{anchor}">{_tick(tick, x_ticks)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _tick(value: float, all_ticks: Sequence[float]) -> str:
    steps = [abs(b - a) for a, b in zip(all_ticks, all_ticks[1:], strict=False) if b != a]
    step = min(steps, default=1.0)
    if max(abs(tick) for tick in all_ticks) >= 1e5 or step < 1e-4:
        return f"{value:.2g}".replace("-", "\u2212")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    while digits < 5 and any(abs(round(tick, digits) - tick) > step * 0.02 for tick in all_ticks):
        digits += 1
    return f"{value:.{digits}f}".replace("-", "\u2212")


def _marker(x: float, y: float, style: int) -> str:
    shape = style % 4
    if shape == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>'
    if shape == 1:
        return f'<rect class="mark" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    if shape == 2:
        return f'<path class="mark" d="M{x:.1f} {y - 4.2:.1f}l4 7.4h-8z"/>'
    return f'<path class="mark" d="M{x:.1f} {y - 4.4:.1f}l4.4 4.4l-4.4 4.4l-4.4 -4.4z"/>'


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _svg(body: str, height: int, alt: str) -> Markup:
    label = escape(alt, quote=True)
    return Markup(f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{body}</svg>')
