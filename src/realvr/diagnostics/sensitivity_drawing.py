"""Flips and distances per edit as tables and figures, from the summary of `sensitivity`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.edits import distance_panel, edits_of, flip_panel, legend, series, words
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.seeds import seeds_table
from realvr.widgets import Cell, Figures, Table, Widget, average, number, share
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def drawn(results: Sequence[Shown], rates: Mapping[str, str], distances: Mapping[str, str]) -> list[Widget]:
    """Everything that the report shows of it."""
    over = {
        f"{words_}, %": _macro(key)
        for key, words_ in rates.items()
        if key not in ("should_flip", "correct_flip_of_all")
    }
    seeds = seeds_table("Over training seeds, mean over edits", results, over)
    return [*_charts(results), _flips(results, rates), *_distances(results, distances), *_between(results), *seeds]


def _macro(key: str) -> Callable[[Any], float | None]:
    def value(summary: Mapping[str, Any]) -> float | None:
        rate: float | None = summary["macro"][key]["rate"]
        return None if rate is None else 100 * rate

    return value


def _rows(results: Sequence[Shown]) -> list[tuple[Shown, str, Any]]:
    return [
        (one, words(edit), row)
        for one in results
        for edit, row in {**one.summary["edits"], "all pairs": one.summary["all"]}.items()
    ]


def _flips(results: Sequence[Shown], rates: Mapping[str, str]) -> Table:
    rows: list[list[Cell | str]] = [
        [one.name, edit, str(row["pairs"]), *(share(row[key]) for key in rates)] for one, edit, row in _rows(results)
    ]
    note = "Wilson intervals. Each picture is asked on its own; a parse failure is wrong and no flip."
    return Table("Flips", ["arm", "edit", "pairs", *(f"{name}, %" for name in rates.values())], rows, note)


def _distances(results: Sequence[Shown], distances: Mapping[str, str]) -> list[Widget]:
    rows: list[list[Cell | str]] = [
        [one.name, edit, *(average(row[key], 5, sign=False) for key in distances)]
        for one, edit, row in _rows(results)
        if row["final"]["pairs"]
    ]
    note = "Cosine distances between the two views, spans generated independently; bootstrap intervals over pairs."
    return [Table("Distances", ["arm", "edit", *distances.values()], rows, note)] if rows else []


def _between(results: Sequence[Shown]) -> list[Widget]:
    names = {"latent": "LVR distance", "per_slot": "slot by slot", "final": "final distance"}
    rows: list[list[Cell | str]] = [
        [one.name, edit, *(average(row["flipped_minus_kept"][key], 5) for key in names)]
        for one, edit, row in _rows(results)
        if any(row["flipped_minus_kept"][key]["mean"] is not None for key in names)
    ]
    note = "Above zero, pairs whose answer flips lie farther apart. An edit where all flip, or none, has no difference."
    return (
        [Table("Distance where the answer flips minus where it stays", ["arm", "edit", *names.values()], rows, note)]
        if rows
        else []
    )


def _charts(results: Sequence[Shown]) -> list[Widget]:
    figures = []
    for key, name in (("model_flip", "Model flip, %"), ("correct_flip_of_all", "Correct flip, %")):
        bars = [
            Bar(
                one.name, 100 * row[key]["rate"], 100 * row[key]["low"], 100 * row[key]["high"], one.number, words(edit)
            )
            for one in results
            for edit, row in one.summary["edits"].items()
            if row[key]["rate"] is not None
        ]
        if bars:
            order = list(dict.fromkeys(bar.group for bar in bars))
            bars.sort(key=lambda bar: order.index(bar.group))
            spoken = "; ".join(f"{bar.group}, {bar.name} {number(bar.value)}" for bar in bars)
            figures.append((name, forest(bars, f"{name} per edit and arm, with 95 % intervals: {spoken}.", "%")))
    return [Figures("Flips per edit", figures)] if figures else []


# ---------------------------------------------------------------------- for print


def figure(results: Sequence[Shown]) -> Figure | None:
    """(a) model flips, (b) correct flips, (c) LVR distance, (d) final distance, per edit."""
    from realvr.widgets import figures

    edits = edits_of(results)
    if not edits:
        return None
    made, axes = figures.new(2, 2, height=4.6)
    flips = (("a", "model_flip", "Model flip"), ("b", "correct_flip_of_all", "Correct flip"))
    for ax, (letter, key, title) in zip(axes[0], flips, strict=True):
        figures.panel(ax, letter, title)
        flip_panel(ax, series(results, edits, key), edits)
        _should(ax, results, edits)
    legend(made, axes[0][0])
    distances = (("c", "latent", "LVR distance"), ("d", "final", "Final distance"))
    for ax, (letter, key, title) in zip(axes[1], distances, strict=True):
        distance_panel(ax, series(results, edits, key), edits, letter, title)
    return made


def _should(ax: Axes, results: Sequence[Shown], edits: Sequence[str]) -> None:
    """A line across each group: what should flip. The data decide it, so the first model that has the edit says it."""
    for place, edit in enumerate(edits):
        row = next(one.summary["edits"][edit] for one in results if edit in one.summary["edits"])
        rate = row["should_flip"]["rate"]
        if rate is not None:
            label = "should flip" if place == 0 else ""
            ax.hlines(100 * rate, place - 0.42, place + 0.42, color="black", linewidth=1.2, label=label)
