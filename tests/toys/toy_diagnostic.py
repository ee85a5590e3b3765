"""A diagnostic from outside the package, all in this file: needs, a setting, records, summary, table and figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from realvr.diagnostics import Diagnostic, DiagnosticSettings, Highlight, Needs, Samples, Shown
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.widgets import Figures, Table, Widget, average
from realvr.widgets.charts import Bar, forest


class NormSettings(DiagnosticSettings):
    """Which norm."""

    power: float = Field(default=2.0, gt=0, description="The p of the p-norm.")


class SpanNorm(Diagnostic):
    """The length of a question's latents."""

    name = "span-norm"
    title = "Norm of the latents"
    question = "How long are the latents?"
    reading = "Mean over the K latents of a question, then over questions."
    needs = Needs(span=True)
    paper = ""
    Settings = NormSettings
    highlights = (Highlight("norm", lambda summary: average(summary["norm"], 2, sign=False)),)

    def measure(self, model: Model, samples: Samples) -> Iterable[dict[str, Any]]:
        reading = model.read(samples)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample, latents_KD in reading.spans():
            norms_K = latents_KD.double().norm(p=self.settings.power, dim=-1)
            yield {"id": sample.id, "norms": norms_K.tolist(), "error": None}

    def summarise(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        norms = [record["norms"] for record in records if record["error"] is None]
        return {"norm": mean([sum(one) / len(one) for one in norms])}

    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        cells = [average(result.summary["norm"], 4, sign=False) for result in results]
        rows = [[result.name, cell] for result, cell in zip(results, cells, strict=True)]
        bars = [Bar(result.name, result.summary["norm"]["mean"], None, None, result.number) for result in results]
        spoken = "; ".join(f"{result.name} {cell.text}" for result, cell in zip(results, cells, strict=True))
        figure = ("Mean norm", forest(bars, f"Mean norm of the latents: {spoken}.", ""))
        return [Figures("Norm of the latents", [figure]), Table("Norms", ["arm", "mean norm"], rows)]
