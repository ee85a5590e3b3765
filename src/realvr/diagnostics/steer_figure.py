"""Steering for print: shares by step and by distance, the moved latent beside its controls. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.parts import Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES: tuple[dict[str, Any], ...] = (
    {"linestyle": "-"},
    {"linestyle": "--", "mfc": "white"},
    {"linestyle": ":", "marker": "x"},
)
"""Of the conditions, in order: what is put, the sham, the random direction."""
Points = list[tuple[Any, Mapping[str, Any]]]
Curves = list[tuple[Shown, str, Points]]
"""(model, words of the condition, its points)."""


@dataclass(frozen=True)
class Panel:
    """One panel: curves of every model and condition."""

    title: str
    x_label: str
    curves: Curves
    y_label: str = "%"


def by_step(results: Sequence[Shown], value: Callable[[Any, str], Any], conditions: Mapping[str, str]) -> Curves:
    """A number of every step; a condition that a summary lacks has no curve."""
    made = []
    for one in results:
        for name, words in conditions.items():
            points: Points = []
            for step in one.summary["steps"]:
                try:
                    points.append((step["step"], value(step, name)))
                except KeyError:  # a folder of an earlier version
                    continue
            made.append((one, words, points))
    return made


def by_distance(results: Sequence[Shown], conditions: Mapping[str, str], measure: str = "") -> Curves:
    """The same by group of distances; ``measure`` names the number where a row has several."""
    made = []
    for one in results:
        rows = one.summary.get("distances", ())
        for name, words in conditions.items():
            made.append((one, words, [(distance_words(row), (row[measure] if measure else row)[name]) for row in rows]))
    return made


def distance_words(row: Mapping[str, Any]) -> str:
    """A group of distances as text."""
    return str(row["near"]) if row["near"] == row["far"] else f"{row['near']}–{row['far']}"


def conditions_figure(results: Sequence[Shown], panels: Sequence[Panel]) -> Figure | None:
    """Panels side by side; models by color, conditions by line. A panel without a number says so."""
    from realvr.widgets import figures

    if not any(_known(points) for panel in panels for *_, points in panel.curves):
        return None
    conditions = list(dict.fromkeys(words for panel in panels for _, words, _ in panel.curves))
    made, axes = figures.new(1, len(panels), height=2.9)
    for ax, letter, panel in zip(axes[0], "abcd", panels, strict=False):
        figures.panel(ax, letter, panel.title)
        curves = [(one, words, _known(points)) for one, words, points in panel.curves]
        if not any(points for *_, points in curves):
            figures.empty(ax)
            continue
        xs = list(dict.fromkeys(x for *_, points in curves for x, *_ in points))
        xs.sort(key=lambda x: int(str(x).split("–")[0]))
        for one, words, points in curves:
            if points:
                places, *ends = zip(*((xs.index(x), *three) for x, *three in points), strict=True)
                style = STYLES[conditions.index(words) % len(STYLES)]
                figures.curve(ax, places, ends[0], ends[1], ends[2], one.number, **style)
        ax.set_xticks(range(len(xs)), [str(x) for x in xs])
        ax.set(xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.y_label == "%":
            ax.set_ylim(-3, 105)
        else:
            ax.axhline(0, color="#999999", linewidth=0.8)
    _legend(made, results, conditions)
    return made


def _known(points: Points) -> list[tuple[Any, float, float, float]]:
    """Points with a value, as (x, value, low, high); rates as percentages."""
    found = []
    for x, one in points:
        value = one["rate"] if "rate" in one else one["mean"]
        if value is not None:
            scale = 100 if "rate" in one else 1
            found.append((x, scale * value, scale * one["low"], scale * one["high"]))
    return found


def _legend(made: Figure, results: Sequence[Shown], conditions: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    from realvr.widgets import figures

    handles = [Line2D([], [], color=figures.color(one.number), linewidth=4, label=one.name) for one in results]
    for place, words in enumerate(conditions):
        style = {"marker": "o", "color": "#444444"} | STYLES[place % len(STYLES)]
        handles.append(Line2D([], [], label=words, **style))
    made.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)))
