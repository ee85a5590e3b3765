"""How far an edit moves the latent span: cosine distances between independent single-turn spans.

For each pair: the original picture, the edited one, and, as the control that tells how much any other picture moves it,
the picture of an unrelated pair, all under the pair's question.

* ``latent`` ("LVR distance"): between the latents' means over the K slots.
* ``final`` ("final distance"): between the final hidden representations. The paper does not define the latter; here it
  is the hidden state after the final norm at ``<|lvr_end|>``, from which the first token of the answer is decoded (with
  K = 0: at the end of the prompt).

Distances are computed in float64, from states in the model's own number format: a distance near the rounding of
bfloat16 (eight bits) says nothing, so measure in float32 where distances are as small as the paper's for LVR.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual_figure import distances_figure
from realvr.diagnostics.counterfactual_summary import DISTANCES, summarise_distances
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import controls_line, macro_mean
from realvr.diagnostics.pair_panels import distances_panel
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.evaluation.published import published
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average, number
from realvr.widgets.browser import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Summary(TypedDict):
    """``distances.json``, and a part of ``counterfactual.json``."""

    distances: dict[shapes.Text, shapes.Distances] | None
    controls: NotRequired[shapes.Controls]
    settings: NotRequired[shapes.Settings]


class Distances(Diagnostic):
    """Cosine distances from the original view to the edited one and to an unrelated picture."""

    name = "distances"
    title = "Distances"
    question = "How far does an edit of the picture move the latent span?"
    reading = (
        "An edit's distance means little without the control beside it: the distance to an unrelated picture under the "
        "same question."
    )
    needs = Needs(pairs=True)
    paper = (
        "LVR distances of 0.000158 (color change) to 0.000445 (object removal), final distances of 0.004764 to "
        "0.022313 (tab:diag-counterfactual)"
    )
    shape = Summary
    unit = "pairs"
    examples = (24, 512)
    order = 20
    highlights = (
        Highlight(
            "latent distance of an edit",
            lambda summary: _over_edits(summary, "latent"),
            "Distances: cosine, mean over edits.",
            overview=False,
        ),
        Highlight(
            "final-state distance of an edit",
            lambda summary: _over_edits(summary, "final"),
            overview=False,
        ),
    )

    @override
    def prepare(self, model: Model, samples: Sequence[Pair]) -> None:
        self._controls = {pair.id: other for pair, other in zip(samples, unrelated(samples), strict=True)}

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.views import measure_distances, read_views

        controls = [self._controls[pair.id] for pair in samples]
        return measure_distances(read_views(model.backbone, list(samples), controls, model.latents))

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_distances(records)

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        line = controls_line(summary.get("controls"))
        return [*super().notes(records, summary, count), *([line] if line else [])]

    @classmethod
    def read(cls, folder: Path) -> tuple[Path, Any] | None:
        """Also from ``counterfactual.json``, which has them since there are any."""
        own = super().read(folder)
        if own is not None:
            return own
        from realvr.diagnostics.counterfactual import Counterfactual

        beside = Counterfactual.read(folder)
        return beside if beside is not None and beside[1].get("distances") else None

    @classmethod
    @override
    def paper_tables(cls) -> list[Table]:
        names = {"latent_distance": "latent distance", "final_distance": "final distance"}
        rows: list[list[Cell | str]] = [
            [row.method, row.row, *(Cell(number(row.values[name][0], 6), value=row.values[name][0]) for name in names)]
            for row in published("diag-counterfactual")
        ]
        return [Table("Distances", ["method", "edit", *names.values()], rows)]

    @override
    def panel(self, record: Record) -> Panel | None:
        return distances_panel(record)

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for result in results:
            for edit, row in (result.summary.get("distances") or {}).items():
                cells = [average(row[key], 5, sign=False) for key in DISTANCES]
                if any(cell.text != DASH for cell in cells):
                    rows.append([result.name, edit.replace("_", " "), *cells])
        if not rows:
            return []
        header = ["arm", "edit", "latent", "latent, unrelated picture", "final", "final, unrelated picture"]
        note = (
            "Cosine distance from the original view, spans generated independently. Latent: between the means of the "
            "latents; final: between the states from which the answer begins."
        )
        return [Table("How far an edit moves the span", header, rows, note)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        return distances_figure(results)


def _over_edits(summary: OwnSummary, name: str) -> Cell:
    found = [one[name] for one in (summary["distances"] or {}).values()]
    return average(macro_mean(found), 3, False)
