"""Latent exchange as figures and tables, from its summary. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.parts import Shown
from realvr.widgets import Cell, Figures, Key, Table, Text, Widget, average, number, share, significant
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def drawn(results: Sequence[Shown]) -> list[Widget]:
    """Everything that the report shows of it."""
    shams = [Text(_sham(result)) for result in results]
    return [_figures(results), *_by_step(results), _table(results), *_between(results), *_parting(results), *shams]


_SERIES = (("contrast", "largest contrast"), ("random", "random positions"), ("full", "whole span"))


def _figures(results: Sequence[Shown]) -> Figures:
    """Lift and margin shift over k, one figure per model; the unrelated donor beside the whole span."""
    figures = []
    for key, words, unit in (
        ("donor_lift", "Donor-answer lift", "points"),
        ("margin_shift", "Donor-margin shift", "nats"),
    ):
        series = {result.name: _series(result.summary["rows"], key) for result in results}
        values = [p for drawn in series.values() for line in drawn for p in line.points]
        ends_of_axis = [0.0, *(end for p in values for end in (p.low, p.high) if end is not None)]
        for name, drawn in series.items():
            if not drawn:
                continue
            ends = "; ".join(
                f"{line.name} at k = {line.points[-1].x:.0f}: {number(line.points[-1].y, 2, sign=True)}"
                for line in drawn
            )
            alt = f"{name}: {words} in {unit} over the number k of replaced latents. {ends}."
            figures.append((f"{name}: {words}", lines(drawn, alt, "replaced latents k", unit, ends_of_axis)))
    keys = [Key(place, words, place == 1) for place, (_, words) in enumerate(_SERIES)] + [
        Key(3, "unrelated donor, whole span")
    ]
    return Figures("Latent exchange", figures, keys)


def _by_step(results: Sequence[Shown]) -> list[Widget]:
    """Lift over the step from which the latents are the donor's; from the first on, that is the whole span."""
    series = []
    for result in results:
        swaps = [row for row in result.summary["rows"] if row["condition"] == "swap"]
        if any("from_step" in row for row in swaps):
            chosen = [row for row in swaps if row["selector"] in ("full", "from-step")]
            steps = {row.get("from_step", 1): row["donor_lift"] for row in chosen}
            found = [(step, lift) for step, lift in sorted(steps.items()) if lift["mean"] is not None]
            points = [Point(step, lift["mean"], lift["low"], lift["high"]) for step, lift in found]
            series.append(Line(result.name, points, result.number))
    series = [line for line in series if line.points]
    if not series:
        return []
    spoken = "; ".join(
        f"{line.name} " + ", ".join(f"{number(p.y, 1, sign=True)} from step {p.x:.0f}" for p in line.points)
        for line in series
    )
    alt = f"Donor-answer lift in points by the step from which the latents are the donor's: {spoken}."
    chart = lines(series, alt, "donor's latents from step t on", "points", [0.0])
    keys = [Key(line.style, line.name) for line in series]
    return [Figures("Latents swapped from step t on", [("Donor-answer lift", chart)], keys)]


