"""How close free-running latents are to the evidence, for any checkpoint: the margin g and the cosine to p⁺ of held-out
questions. Training reports both for ReaLVR only, and on its own prompts; here every model is measured on the same ones.

Estimator. ``p⁺ = Pool(V; a⁺)`` is the mean of the question's visual tokens that share some area with an evidence box
(`realvr.maths.evidence.pool`), ``p_m⁻`` that of another question on another picture. Of a free-running span

    cos = 1/K Σ_t cos(z_t, p⁺)        g = 1/K Σ_t [cos(z_t, p⁺) − max_m cos(z_t, p_m⁻)]

Denominators. The K latents of a question, then questions, with a bootstrap interval over questions; cosine and margin
have the same n. Boxes that cover no token stand for the whole picture (`realvr.data.boxes.evidence_masks`); a box on a
picture that is not shown makes its question an error, which is counted and left out.

Controls. The negatives: ``--negatives`` other questions, drawn by ``--seed`` and the sample's id from all samples of
the run, alike for every model; never the same picture, no picture twice. The hardest counts, so g falls with their
number: compare runs with the same one. ``oracle_margin`` puts p⁺ itself in the place of the latents: what a perfect
latent would have, far below 1 where pictures are alike.

Ours, where the paper is silent: it names g as a training signal and gives no value. Memory: one vector p of D numbers
in float32 is kept for every question of the run (14 KiB each at D = 3,584).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from realvr.data.boxes import unshown_box
from realvr.data.sample import Sample
from realvr.diagnostics import results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.errors import UserError
from realvr.runs.journal import Record
from realvr.widgets import Cell, Figures, Table, Widget, average, number
from realvr.widgets.browser import Facts, Panel
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realvr.backbone.types import Prompt

_NUMBERS = {"margin": "evidence margin g", "cos_positive": "cos to p⁺", "oracle_margin": "g of the evidence itself"}


class GroundingSettings(DiagnosticSettings):
    """What the evidence is compared with."""

    negatives: int = Field(default=16, ge=1, description="Prototypes of other questions; the hardest of them counts.")
    seed: int = Field(default=0, description="Fixes which other questions these are, alike for every model.")


class Grounding(Diagnostic[GroundingSettings]):
    """Latents against the mean visual token of the evidence boxes, and against those of other questions."""

    name = "grounding"
    title = "Latents against the evidence"
    question = "Are the latents closer to the evidence of their own question than to that of others?"
    reading = (
        "Cos to p⁺: cosine of a latent to the mean visual token of the evidence boxes, averaged over the K latents. "
        "Margin g: minus the cosine to the hardest of several prototypes of other questions; above zero, the own "
        "evidence is the closest. The g of the evidence itself is what a latent equal to p⁺ would reach."
    )
    needs = Needs(boxes=True, span=True)
    paper = ""
    Settings = GroundingSettings
    shape = results.Grounding
    batch = 32
    examples = (100, 1000)
    order = 40
    highlights = (
        Highlight(
            "evidence margin g",
            lambda summary: average(summary["margin"], 3, True),
            "Margin and cosine: over held-out questions where they were measured, else the mean of the last tenth of "
            "training, without an interval.",
            metric="evidence/margin",
        ),
        Highlight(
            "cos to p⁺", lambda summary: average(summary["cos_positive"], 3, False), metric="evidence/cos_positive"
        ),
    )

    def prepare(self, model: Model, samples: Sequence[Sample]) -> None:
        """Prototypes of all questions: each is drawn from the others."""
        import torch

        from realvr.latent.prototypes import prototypes

        self._prototypes: list[Any] = []
        self._places: dict[str, int] = {}
        readable = ((sample, _prompt(model, sample)) for sample in samples)
        usable = ((sample, prompt) for sample, prompt in readable if not isinstance(prompt, str))
        while part := list(islice(usable, self.batch)):  # prompts hold pixels: never those of all samples
            own, prompts = zip(*part, strict=True)
            with torch.no_grad():
                visual = model.backbone.encode_images([image for prompt in prompts for image in prompt.images])
            self._places |= {sample.id: len(self._prototypes) + place for place, sample in enumerate(own)}
            self._prototypes += prototypes(own, prompts, visual)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        import torch

        from realvr.latent.prototypes import pad, sample_negatives
        from realvr.maths import evidence

        unusable = [(sample, _prompt(model, sample)) for sample in samples if sample.id not in self._places]
        for sample, error in unusable:
            yield self.failed(sample, str(error))
        usable = [sample for sample in samples if sample.id in self._places]
        if not usable:
            return
        reading = model.read(usable)
        assert reading.latents_RKD is not None
        z_BKD = reading.latents_RKD.float().cpu()
        places = [self._places[sample.id] for sample in usable]
        positive_BD = torch.stack([self._prototypes[place].vector_D for place in places])
        count, seed = self.settings.negatives, self.settings.seed
        drawn = [
            sample_negatives(place, self._prototypes, [], count, seed, 0, sample.id)
            for place, sample in zip(places, usable, strict=True)
        ]
        negatives_BMD, valid_BM = pad(drawn, count, model.backbone.width)
        values = {
            "margin": evidence.margin(z_BKD, positive_BD, negatives_BMD, valid_BM).mean(-1),
            "cos_positive": evidence.similarity(z_BKD, positive_BD).mean(-1),
            "oracle_margin": evidence.margin(positive_BD[:, None], positive_BD, negatives_BMD, valid_BM)[:, 0],
        }
        for row, sample in enumerate(usable):
            numbers = {name: float(value_B[row]) for name, value_B in values.items()}
            yield {"id": sample.id, "latents": model.latents, "negatives": count, **numbers, "error": None}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Means over questions, each with a bootstrap interval, of the mean over the K latents."""
        good = [record for record in records if record["error"] is None]
        first = good[0] if good else {"latents": 0, "negatives": 0}
        return {
            "questions": len(good),
            "latents": first["latents"],
            "negatives": first["negatives"],
            **{name: mean([record[name] for record in good]) for name in _NUMBERS},
        }

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        called = {"evidence_margin": "margin", "cos_positive": "cos_positive", "oracle_margin": "oracle_margin"}
        if summary is None:
            return dict.fromkeys(called)
        values = {name: summary[key] for name, key in called.items()}
        return {
            name: {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}
            for name, one in values.items()
        }

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        note = (
            f"Means over the {record['latents']} latents; the hardest of {record['negatives']} other questions counts."
        )
        return Panel([Facts([[words, number(record[name], 3)] for name, words in _NUMBERS.items()])], note=note)

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        bars, spoken = [], []
        for result in results:
            found = result.summary
            cells = [average(found[name], 3, name != "cos_positive") for name in _NUMBERS]
            rows.append([result.name, str(found["questions"]), str(found["latents"]), *cells])
            margin = found["margin"]
            if margin["mean"] is not None:
                bars.append(Bar(result.name, margin["mean"], margin["low"], margin["high"], result.number))
                spoken.append(f"{result.name} {number(margin['mean'], 3, sign=True)}")
        header = ["arm", "questions", "K", *_NUMBERS.values()]
        note = "Means over questions with bootstrap intervals; other questions are drawn alike for every model."
        table = Table("Latents against the evidence", header, rows, note)
        if not bars:
            return [table]
        alt = f"Evidence margin g with 95 % intervals: {'; '.join(spoken)}."
        return [Figures("Evidence margin", [("Evidence margin g", forest(bars, alt, ""))]), table]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["questions"]]
        if not known:
            return None
        made, axes = figures.new(1, len(_NUMBERS), height=0.9 + 0.35 * len(known), sharey=True)
        for ax, letter, (key, words) in zip(axes[0], "abc", _NUMBERS.items(), strict=True):
            figures.panel(ax, letter, words)
            for row, one in enumerate(known):
                found, color = one.summary[key], figures.color(one.number)
                if found["mean"] is None:
                    ax.text(0, row, "none", va="center", color=color)
                    continue
                ends = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]]
                mark = figures.MARKERS[one.number % len(figures.MARKERS)]
                ax.errorbar([found["mean"]], [row], xerr=ends, fmt=mark, color=color, capsize=2)
                ax.annotate(
                    f"{found['mean']:.3f}", (found["mean"], row), (0, 6), textcoords="offset points", fontsize=7
                )
            ax.axvline(0, color="#999999", linewidth=0.8)
            ax.set_yticks(range(len(known)), [one.name for one in known])
            ax.set_ylim(len(known) - 0.5, -0.6)
            ax.grid(axis="x", visible=True)
        return made


def _prompt(model: Model, sample: Sample) -> Prompt | str:
    """The prompt, or why there is none."""
    problem = unshown_box(sample)
    if problem is not None:
        return f"{sample.source or sample.id}: {problem}"
    try:
        return model.prompt(sample)
    except UserError as error:
        return str(error)
