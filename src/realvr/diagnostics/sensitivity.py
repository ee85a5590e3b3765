"""Counterfactual sensitivity (tab:diag-counterfactual, fig:lvr-counterfactual-diagnostic): do answers and latents move
when the picture is edited?

Both views of every pair are asked in a conversation of their own, greedily, after independent spans (the two-turn
protocol of tab:complete-counterfactual is diagnostic ``counterfactual``). For each edit, over its N pairs:

* should flip: |C| / N, the right answer changes;
* model flip: both answers parse and differ, over N;
* correct flip: the answer to the edited view is right, counted on C, over N (the paper's reading: "predictions that
  reach the edited ground-truth answer"; its values may exceed the model flip) and over |C|;
* LVR distance: 1 - cos between the latents' means over the K slots; final distance: between the states after the final
  norm from which the answer begins (`distances` has the definitions);
* ours: ``per_slot``, the mean over t of 1 - cos(z_t, z_t'), which pooling can hide (a walk in another order has the
  same mean); the distances to an unrelated picture, as the scale; and each distance of pairs whose answer flips minus
  that of pairs whose answer stays: a distance that says nothing about the answer has a difference of zero.

A pair that cannot be read counts as wrong and as no flip, and has no distance. The paper has 512 pairs per edit; all
pairs of the data are taken unless ``--limit`` says otherwise. Several seeds of one model (`seeds`) are one arm: mean ±
standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics import sensitivity_drawing
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.counterfactual_summary import numbers
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import controls, controls_line, difference, macro, mean
from realvr.diagnostics.pair_panels import sensitivity_panel
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.evaluation.published import published
from realvr.runs.journal import Record
from realvr.widgets import Cell, Table, Widget, number, share
from realvr.widgets.browser import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = {
    "should_flip": "should flip",
    "model_flip": "model flip",
    "correct_flip_of_all": "correct flip",
    "correct_flip_of_changed": "correct flip, of those that should",
    "strict_correct_flip": "strict flip, of those that should",
    "false_flip": "false flip, of those that should not",
}
DISTANCES = {
    "latent": "LVR distance",
    "latent_unrelated": "LVR, unrelated picture",
    "per_slot": "slot by slot",
    "final": "final distance",
    "final_unrelated": "final, unrelated picture",
}


class Edit(TypedDict):
    """The pairs of one edit. The rates are those of ``counterfactual`` in separate conversations."""

    pairs: int
    changed: int
    should_flip: shapes.Rate
    model_flip: shapes.Rate
    correct_flip_of_all: shapes.Rate
    correct_flip_of_changed: shapes.Rate
    strict_correct_flip: shapes.Rate
    false_flip: shapes.Rate
    parse_coverage: shapes.Rate
    latent: shapes.Mean
    latent_unrelated: shapes.Mean
    per_slot: shapes.Mean
    final: shapes.Mean
    final_unrelated: shapes.Mean
    flipped_minus_kept: dict[shapes.Text, shapes.Mean]


class Summary(TypedDict):
    """``sensitivity.json``."""

    latents: int
    edits: dict[shapes.Text, Edit]
    all: Edit
    macro: dict[shapes.Text, shapes.Rate]
    errors: int
    controls: NotRequired[shapes.Controls]
    settings: NotRequired[shapes.Settings]


class Sensitivity(Diagnostic[AnswerSettings]):
    """Flips and distances per edit, each picture in a conversation of its own."""

    name = "sensitivity"
    title = "Counterfactual sensitivity"
    question = "Do answers and latents move when the picture is edited?"
    reading = (
        "Should flip: the right answer changes. Model flip: the answer changes. Correct flip: the answer to the edited "
        "picture is right although it changed. Distances are cosine distances between both views; they mean little "
        "without the distance to an unrelated picture, and nothing for the answer unless flipped answers lie farther."
    )
    needs = Needs(pairs=True)
    paper = (
        "LVR flips 5.66 % (color change) to 13.09 % (object removal) of its answers where 81.45 % to 86.33 % should "
        "change, with LVR distances of 0.000158 to 0.000445 (tab:diag-counterfactual)"
    )
    Settings = AnswerSettings
    shape = Summary
    unit = "pairs"
    order = 15
    examples: ClassVar[tuple[int, int]] = (48, 512)
    highlights = (
        Highlight(
            "model flip, %",
            lambda summary: share(summary["macro"]["model_flip"], counts=False),
            "Model flip: another answer to the edited picture, each picture on its own (mean over edits).",
        ),
    )

    @override
    def prepare(self, model: Model, samples: Sequence[Pair]) -> None:
        self._controls = {pair.id: other for pair, other in zip(samples, unrelated(samples), strict=True)}

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.sensitivity import sensitivity_pairs

        others = [self._controls[pair.id] for pair in samples]
        return sensitivity_pairs(model, list(samples), others, self.settings.policy)

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        edits: dict[str, list[Record]] = {}
        for record in records:
            edits.setdefault(record["edit"], []).append(record)
        rows = {edit: _row(found) for edit, found in edits.items()}
        read = [record for record in records if record["error"] is None]
        return {
            "latents": max((record["latents"] for record in records), default=0),
            "edits": rows,
            "all": _row(records),
            "macro": {name: macro([row[name] for row in rows.values()]) for name in RATES},
            "errors": len(records) - len(read),
            "controls": controls(len(read), [r["no_control"] for r in read if r["no_control"]]),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        line = controls_line(summary.get("controls"))
        wrong = [
            line.replace("these are left out", "these count as wrong, and as no flip")
            for line in super().notes(records, summary, count)
        ]
        return [*wrong, *([line] if line else [])]

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        names = ("model_flip", "correct_flip_of_all")
        if summary is None:
            return dict.fromkeys(names)
        found = {name: summary["macro"][name] for name in names}
        return {name: {"rate": one["rate"], "ci": [one["low"], one["high"]]} for name, one in found.items()}

    @classmethod
    @override
    def paper_tables(cls) -> list[Table]:
        names = {
            "should_flip": ("should flip, %", 2),
            "model_flip": ("model flip, %", 2),
            "correct_flip": ("correct flip, %", 2),
            "latent_distance": ("LVR distance", 6),
            "final_distance": ("final distance", 6),
        }
        rows: list[list[Cell | str]] = [
            [row.method, row.row]
            + [Cell(number(row.values[key][0], n), value=row.values[key][0]) for key, (_, n) in names.items()]
            for row in published("diag-counterfactual")
        ]
        return [Table("Counterfactual sensitivity", ["method", "edit", *(words for words, _ in names.values())], rows)]

    @override
    def panel(self, record: Record) -> Panel | None:
        return sensitivity_panel(record)

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return sensitivity_drawing.drawn(results, RATES, DISTANCES)

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        return sensitivity_drawing.figure(results)


def _row(records: Sequence[Record]) -> dict[str, Any]:
    """Rates over all pairs; distances over those that have them."""
    found = numbers(records)
    flips = [_flips(record) for record in records]
    rates = (*RATES, "parse_coverage")

    def values(name: str, flipped: bool | None = None) -> list[float]:
        pairs = zip(records, flips, strict=True)
        return [r[name] for r, flip in pairs if r[name] is not None and flipped in (None, flip)]

    return {
        "pairs": found["pairs"],
        "changed": found["changed"],
        **{name: found[name] for name in rates},
        **{name: mean(values(name)) for name in DISTANCES},
        "flipped_minus_kept": {
            name: difference(values(name, True), values(name, False)) for name in ("latent", "per_slot", "final")
        },
    }


def _flips(record: Record) -> bool:
    return bool(numbers([record])["model_flip"]["count"])
