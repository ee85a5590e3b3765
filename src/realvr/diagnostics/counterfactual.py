"""Counterfactual pairs (app:complete-counterfactual): does the answer follow an edit of the picture?

Protocols:

* ``two-turn``: the original picture with the question, the reply, then the edited picture with the same question, the
  first exchange in context. The paper does not say whether the first reply's latent span stays in context. ``keep``
  leaves it where it was produced; ``drop`` keeps the reply's text only. With K = 0 there is no span and one variant,
  ``none``.
* ``separate``: each picture in a conversation of its own.

The first turn is the same in all of them and is asked once. `counterfactual_summary` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from typing_extensions import override

from realvr.answers import POLICIES
from realvr.diagnostics import counterfactual_summary, results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual_figure import flips_figure
from realvr.diagnostics.counterfactual_summary import RATES, summarise_pairs
from realvr.diagnostics.distances import Distances
from realvr.diagnostics.edits import words
from realvr.diagnostics.model import Model
from realvr.diagnostics.pair_panels import counterfactual_panel
from realvr.diagnostics.pairs import Pair
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.seeds import seeds_table
from realvr.errors import UserError
from realvr.evaluation.published import published
from realvr.runs.journal import Record, read_records
from realvr.widgets import DASH, FEW_PAIRS, Cell, Figures, Switch, Table, Text, Widget, number, share, with_std
from realvr.widgets.browser import Panel
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Protocol = Literal["two-turn", "separate"]
FirstSpan = Literal["keep", "drop"]
Variant = tuple[str, str]
"""A protocol and what becomes of the first span: keep, drop or none."""

FLIP = "two-turn/keep"
"""The protocol whose flips stand for the whole."""
_NO_SPAN = "two-turn/none"
_PROTOCOLS = {
    "two-turn/keep": ("Two turns, span kept", "Both pictures in one conversation; the first reply's span stays in it."),
    "two-turn/drop": (
        "Two turns, span dropped",
        "Both pictures in one conversation; of the first reply only the text.",
    ),
    "separate": ("Separate", "Each picture in a conversation of its own."),
}
_RATES = dict(RATES) | {"original_accuracy": "A₀", "edited_accuracy": "A₁", "strict_correct_flip": "strict flip"}


class AnswerSettings(DiagnosticSettings):
    """Settings of a diagnostic that reads answers out of text."""

    policy: str = Field(default="strict", description=f"How answers are read out of text: {', '.join(POLICIES)}.")

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise UserError(f"--policy is '{policy}': choose one of {', '.join(POLICIES)}")
        return policy


class CounterfactualSettings(AnswerSettings):
    """How pairs are asked."""

    protocol: tuple[Protocol, ...] = Field(
        default=("two-turn", "separate"),
        description="two-turn asks about both pictures in one conversation (the paper), separate in two.",
    )
    first_span: tuple[FirstSpan, ...] = Field(
        default=("keep", "drop"),
        description="Whether the first reply's latent span stays in the context of the second turn (two-turn only).",
    )

    @field_validator("protocol", "first_span")
    @classmethod
    def _some(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value:
            raise UserError(f"--{str(info.field_name).replace('_', '-')} is empty: name at least one")
        return value

    def variants(self, latents: int) -> list[Variant]:
        """What every pair is asked under."""
        spans = self.first_span if latents else ("none",)
        chosen: list[Variant] = [("two-turn", span) for span in spans] if "two-turn" in self.protocol else []
        return [*chosen, ("separate", "none")] if "separate" in self.protocol else chosen


def _flip(name: str, pairs: str) -> Callable[[OwnSummary], Cell]:
    def cell(summary: OwnSummary) -> Cell:
        numbers = summary["protocols"].get(FLIP) or summary["protocols"].get(_NO_SPAN)
        if numbers is None:
            return Cell(DASH)
        found = share(numbers["macro"][name], counts=False)
        return Cell(found.text, found.below, numbers["all"][pairs] < FEW_PAIRS, found.value)

    return cell


class Counterfactual(Diagnostic[CounterfactualSettings]):
    """Both views of a pair are asked; the rates say how answers follow the edit."""

    name = "counterfactual"
    title = "Counterfactual pairs"
    question = "Does the answer follow an edit of the picture?"
    legend = counterfactual_summary.LEGEND
    reading = (
        "|C|: pairs whose right answer changes, |U|: the others. Over C: A₀ and A₁ (original and edited view right), "
        "change (another answer to the edited view), strict flip (both right). Over U: false flip (another answer "
        "although none is due)."
    )
    needs = Needs(pairs=True)
    paper = (
        "strict flips of 73.1 % (color change) to 68.3 % (spatial swap) for ReaLVR, 4.8 % to 5.1 % for LVR-RL and "
        "53.6 % to 49.4 % for Direct; false flips of 5.1 % to 6.5 % for ReaLVR (tab:complete-counterfactual)"
    )
    Settings = CounterfactualSettings
    shape = results.Counterfactual
    command = "realvr counterfactual MODEL PAIRS --out DIR"
    unit = "pairs"
    examples = (24, 512)
    order = 10
    highlights = (
        Highlight(
            "strict flip, %",
            _flip("strict_correct_flip", "changed"),
            "Strict flip: both views of an edited pair answered correctly (two turns, mean over edits).",
        ),
        Highlight("false flip, %", _flip("false_flip", "unchanged")),
    )

    @override
    def settle(self, model: Model) -> None:
        self._variants = self.settings.variants(model.latents)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.asking import ask_pairs

        missing = [v for v in self._variants if any((pair.id, *v) not in samples.done for pair in samples)]
        return ask_pairs(model.responder, list(samples), missing, model.latents, self.settings.policy)

    @override
    def key(self, record: Record) -> Hashable:
        return counterfactual_summary.record_key(record)

    @override
    def keys(self, item: Pair) -> Iterable[Hashable]:
        return [(item.id, *variant) for variant in self._variants]

    def fixed(self) -> dict[str, Any]:
        """Protocols are not among it: each record names its own, and others may be added."""
        return {"policy": self.settings.policy}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_pairs(records)

    def extend(self, summary: dict[str, Any], others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """With the distances of the same pairs, where they were measured."""
        moved = others.get(Distances.name)
        if moved is None and (folder / f"{Distances.name}.jsonl").exists():
            distances = Distances()
            moved = distances.summarise(read_records(folder / f"{Distances.name}.jsonl", distances.key))
        return summary | (moved or {})

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        errors = [(record["pair"], error) for record in records for error in record["errors"] if error is not None]
        if not errors:
            return []
        what = "count as wrong, and as no change"
        first = f"first: {errors[0][0]}: {errors[0][1]}"
        return [f"{len(dict(errors))} of {count} pairs cannot be read; these {what} ({first})"]

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        def rate(found: dict[str, Any]) -> dict[str, Any]:
            return {"rate": found["rate"], "ci": [found["low"], found["high"]]}

        names = ("strict_correct_flip", "false_flip")
        if summary is None:
            return dict.fromkeys(names)
        protocols = summary["protocols"].items()
        return {name: {called: rate(one["macro"][name]) for called, one in protocols} for name in names}

    # ------------------------------------------------------------------ tables and figures

    @override
    def table(self, summary: OwnSummary, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return counterfactual_summary.HEADER, counterfactual_summary.table_rows(summary)

    @override
    def markdown(self, summary: OwnSummary, name: str) -> str:
        return counterfactual_summary.report(summary, name)

    @override
    def csv_rows(self, summary: OwnSummary, name: str) -> list[dict[str, Any]]:
        return counterfactual_summary.csv_rows(summary)

    @classmethod
    @override
    def paper_tables(cls) -> list[Table]:
        names = {
            "original_accuracy": "A₀",
            "edited_accuracy": "A₁",
            "prediction_change": "change",
            "strict_paired_correct_flip": "strict flip",
            "false_flip": "false flip",
        }
        rows: list[list[Cell | str]] = []
        for row in published("complete-counterfactual"):
            sizes = f"{row.values['changed'][0]:.0f} / {row.values['unchanged'][0]:.0f}"
            rows.append([row.method, row.row, sizes, *(with_std(*row.values[name]) for name in names)])
        header = ["method", "edit", "|C| / |U|", *names.values()]
        return [Table("Paired counterfactual behaviour, %", header, rows)]

    @override
    def panels(self, records: Sequence[Record]) -> list[Panel | None]:
        return [counterfactual_panel(records)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        panels = []
        for name, (label, explained) in _PROTOCOLS.items():
            chosen = _of_protocol(results, name)
            if chosen:
                inside = [Text(explained), *_protocol(label, chosen)]
                panels.append((f"protocol-{name.replace('/', '-')}", label, inside))
        return [Switch("Protocol", panels)] if panels else []

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        protocols = [(label, _of_protocol(results, name)) for name, (label, _) in _PROTOCOLS.items()]
        return flips_figure(
            [(label, [Shown(one.name, numbers, one.number) for one, _, numbers in of]) for label, of in protocols]
        )


def _of_protocol(results: Sequence[Shown], name: str) -> list[tuple[Shown, str, Any]]:
    """(model, how it is called, its numbers); one without a span has one two-turn protocol, which is in both."""
    chosen = []
    for result in results:
        protocols = result.summary["protocols"]
        if name in protocols:
            chosen.append((result, result.name, protocols[name]))
        elif name.startswith("two-turn") and _NO_SPAN in protocols:
            chosen.append((result, f"{result.name} (no span)", protocols[_NO_SPAN]))
    return chosen


def _protocol(label: str, chosen: Sequence[tuple[Shown, str, Any]]) -> list[Widget]:
    rows: list[list[Cell | str]] = []
    bars: dict[str, list[Bar]] = {"strict_correct_flip": [], "false_flip": []}
    for result, called, numbers in chosen:
        for edit, row in numbers["edits"].items():
            sizes = f"{row['changed']} / {row['unchanged']}"
            rows.append([called, words(edit), sizes, *(share(row[key]) for key in _RATES)])
            for key, drawn in bars.items():
                if row[key]["rate"] is not None:
                    ends = (100 * row[key]["low"], 100 * row[key]["high"])
                    drawn.append(Bar(called, 100 * row[key]["rate"], *ends, result.number, words(edit)))
        sizes = f"{numbers['all']['changed']} / {numbers['all']['unchanged']}"
        macro = [share(numbers["macro"][key], counts=False) for key in _RATES]
        rows.append([called, "mean over edits", sizes, *macro])
    figures = []
    for key, name in (("strict_correct_flip", "Strict flip, % of C"), ("false_flip", "False flip, % of U")):
        if bars[key]:
            spoken = "; ".join(f"{bar.group}, {bar.name} {number(bar.value)}" for bar in bars[key])
            order = list(dict.fromkeys(bar.group for bar in bars[key]))
            drawn = sorted(bars[key], key=lambda bar: order.index(bar.group))
            alt = f"{name}, per edit and arm, with 95 % intervals: {spoken}."
            figures.append((name, forest(drawn, alt, "%")))
    header = ["arm", "edit", "|C| / |U|", *(f"{name}, %" for name in _RATES.values())]
    note = "Wilson intervals, counts behind them; a parse failure counts as wrong and as no change."
    columns = {f"{_RATES[key]}, %": _macro(key) for key in ("strict_correct_flip", "false_flip")}
    by_seed = [Shown(result.name, numbers, result.number) for result, _, numbers in chosen]
    seeds = seeds_table(f"{label}: mean over edits, over training seeds", by_seed, columns)
    return [Figures(f"{label}: flips", figures), Table(f"{label}: paired behaviour", header, rows, note), *seeds]


def _macro(key: str) -> Callable[[Any], float | None]:
    def value(numbers: Mapping[str, Any]) -> float | None:
        rate: float | None = numbers["macro"][key]["rate"]
        return None if rate is None else 100 * rate

    return value
