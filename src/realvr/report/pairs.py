"""Sections made of pairs: counterfactual behaviour, distances, latent exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.diagnostics.counterfactual_summary import DISTANCES, RATES
from realvr.report.results import Arm, Json, Results
from realvr.widgets import (
    DASH,
    Cell,
    Figures,
    Key,
    Section,
    Switch,
    Table,
    Text,
    average,
    missing,
    number,
    share,
)
from realvr.widgets.charts import Bar, Line, Point, forest, lines

COUNTERFACTUAL = "realvr counterfactual MODEL PAIRS --out DIR"
EXCHANGE = "realvr exchange MODEL PAIRS --out DIR"
_PROTOCOLS = {
    "two-turn/keep": ("Two turns, span kept", "Both pictures in one conversation; the first reply's span stays in it."),
    "two-turn/drop": (
        "Two turns, span dropped",
        "Both pictures in one conversation; of the first reply only the text.",
    ),
    "separate": ("Separate", "Each picture in a conversation of its own."),
}
_RATES = dict(RATES) | {"original_accuracy": "A₀", "edited_accuracy": "A₁", "strict_correct_flip": "strict flip"}
_NO_SPAN = "two-turn/none"


# ---------------------------------------------------------------------- counterfactual


def counterfactual(results: Results) -> Section:
    section = Section("counterfactual", "Counterfactual pairs")
    arms = [arm for arm in results.arms if "counterfactual" in arm.diagnostics]
    panels = []
    for name, (label, explained) in _PROTOCOLS.items():
        found = _of_protocol(arms, name)
        if found:
            panels.append((f"protocol-{name.replace('/', '-')}", label, [Text(explained), *_protocol(name, found)]))
    if panels:
        section.widgets.append(
            Text(
                "Does the answer follow an edit of the picture? |C|: pairs whose right answer changes, |U|: the "
                "others. Over C: A₀ and A₁ (original and edited view right), change (another answer to the edited "
                "view), strict flip (both right). Over U: false flip (another answer although none is due)."
            )
        )
        section.widgets.append(Switch("Protocol", panels))
    else:
        section.widgets += missing(COUNTERFACTUAL)
    section.widgets += _distances(arms)
    return section


def _of_protocol(arms: Sequence[Arm], name: str) -> list[tuple[Arm, str, Json]]:
    """(arm, how it is called, its numbers); a model without a span has one two-turn protocol, which is in both."""
    found = []
    for arm in arms:
        result = arm.diagnostics["counterfactual"]
        protocols = result.summary["protocols"]
        if name in protocols:
            found.append((arm, arm.name, protocols[name]))
        elif name.startswith("two-turn") and _NO_SPAN in protocols:
            found.append((arm, f"{arm.name} (no span)", protocols[_NO_SPAN]))
    return found


def _protocol(name: str, found: Sequence[tuple[Arm, str, Json]]) -> list[Any]:
    rows: list[list[Cell | str]] = []
    bars: dict[str, list[Bar]] = {"strict_correct_flip": [], "false_flip": []}
    for arm, called, numbers in found:
        for edit, row in numbers["edits"].items():
            sizes = f"{row['changed']} / {row['unchanged']}"
            rows.append([called, _words(edit), sizes, *(share(row[key]) for key in _RATES)])
            for key, drawn in bars.items():
                if row[key]["rate"] is not None:
                    ends = (100 * row[key]["low"], 100 * row[key]["high"])
                    drawn.append(Bar(called, 100 * row[key]["rate"], *ends, arm.number, _words(edit)))
        sizes = f"{numbers['all']['changed']} / {numbers['all']['unchanged']}"
        macro = [share(numbers["macro"][key], counts=False) for key in _RATES]
        rows.append([called, "mean over edits", sizes, *macro])
    figures = []
    for key, words in (("strict_correct_flip", "Strict flip, % of C"), ("false_flip", "False flip, % of U")):
        if bars[key]:
            spoken = "; ".join(f"{bar.group}, {bar.name} {number(bar.value)}" for bar in bars[key])
            order = list(dict.fromkeys(bar.group for bar in bars[key]))
            drawn = sorted(bars[key], key=lambda bar: order.index(bar.group))
            alt = f"{words}, per edit and arm, with 95 % intervals: {spoken}."
            figures.append((words, forest(drawn, alt, "%")))
    header = ["arm", "edit", "|C| / |U|", *(f"{words}, %" for words in _RATES.values())]
    note = "Wilson intervals, counts behind them; a parse failure counts as wrong and as no change."
    label = _PROTOCOLS[name][0]
    return [Figures(f"{label}: flips", figures), Table(f"{label}: paired behaviour", header, rows, note)]


def _words(edit: str) -> str:
    return edit.replace("_", " ")


def _distances(arms: Sequence[Arm]) -> list[Any]:
    rows: list[list[Cell | str]] = []
    for arm in arms:
        result = arm.diagnostics["counterfactual"]
        for edit, row in (result.summary.get("distances") or {}).items():
            cells = [average(row[key], 5, sign=False) for key in DISTANCES]
            if any(cell.text != DASH for cell in cells):
                rows.append([arm.name, _words(edit), *cells])
    if not rows:
        return []
    header = ["arm", "edit", "latent", "latent, unrelated picture", "final", "final, unrelated picture"]
    note = (
        "Cosine distance from the original view, spans generated independently. Latent: between the means of the "
        "latents; final: between the states from which the answer begins. An edit's distance means little "
        "without the control beside it: the distance to an unrelated picture under the same question."
    )
    return [Table("How far an edit moves the span", header, rows, note)]


# ---------------------------------------------------------------------- exchange


def exchange(results: Results) -> Section:
    section = Section("exchange", "Latent exchange")
    arms = [arm for arm in results.arms if "exchange" in arm.diagnostics]
    if not arms:
        section.widgets += missing(EXCHANGE)
        return section
    section.widgets.append(
        Text(
            "Does the answer follow the latents while the picture stays? Selected latents are replaced by those of the "
            "other view of the pair, the donor. Lift: how much more often the donor's answer is given. Margin shift: "
            "how much its mean log-probability gains on the own answer's. All differences are from the sham, which "
            "puts back the recipient's own latents."
        )
    )
    section.widgets += [_figures(arms), _table(arms), *_between(arms)]
    section.widgets += [Text(_sham(arm)) for arm in arms]
    return section


_SERIES = (("contrast", "largest contrast"), ("random", "random positions"), ("full", "whole span"))


def _figures(arms: Sequence[Arm]) -> Figures:
    """Lift and margin shift over k, one figure per arm; the unrelated donor beside the whole span."""
    figures = []
    for key, words, unit in (
        ("donor_lift", "Donor-answer lift", "points"),
        ("margin_shift", "Donor-margin shift", "nats"),
    ):
        series = {}
        for arm in arms:
            series[arm.name] = _series(arm.diagnostics["exchange"].summary["rows"], key)
        values = [p for drawn in series.values() for line in drawn for p in line.points]
        ends_of_axis = [0.0, *(end for p in values for end in (p.low, p.high) if end is not None)]
        for arm in arms:
            drawn = series[arm.name]
            if not drawn:
                continue
            ends = "; ".join(
                f"{line.name} at k = {line.points[-1].x:.0f}: {number(line.points[-1].y, 2, sign=True)}"
                for line in drawn
            )
            alt = f"{arm.name}: {words} in {unit} over the number k of replaced latents. {ends}."
            figures.append((f"{arm.name}: {words}", lines(drawn, alt, "replaced latents k", unit, ends_of_axis)))
    keys = [Key(place, words, place == 1) for place, (_, words) in enumerate(_SERIES)] + [
        Key(3, "unrelated donor, whole span")
    ]
    return Figures("Latent exchange", figures, keys)


def _series(rows: Sequence[Json], key: str) -> list[Line]:
    def points(test: Any) -> list[Point]:
        found = [row for row in rows if test(row) and row[key]["mean"] is not None]
        return [Point(row["k"], row[key]["mean"], row[key]["low"], row[key]["high"]) for row in found]

    made = [
        Line(
            words,
            points(lambda row, s=selector: row["condition"] == "swap" and row["selector"] == s),
            place,
            place == 1,
        )
        for place, (selector, words) in enumerate(_SERIES)
    ]
    made.append(Line("unrelated donor", points(lambda row: row["condition"] == "unrelated"), 3))
    return [line for line in made if line.points]


_NAMES = {"contrast": "largest contrast", "random": "random", "full": "whole span"}


def _table(arms: Sequence[Arm]) -> Table:
    rows: list[list[Cell | str]] = []
    for arm in arms:
        for row in arm.diagnostics["exchange"].summary["rows"]:
            name = {"unrelated": "unrelated donor", "swap": _NAMES.get(row["selector"], row["selector"])}
            cells = [average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
            shares = ("donor_frequency", "recipient_frequency", "parse_coverage")
            called = name.get(row["condition"], row["condition"])
            rows.append([arm.name, called, str(row["k"]), *cells, *(share(row[key]) for key in shares)])
    header = ["arm", "latents", "k", "donor-answer lift (points)", "donor-margin shift (nats)"]
    header += ["donor's answer, %", "own answer, %", "parsed, %"]
    note = "Lift and shift: bootstrap over pairs. The three shares treat directions and seeds as independent."
    return Table("Exchange", header, rows, note)


def _between(arms: Sequence[Arm]) -> list[Table]:
    rows: list[list[Cell | str]] = []
    for arm in arms:
        for row in arm.diagnostics["exchange"].summary["contrast_minus_random"]:
            rows.append([arm.name, str(row["k"]), average(row["donor_lift"], 1), average(row["margin_shift"], 3)])
    header = ["arm", "k", "lift: contrast − random (points)", "shift: contrast − random (nats)"]
    return [Table("Positions of largest contrast against random ones, paired", header, rows)] if rows else []


def _sham(arm: Arm) -> str:
    found = arm.diagnostics["exchange"].summary["sham"]
    equal, largest = found["equal_replies"], found["largest_margin_difference"]
    text = f"{arm.name}: {equal['count']} of {equal['of']} shams gave the reply of the unmodified span"
    return text + ("." if largest is None else f"; margins differ by at most {_small(largest)} nats.")


def _small(value: float) -> str:
    """Two digits that no line break divides."""
    return f"{value:.2g}".replace("-", "\u2212")
