"""Figures of `realvr.diagnostics.saliency`: overlays and token-pair maps of the cases in the paper's order, and where
the scores lie."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from realvr.diagnostics.parts import Shown
from realvr.diagnostics.saliency_maps import GROUPS, KINDS, values
from realvr.widgets import figures as print_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Case = dict[str, Any]
Paint = Callable[["Axes", Case, str], None]
_COLUMNS = 8
"""Panels side by side."""
_WIDTH = 7.2
_TEXT = 0.62
"""Inches of a line of panels that headings and answers take."""
_SHORT = {"image": "image", "text": "text", "latents": "z", "reply": "reply"}


def figures(results: Sequence[Shown]) -> dict[str, Figure]:
    """``saliency`` (overlays), ``saliency-tokens`` (token pairs) and ``saliency-shares``; those with something to
    show."""
    rows = shared_cases(results)
    drawn: dict[str, Figure] = {}
    if any(case["maps"] is not None for row in rows for case in row):
        drawn[""] = _cases([row for row in rows if all(case["maps"] is not None for case in row)], results, _overlay)
    if any(case["pairs"] is not None for row in rows for case in row):
        drawn["tokens"] = _cases(rows, results, _tokens)
    if any(result.summary["questions"] for result in results):
        drawn["shares"] = _shares(results)
    return drawn


def shared_cases(results: Sequence[Shown]) -> list[list[Case]]:
    """Cases that every model has, in the order of the first; of each the cases of all models."""
    by_id = [{case["id"]: case for case in result.summary["cases"]} for result in results]
    return [[cases[name] for cases in by_id] for name in by_id[0] if all(name in cases for cases in by_id)]


def _cases(rows: Sequence[Sequence[Case]], results: Sequence[Shown], paint: Paint) -> Figure:
    """Every case with its panels: attention of each model, then saliency of each; as many side by side as fit."""
    order = [(kind, model) for kind in KINDS for model in range(len(results))]
    beside = max(1, min(_COLUMNS // len(order), len(rows)))
    lines, columns = -(-len(rows) // beside), len(order) * beside
    side = min(_WIDTH / columns, 1.2)
    figure, axes = print_figures.new(lines, columns, width=columns * side + 0.2, height=lines * (side + _TEXT))
    _place(figure, axes, side)
    for one in axes.flat:
        one.set_axis_off()
    for number, row in enumerate(rows):
        line, place = divmod(number, beside)
        own = axes[line][place * len(order) : (place + 1) * len(order)]
        for panel, (kind, model) in zip(own, order, strict=True):
            panel.set_axis_on()
            paint(panel, row[model], kind)
            name = f"{textwrap.shorten(results[model].name, 16, placeholder='…')}\n" if len(results) > 1 else ""
            panel.set_title(f"{name}{kind}", fontsize=5.5, fontweight="normal", loc="center", pad=2)
            panel.set_xlabel(_said(row[model]), fontsize=5.5, labelpad=2)
        above = 1.3 if len(results) > 1 else 1.18
        heading = _heading(number, row[0], round(16.5 * side * len(order)))
        own[0].text(0, above, heading, transform=own[0].transAxes, va="bottom", fontsize=5.5, fontweight="bold")
    return figure


def _place(figure: Figure, axes: np.ndarray, side: float) -> None:
    """Panels in squares of ``side`` inches, below their headings. These reach over several panels, for which an
    automatic layout finds no room."""
    across, down = figure.get_size_inches()
    figure.set_layout_engine("none")
    for (line, column), one in np.ndenumerate(axes):
        left, bottom = 0.18 + column * side, down - (line + 1) * (side + _TEXT) + 0.24
        one.set_position((left / across, bottom / down, (side - 0.14) / across, (side - 0.14) / down))


def _heading(number: int, case: Case, width: int) -> str:
    """Number and question, on two lines at most."""
    lines = textwrap.wrap(f"{number + 1:02d}  {case['question']}", width, max_lines=2, placeholder=" …")
    return "\n".join(lines)


def _said(case: Case) -> str:
    answer = case["answer"] if case["answer"] is not None else "unread"
    return f"{textwrap.shorten(str(answer), 18, placeholder='…')} ({'right' if case['correct'] else 'wrong'})"


def _overlay(axes: Axes, case: Case, kind: str) -> None:
    """The map over the grey picture, its boxes drawn in white on black; colours end at the panel's largest value."""
    from matplotlib.patches import Rectangle

    from realvr.imaging.processing import open_image

    shown = values(case["maps"][kind])[0]
    picture = open_image(base64.b64decode(case["picture"].split(",", 1)[1])).convert("L")
    width, height = picture.size
    extent = (0, width, height, 0)
    axes.imshow(np.asarray(picture), cmap="gray", vmin=0, vmax=255, extent=extent, interpolation="nearest")
    # Where there is little, the picture stays visible.
    axes.imshow(
        shown, cmap="inferno", vmin=0, vmax=1, extent=extent, alpha=0.35 + 0.45 * shown, interpolation="nearest"
    )
    for box in case["boxes"]:
        if box["image"] == case["shown"]:
            x0, y0, x1, y1 = (value * size for value, size in zip(box["xyxy"], (width, height) * 2, strict=True))
            for color, line in (("black", 1.4), ("white", 0.7)):
                axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=color, linewidth=line))
    _bare(axes)