def _parting(results: Sequence[Shown]) -> list[Table]:
    """Where the data says at which step the two views part."""
    rows: list[list[Cell | str]] = [
        [result.name, f"{row['offset']:+d}" if row["offset"] else "0", str(row["answers"])]
        + [average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
        for result in results
        for row in result.summary.get("parting", ())
    ]
    header = ["arm", "t − step of parting", "answers", "donor-answer lift (points)", "donor-margin shift (nats)"]
    note = (
        "Before they part, both views walk the same cells, the last of which holds the arrow that was turned. Up to 0 "
        "every latent on another cell is the donor's; above 0 the first of them stay the recipient's."
    )
    return [Table("From step t on, counted from where the trails part", header, rows, note)] if rows else []


def _swapped(selector: str, row: Mapping[str, Any]) -> bool:
    return row["condition"] == "swap" and row["selector"] == selector


def _series(rows: Sequence[Any], key: str) -> list[Line]:
    def points(test: Callable[[Any], bool]) -> list[Point]:
        chosen = [row for row in rows if test(row) and row[key]["mean"] is not None]
        return [Point(row["k"], row[key]["mean"], row[key]["low"], row[key]["high"]) for row in chosen]

    made = [
        Line(
            words,
            points(partial(_swapped, selector)),
            place,
            place == 1,
        )
        for place, (selector, words) in enumerate(_SERIES)
    ]
    made.append(Line("unrelated donor", points(lambda row: row["condition"] == "unrelated"), 3))
    return [line for line in made if line.points]


_NAMES = {"contrast": "largest contrast", "random": "random", "full": "whole span"}


def _called(row: Mapping[str, Any]) -> str:
    """What the table calls a row."""
    if row["condition"] != "swap":
        return {"unrelated": "unrelated donor"}.get(row["condition"], str(row["condition"]))
    return f"from step {row['from_step']} on" if "from_step" in row else _NAMES.get(row["selector"], row["selector"])


def _table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for result in results:
        for row in result.summary["rows"]:
            cells = [average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
            shares = ("donor_frequency", "recipient_frequency", "parse_coverage")
            rows.append([result.name, _called(row), str(row["k"]), *cells, *(share(row[key]) for key in shares)])
    header = ["arm", "latents", "k", "donor-answer lift (points)", "donor-margin shift (nats)"]
    header += ["donor's answer, %", "own answer, %", "parsed, %"]
    note = "Lift and shift: bootstrap over pairs. The three shares treat directions and seeds as independent."
    return Table("Exchange", header, rows, note)


def _between(results: Sequence[Shown]) -> list[Table]:
    rows: list[list[Cell | str]] = [
        [result.name, str(row["k"]), average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
        for result in results
        for row in result.summary["contrast_minus_random"]
    ]
    header = ["arm", "k", "lift: contrast − random (points)", "shift: contrast − random (nats)"]
    return [Table("Positions of largest contrast against random ones, paired", header, rows)] if rows else []


def _sham(result: Shown) -> str:
    sham = result.summary["sham"]
    equal, largest = sham["equal_replies"], sham["largest_margin_difference"]
    text = f"{result.name}: {equal['count']} of {equal['of']} shams gave the reply of the unmodified span"
    return text + ("." if largest is None else f"; margins differ by at most {significant(largest, 2)} nats.")


# ---------------------------------------------------------------------- for print

_MARKS: dict[str, dict[str, Any]] = {
    "contrast": {"linestyle": "-"},
    "random": {"linestyle": ":", "mfc": "white"},
    "full": {"linestyle": "", "marker": "*", "markersize": 9},
    "unrelated": {"linestyle": "", "marker": "x", "markersize": 6},
}
_PRINTED = {
    "contrast": "largest contrast",
    "random": "random positions",
    "full": "whole span",
    "unrelated": "unrelated donor, whole span",
}


def figure(results: Sequence[Shown]) -> Figure | None:
    """(a) lift and (b) margin shift by k; (c) lift from step t on and (d) counted from the step at which the views
    part, where the data are ordered and steps were swapped."""
    from realvr.widgets import figures

    known = [one for one in results if one.summary["rows"]]
    if not known:
        return None
    stepped = [one for one in known if any("from_step" in row for row in one.summary["rows"])]
    parted = [one for one in stepped if one.summary.get("parting")]
    made, axes = figures.new(2 if stepped else 1, 2, height=4.9 if stepped else 2.7)
    for ax, letter, key, title, unit in (
        (axes[0][0], "a", "donor_lift", "Donor-answer lift", "points"),
        (axes[0][1], "b", "margin_shift", "Donor-margin shift", "nats"),
    ):
        figures.panel(ax, letter, title)
        for one in known:
            for name, line in _MARKS.items():
                _printed(ax, one, [(row["k"], row[key]) for row in one.summary["rows"] if _is(row, name)], line)
        ax.set(xlabel="replaced latents k", ylabel=unit)
        ax.axhline(0, color="#999999", linewidth=0.8)
    if stepped:
        _print_steps(axes[1][0], stepped)
        _print_parting(axes[1][1], parted)
    _legend(made, known)
    return made


def _is(row: Mapping[str, Any], name: str) -> bool:
    return row["condition"] == "unrelated" if name == "unrelated" else _swapped(name, row)


def _printed(ax: Axes, one: Shown, points: Sequence[tuple[float, Any]], line: Mapping[str, Any]) -> None:
    from realvr.widgets import figures

    known = [(x, found) for x, found in points if found["mean"] is not None]
    mean, low, high = ([found[end] for _, found in known] for end in ("mean", "low", "high"))
    if known:
        figures.curve(ax, [x for x, _ in known], mean, low, high, one.number, **line)


def _print_steps(ax: Axes, results: Sequence[Shown]) -> None:
    from realvr.widgets import figures

    figures.panel(ax, "c", "Donor's latents from step t on")
    for one in results:
        rows = [row for row in one.summary["rows"] if _swapped("full", row) or "from_step" in row]
        points = {row.get("from_step", 1): row["donor_lift"] for row in rows}
        _printed(ax, one, sorted(points.items()), {"linestyle": "-"})
    ax.set(xlabel="first replaced latent t", ylabel="donor-answer lift, points")
    ax.axhline(0, color="#999999", linewidth=0.8)


def _print_parting(ax: Axes, results: Sequence[Shown]) -> None:
    """What is expected: with every latent from the parting on replaced, the lift of the whole span."""
    from realvr.widgets import figures

    figures.panel(ax, "d", "Counted from where the views part")
    if not results:
        figures.empty(ax, "none: the data do not say where the views part")
        return
    for one in results:
        _printed(ax, one, [(row["offset"], row["donor_lift"]) for row in one.summary["parting"]], {"linestyle": "-"})
        whole = next((row["donor_lift"]["mean"] for row in one.summary["rows"] if _swapped("full", row)), None)
        if whole is not None:
            last = min(row["offset"] for row in one.summary["parting"])
            ax.plot([last, 0], [whole, whole], color=figures.color(one.number), linestyle="--", linewidth=0.9)
    ax.axvline(0, color="#999999", linewidth=0.8)
    ax.axhline(0, color="#999999", linewidth=0.8)
    ax.set(xlabel="t − step of parting (dashes: whole span)", ylabel="donor-answer lift, points")


def _legend(made: Figure, results: Sequence[Shown]) -> None:
    from matplotlib.lines import Line2D

    from realvr.widgets import figures

    handles = [Line2D([], [], color=figures.color(one.number), linewidth=4, label=one.name) for one in results]
    for name, line in _MARKS.items():
        style = {"marker": "o", "color": "#444444"} | dict(line)
        handles.append(Line2D([], [], label=_PRINTED[name], **style))
    made.legend(handles=handles, loc="outside upper center", ncols=4)
