"""Fixed-context latent-token dependence (app:diag-latent-dependence): is the answer less likely without its latents?

For each question, the span is generated freely and recorded. One latent, or several, are replaced; the picture, the
question and all other latents stay as they were recorded, nothing is regenerated. The canonical formatted right answer
``Fmt(y*)``, in the form that the model was taught, is teacher-forced behind the span.

* ``u_t(z-bar) = log p(Fmt(y*) | x, z) - log p(Fmt(y*) | x, z with z_t replaced)`` (eq:slot_utility), over the entire
  answer sequence, the tags included: nats. Above zero, the answer was more likely with the latent.
* Probability by k: latents are ranked by the readout ``r_t(y*)`` of training (mean attention of the content tokens of
  the right answer over all layers, heads and positions; the first slot first among equals), and the k most read are
  replaced, k = 0 … K. Probability: exp(log p) of the whole formatted answer, averaged over questions
  (fig:accuracy-utility). Whole sequences of several tokens have small probabilities, so the probability per content
  token is given too: exp(mean log p over the content tokens), a geometric mean, ours.

Three replacements, ours: the mean of the position over the samples of the run (at most 256 of them, spread evenly; the
question's own latent is among them), the latent of another sample with other pictures, and Gaussian noise as long as
the latent. Controls: at k = 0 nothing is replaced; at k = K the order does not matter; a latent replaced by itself has
utility 0 exactly.

Denominators: every question that can be read, right or wrong. "Another" is missing where all questions show the same
picture or the donor cannot be read; n says so. Where evidence boxes are a trail (latent t belongs to box t, and all
further ones to the last), utilities are also given for the latents before the last box, for those on it, and for the
one on it where it is the only one.

What it does not say: a latent whose content another latent also holds has no utility of its own, though the answer
needs one of the two. Read u_t beside the probability at k = K. Log-probabilities of a bfloat16 model are coarse:
measure small utilities in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from realvr.data.sample import Sample
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.dependence_summary import Summary, probabilities, summarise_dependence
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown, Skip
from realvr.diagnostics.replacements import REPLACEMENTS
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Fold, Key, Table, Widget, average, number
from realvr.widgets.browser import Bars, Facts, Panel, Series
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DependenceSettings(DiagnosticSettings):
    """What the replacements are drawn by, and how questions are grouped."""

    seed: int = Field(default=0, description="Fixes the noise and whose latents each question gets.")
    by: str = Field(default="arrows", description="Tag whose values get rows of their own.")


class Dependence(Diagnostic[DependenceSettings]):
    """Latents replaced one at a time, and the most read of them together, under the right answer."""

    name = "dependence"
    title = "Dependence on the latents"
    question = "Is the right answer less likely once latents are replaced?"
    reading = (
        "u_t: nats that the whole formatted right answer loses when z_t alone is replaced and everything else stays as "
        "recorded. Probability by k: the k latents that the answer reads most are replaced. A flat line means that the "
        "answer does not need them. Two latents that hold the same have no utility each, and a drop together."
    )
    needs = Needs(span=True)
    paper = (
        "ReaLVR's probability of the right answer falls from 0.70 at k = 0 to 0.59 at k = 8, more than that of Monet "
        "and of both LVR variants (fig:accuracy-utility)"
    )
    Settings = DependenceSettings
    shape = Summary
    batch = 8
    order = 50
    examples = (64, 500)
    highlights = (
        Highlight(
            "drop of p(right answer) without latents",
            lambda summary: average(summary["replacements"]["position-mean"]["drop"], 3, False),
            "Drop: probability of the right answer minus that with all latents replaced by their position's mean.",
        ),
    )

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        if len(items) < 2:
            raise Skip(
                f"{data}: has {len(items)} question, and diagnostic {self.name} replaces latents by those of others: "
                "at least two are needed"
            )
        return list(items)

    @override
    def prepare(self, model: Model, samples: Sequence[Sample]) -> None:
        from realvr.diagnostics.measuring.replacing import Replacing

        self._replacing = Replacing(model, samples, seed=self.settings.seed, batch=self.batch)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.dependence import measure_dependence
        from realvr.diagnostics.measuring.forcing import without_answer

        silent = {sample.id: why for sample in samples if (why := without_answer(model.backbone, sample)) is not None}
        reading = model.read([sample for sample in samples if sample.id not in silent])
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample in samples:
            if sample.id in silent:
                yield self.failed(sample, silent[sample.id])
        for sample, found in measure_dependence(model, reading, self._replacing):
            about = {"latents": model.latents, "boxes": trail(sample), "group": sample.tags.get(self.settings.by, "")}
            yield {"id": sample.id, **about, **found, "error": None}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """See `dependence_summary`."""
        return summarise_dependence(records, self.settings.by)

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        names = {f"{name}_{kind.replace('-', '_')}": (name, kind) for kind in REPLACEMENTS for name in ("drop", "loss")}
        if summary is None:
            return {f"dependence_{key}": None for key in names}
        found = {key: summary["replacements"][kind][name] for key, (name, kind) in names.items()}
        return {
            f"dependence_{key}": {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}
            for key, one in found.items()
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        another = summary["replacements"]["another"]["questions"]
        if another < summary["questions"]:
            found.append(f"{summary['questions'] - another} of {summary['questions']} questions have no other sample")
        return found

    def table(self, summary: OwnSummary, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """What fits a terminal."""
        rows = []
        for kind, found in summary["replacements"].items():
            ends = [found["probability"][0], found["probability"][-1]] if found["probability"] else [mean([])] * 2
            cells = [*(average(one, 3, False) for one in ends), average(found["drop"], 3), average(found["loss"], 2)]
            best = _largest(found["utility"])
            rows.append([kind, str(found["questions"]), *(_line(cell) for cell in cells), best])
        return ["replaced by", "questions", "p at k = 0", "p at k = K", "drop", "loss, nats", "largest u_t"], rows

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        shown = [result for result in results if result.summary["questions"]]
        figures = [_figures(shown)] if shown else []
        widgets = [_by_k(results, "probability"), _by_latent(results)]
        if any(result.summary["groups"] for result in results):
            widgets.append(_by_group(results))
        return [*figures, *widgets, Fold("Probability per content token", [_by_k(results, "content_probability")])]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        figure, axes = figures.new(len(REPLACEMENTS), 2, height=1.9 * len(REPLACEMENTS))
        most = max((len(one.summary["readout"]) for one in results), default=0)
        letters = iter("abcdef")
        for place, kind in enumerate(REPLACEMENTS):
            left, right = axes[place]
            found = [one.summary["replacements"][kind] for one in results]
            figures.panel(left, next(letters), f"p(right answer), replaced by {kind}")
            figures.panel(right, next(letters), f"$u_t$ in nats, replaced by {kind}")
            if not any(one["questions"] for one in found):
                figures.empty(left)
                figures.empty(right)
                continue
            cells = [[*(one["mean"] for one in row["probability"])] for row in found]
            padded = [[*row, *[None] * (most + 1 - len(row))] for row in cells]
            names, ks = [one.name for one in results], [str(k) for k in range(most + 1)]
            figures.heatmap(left, padded, names, ks, low=0.0, high=1.0, digits=2)
            left.set_xlabel("k most read latents replaced")
            right.axhline(0, color="#888888", linewidth=0.8)
            for one, row in zip(results, found, strict=True):
                values, low, high = ([u[end] for u in row["utility"]] for end in ("mean", "low", "high"))
                figures.curve(right, range(1, len(values) + 1), values, low, high, one.number, one.name)
            right.set_xlabel("latent t")
            right.set_xticks(range(1, most + 1))
            if place == 0 and len(results) > 1:
                right.legend()
        return figure

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        about = "log p(right answer) minus that with this latent alone replaced"
        u = [
            Series(f"utility, {kind}", values, "nats", about)
            for kind, values in record["utility"].items()
            if values is not None
        ]
        read = Series("readout", record["readout"], "share of attention", "attention of the right answer to the latent")
        kinds = [kind for kind, top in record["top"].items() if top is not None]
        p = {kind: probabilities(record, kind, "loss") for kind in kinds}
        facts = [[kind, *(f"{p[kind][k]:.3f}" for k in (0, 1, -1))] for kind in kinds]
        header = ["p(right answer)", "as it is", "most read latent replaced", "all replaced"]
        return Panel([Bars([read]), Bars(u), Facts(facts, header)] if u else [Bars([read])])


def trail(sample: Sample) -> int | None:
    """Number of boxes of a trail, where latent t belongs to box t; None where the boxes have no order."""
    return len(sample.boxes) if sample.ordered and len(sample.boxes) > 1 else None


# ---------------------------------------------------------------------- tables


def _line(cell: Cell) -> str:
    return f"{cell.text} {cell.below}".strip()


def _largest(utility: Sequence[dict[str, Any]]) -> str:
    known = [(one["mean"], t) for t, one in enumerate(utility, 1) if one["mean"] is not None]
    if not known:
        return DASH
    value, t = max(known, key=lambda pair: (pair[0], -pair[1]))
    return f"z{t}: {number(value, 3, True)}"


def _by_k(results: Sequence[Shown], name: str) -> Table:
    most = max((result.summary["latents"] for result in results), default=0)
    rows: list[list[Cell | str]] = []
    drop = {"probability": "drop", "content_probability": "content_drop"}[name]
    for result in results:
        for kind, found in result.summary["replacements"].items():
            cells = [average(one, 3, False) for one in found[name]]
            cells += [Cell(DASH)] * (most + 1 - len(cells))
            rows.append([result.name, kind, str(found["questions"]), *cells, average(found[drop], 3)])
    of = "the whole formatted answer" if name == "probability" else "a content token (geometric mean over them)"
    note = f"Probability of {of}, mean over questions with bootstrap intervals; the k most read latents are replaced."
    header = ["arm", "replaced by", "questions", *(f"k = {k}" for k in range(most + 1)), "drop"]
    return Table("Probability of the right answer", header, rows, note)


def _by_latent(results: Sequence[Shown]) -> Table:
    most = max((result.summary["latents"] for result in results), default=0)
    rows: list[list[Cell | str]] = []

    def row(name: str, what: str, values: Sequence[dict[str, Any]], digits: int, *more: Cell | str) -> None:
        cells: list[Cell | str] = [average(one, digits, what != "readout") for one in values]
        rows.append([name, what, *cells, *[Cell(DASH)] * (most - len(cells)), *more])

    ends = {"before_last": "before the last box", "on_last": "on the last box", "only_last": "the only one on it"}
    for result in results:
        for kind, found in result.summary["replacements"].items():
            more = [
                *(average(found[name], 2) for name in ("summed", "loss")),
                *(average(found[name], 3) for name in ends),
            ]
            row(result.name, kind, found["utility"], 3, *more)
        row(result.name, "readout", result.summary["readout"], 4, *[Cell(DASH)] * 5)
    note = (
        "u_t in nats, one latent replaced; sum of these; all: all K replaced. Where boxes are a trail: mean u_t of "
        "latents before the last box, on it (where several are), and of the only one on it. Readout: attention of the "
        "right answer."
    )
    header = ["arm", "replaced by", *(f"z{t}" for t in range(1, most + 1)), "sum", "all", *ends.values()]
    return Table("Utility of each latent", header, rows, note)


def _by_group(results: Sequence[Shown]) -> Table:
    most = max((result.summary["latents"] for result in results), default=0)
    tag, rows = results[0].summary["by"], []
    for result in results:
        for group, found in result.summary["groups"].items():
            kind = next(iter(REPLACEMENTS))
            cells: list[Cell | str] = [average(one, 3) for one in found["utility"][kind]]
            cells += [Cell(DASH)] * (most - len(cells))
            rows.append([result.name, group or DASH, str(found["questions"]), *cells, average(found["loss"][kind], 2)])
    header = ["arm", tag, "questions", *(f"z{t}" for t in range(1, most + 1)), "all"]
    return Table(f"Utility by {tag}, latents replaced by their position's mean", header, rows, "u_t in nats.")


def _figures(results: Sequence[Shown]) -> Figures:
    pictures = []
    for kind in REPLACEMENTS:
        drawn, spoken = [], []
        for result in results:
            found = result.summary["replacements"][kind]["probability"]
            points = [Point(k, one["mean"], one["low"], one["high"]) for k, one in enumerate(found)]
            drawn.append(Line(result.name, points, result.number))
            spoken.append(f"{result.name} " + ", ".join(f"{p.x:g}: {number(p.y, 2)}" for p in points))
        if any(line.points for line in drawn):
            alt = f"Probability of the right answer by k, replaced by {kind}: {'; '.join(spoken)}."
            pictures.append((f"Replaced by {kind}", lines(drawn, alt, "k", "p(right answer)", include=(0.0, 1.0))))
    keys = [Key(result.number, result.name) for result in results]
    note = "Probability of the right answer with the k most read latents replaced. Bars: 95 % intervals over questions."
    return Figures("Dependence on the latents", pictures, keys, note=note)
