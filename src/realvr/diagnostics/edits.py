"""Numbers per edit for print: flips as bars, distances as points with a broken axis. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.parts import Shown
from realvr.diagnostics.seeds import Arm, arms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BREAK = 10.0
"""An axis is broken where the largest values of two arms differ by more than this factor."""
Series = tuple[Arm, list[float | None], list[float | None], list[float | None]]
"""An arm with a value, a low and a high end for each edit: the interval, or ± one standard deviation over seeds."""


def words(edit: str) -> str:
    """The name of an edit as text."""
    return edit.replace("_", " ")


def edits_of(results: Sequence[Shown]) -> list[str]:
    """The edits of all models, in the order in which they come."""
    return list(dict.fromkeys(edit for one in results for edit in one.summary["edits"]))


def series(results: Sequence[Shown], edits: Sequence[str], key: str) -> list[Series]:
    """A number of each edit for every arm: rates as percentages, distances as they are."""
    made: list[Series] = []
    for arm in arms(results):
        values, low, high = zip(*(_value(arm, edit, key) for edit in edits), strict=True)
        made.append((arm, list(values), list(low), list(high)))
    return made


def _value(arm: Arm, edit: str, key: str) -> tuple[float | None, float | None, float | None]:
    """Value, low and high."""

    def number_of(summary: Mapping[str, Any], end: str = "") -> float | None:
        found = (summary.get("edits") or {}).get(edit, {}).get(key)
        if found is None:
            return None
        value = found[end or ("rate" if "rate" in found else "mean")]
        return 100 * value if value is not None and "rate" in found else value

    if len(arm.results) == 1:
        summary = arm.results[0].summary
        return number_of(summary), number_of(summary, "low"), number_of(summary, "high")
    found = arm.across(number_of)
    if found["mean"] is None or found["std"] is None:
        return found["mean"], None, None
    return found["mean"], found["mean"] - found["std"], found["mean"] + found["std"]


def flip_panel(ax: Axes, found: Sequence[Series], edits: Sequence[str]) -> None:
    """Percentages per edit, a bar for each arm."""
    from realvr.widgets import figures

    names = [words(edit) for edit in edits]
    bars = [(arm.label, values, low, high) for arm, values, low, high in found]
    figures.bars(ax, names, bars, [arm.number for arm, *_ in found], percent=True, tilt=15)


def legend(figure: Figure, *axes: Axes) -> None:
    """One legend above all panels, each name once."""
    named = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if named:
        figure.legend(list(named.values()), list(named), loc="outside upper right", ncols=min(4, len(named)))


def distance_panel(ax: Axes, found: Sequence[Series], edits: Sequence[str], letter: str, title: str) -> list[Axes]:
    """Distances per edit. The axis is broken where arms differ by more than a factor of `BREAK`; its one or two
    parts."""
    from realvr.widgets import figures

    known = [one for one in found if any(value is not None for value in one[1])]
    if not known:
        figures.panel(ax, letter, title)
        figures.empty(ax, "none: no model has a span" if "LVR" in title else "none")
        return [ax]
    groups = broken_groups([max(value for value in one[1] if value is not None) for one in known])
    places = [ax] if len(groups) == 1 else _split(ax)
    below = _limits(places, known, groups)
    _points(places[0], [known[index] for index in groups[0]], edits)
    if len(places) > 1:  # a model of the upper part may have small values too: these stand below the break
        _points(places[1], [_up_to(one, below) for one in known], edits)
    figures.panel(places[0], letter, title)
    places[-1].set_xticks(range(len(edits)), [words(edit) for edit in edits], rotation=15, ha="right")
    places[-1].set_ylabel("cosine distance")
    return places


def _points(ax: Axes, found: Sequence[Series], edits: Sequence[str]) -> None:
    from realvr.widgets import figures

    for arm, values, low, high in found:
        figures.curve(ax, range(len(edits)), values, number=arm.number, label=arm.label)
        for x, (value, bottom, top) in enumerate(zip(values, low, high, strict=True)):
            if value is not None and bottom is not None and top is not None:
                ax.vlines(x, bottom, top, color=figures.color(arm.number), linewidth=0.9)


def _limits(places: Sequence[Axes], known: Sequence[Series], groups: Sequence[Sequence[int]]) -> float:
    """The scale from zero to the largest value, or the two scales of a broken axis, which do not overlap; the end of
    the lower one."""

    def ends(which: Sequence[int]) -> list[float]:
        return [value for index in which for part in known[index][1:] for value in part if value is not None]

    below = max(ends(groups[-1])) * 1.15 or 1.0
    places[-1].set_ylim(0, below)
    if len(places) > 1:
        above = [value for value in ends(groups[0]) if value > below]
        margin = 0.1 * (max(above) - min(above) or max(above))
        places[0].set_ylim(max(below, min(above) - margin), max(above) + margin)
    return below


def _up_to(one: Series, end: float) -> Series:
    """Only the values up to an end."""
    arm, *parts = one
    kept = [value is not None and value <= end for value in parts[0]]
    low, middle, high = ([v if k else None for v, k in zip(part, kept, strict=True)] for part in parts)
    return arm, low, middle, high


def broken_groups(largest: Sequence[float]) -> list[list[int]]:
    """Indices of the arms above and below the break, those with the largest values first; all together where none
    differs by more than `BREAK` from the next."""
    order = sorted(range(len(largest)), key=lambda index: (-largest[index], index))
    gaps = [
        (math.inf if not largest[low] else largest[high] / largest[low]) if largest[high] else 1.0
        for high, low in zip(order, order[1:], strict=False)
    ]
    if not gaps or max(gaps) <= BREAK:
        return [sorted(order)]
    cut = gaps.index(max(gaps)) + 1
    return [sorted(order[:cut]), sorted(order[cut:])]


def _split(ax: Axes) -> list[Axes]:
    """Two axes in the place of one, with marks where the scale is broken; the upper first."""
    figure, spec = ax.figure, ax.get_subplotspec()
    assert spec is not None
    ax.remove()
    grid = spec.subgridspec(2, 1, hspace=0.06)
    upper, lower = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    upper.spines.bottom.set_visible(False)
    upper.tick_params(bottom=False, labelbottom=False)
    upper.set_xticks([])
    slash: dict[str, Any] = {
        "marker": [(-1, -0.6), (1, 0.6)],
        "markersize": 7,
        "linestyle": "none",
        "color": "k",
        "mew": 1,
    }
    upper.plot([0], [0], transform=upper.transAxes, clip_on=False, **slash)
    lower.plot([0], [1], transform=lower.transAxes, clip_on=False, **slash)
    return [upper, lower]