def _tokens(axes: Axes, case: Case, kind: str) -> None:
    """Queries down, keys across; lines where the kind of token changes."""
    pairs = case["pairs"]
    if pairs is None:
        print_figures.empty(axes, case["no_pairs"])
        return
    # The cube root shows the many small pairs; 0 and the largest stay where they are.
    axes.imshow(np.cbrt(values(pairs[kind])[0]), cmap=print_figures.SEQUENTIAL, vmin=0, vmax=1, interpolation="nearest")
    groups = pairs["groups"]
    borders = [0, *(i for i in range(1, len(groups)) if groups[i] != groups[i - 1]), len(groups)]
    for border in borders[1:-1]:
        axes.axhline(border - 0.5, color="white", linewidth=0.3)
        axes.axvline(border - 0.5, color="white", linewidth=0.3)
    _bare(axes)
    named = [(a, b) for a, b in pairwise(borders) if (b - a) >= 0.07 * len(groups)]
    middle, names = [(a + b - 1) / 2 for a, b in named], [_SHORT[groups[a]] for a, _ in named]
    axes.set_yticks(middle, names, fontsize=4.5, rotation=90, va="center")
    axes.set_xticks(middle, names, fontsize=4.5)
    axes.tick_params(length=0, pad=1)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _shares(results: Sequence[Shown]) -> Figure:
    """(a) and (b): what attention and saliency lie on; (c) concentration on the evidence boxes by outcome."""
    figure, axes = print_figures.new(1, 3, width=7.4, height=2.5, width_ratios=(1, 1, 1.1))
    for place, kind in enumerate(KINDS):
        series = [
            _series(result.name, [result.summary["groups"]["all"][kind][name] for name in GROUPS], 100)
            for result in results
        ]
        print_figures.bars(axes[0][place], list(GROUPS), series, [result.number for result in results], percent=True)
        print_figures.panel(axes[0][place], "ab"[place], f"{kind} of the answer")
    _concentration(axes[0][2], results)
    if len(results) > 1:
        axes[0][0].legend()
    return figure


def _concentration(axes: Axes, results: Sequence[Shown]) -> None:
    names = [f"{kind},\n{outcome}" for kind in KINDS for outcome in ("correct", "incorrect")]
    series = []
    for result in results:
        groups = result.summary["groups"]
        found = [groups[outcome][kind]["concentration"] for kind in KINDS for outcome in ("correct", "incorrect")]
        series.append(_series(result.name, found))
    print_figures.panel(axes, "c", "evidence boxes: inside / area")
    if all(value is None for _, means, *_ in series for value in means):
        print_figures.empty(axes, "no evidence boxes")
        return
    print_figures.bars(axes, names, series, [result.number for result in results])
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")


def _series(
    name: str, found: Sequence[dict[str, Any]], times: float = 1
) -> tuple[str, list[float | None], list[float | None], list[float | None]]:
    """Means with their intervals, as `bars` wants them."""
    means, low, high = (
        [None if one[end] is None else times * one[end] for one in found] for end in ("mean", "low", "high")
    )
    return name, means, low, high
