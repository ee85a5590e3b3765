"""Does the answer look at the evidence? Attention on the target region against windows of the same shape beside it.

Estimator (app:diag-target-region, fig:attention-ratio-look). For one question, layer l, and query positions J:

    s_l(R) = 1 / (|J| |H|) sum over j in J, heads h and tokens n of R of A_{j,n}^{(l,h)}
    rho_l  = s_l(M) / (E_B[s_l(B)] + eps)

J are the content positions of the *generated* greedy answer, at the tokens themselves, as the readout of training takes
them (`realvr.diagnostics.measuring.attending`); a reply without an answer block counts with all its tokens, and an
empty one is left out. M are the visual tokens of all evidence boxes. B runs over all translates of M on the token grid
that share no token with it (`realvr.maths.attention.background`); ``--windows box`` moves each box by itself instead.
Thumbnails of tiled images belong to neither. Several pictures: each has windows of its own, masses add up.

Denominators: a curve is the mean over questions of their ratios (mean of ratios), for questions answered right and
wrong apart; n is in every point. Questions whose evidence leaves no window are left out and counted, as are layers that
see neither region nor background. The mean of ratios is led by questions whose background gets next to nothing, so the
ratio of means, sum of s_l(M) over sum of E[s_l(B)], is beside it.

The paper's figure (Qwen2.5-VL-7B): near 1 in the lower layers, about 2 in the middle ones for ReaLVR, at most 1.6 for
Monet and 1.3 for LVR; right and wrong answers close together. It has no table.

Control: uniform attention gives 1. Ours: which windows, eps = 1e-8, the ratio of means, and the curve of the latents,
whose J are the slots of z_1 … z_K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup
from pydantic import Field
from typing_extensions import override

from realvr.diagnostics import attention_results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.data import with_shown_boxes
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, rate, ratio
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Fold, Key, Table, Widget, average, number, share
from realvr.widgets.browser import Map, Overlay, Panel
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realvr.diagnostics.measuring.looking import Look

GROUPS = {"correct": "right answers", "incorrect": "wrong answers", "latents_curve": "latents"}
_LOOKS = {"correct": ("#009E73", "-", "o"), "incorrect": ("#D55E00", "--", "s"), "latents_curve": ("#0072B2", ":", "^")}
"""Colour, line and marker of a group: green and red as in the paper, told apart without colour too."""


class EnrichmentSettings(DiagnosticSettings):
    """What the region is compared with."""

    windows: Literal["shape", "box"] = Field(
        default="shape", description="Background: the whole evidence moved elsewhere (shape), or each box by itself."
    )


class Enrichment(Diagnostic[EnrichmentSettings]):
    """Attention of generated answers and of latents to the evidence, layer by layer."""

    name = "enrichment"
    title = "Attention on the evidence"
    question = "Do the answer and the latents look at the evidence more than at other places of the same shape?"
    reading = (
        "ρ: attention from the generated answer's content tokens to the evidence, over that to windows of the same "
        "shape elsewhere in the picture; 1 means no preference. Mean over questions of their ratios, layer by layer. "
        "An answer that reads the latents need not look at the picture again, so ρ near 1 does not show that the "
        "evidence was not used."
    )
    needs = Needs(boxes=True)
    paper = (
        "near 1 in the lower layers and about 2 in the middle ones for ReaLVR, at most 1.6 for Monet and 1.3 for LVR; "
        "right and wrong answers close together (fig:attention-ratio-look)"
    )
    Settings = EnrichmentSettings
    shape = attention_results.Enrichment
    batch = 16
    order = 50
    examples = (100, 1000)
    highlights = (
        Highlight(
            "attention on the evidence ρ",
            lambda summary: average(summary["answers"], 2, False),
            "Attention on the evidence ρ: of the generated answers, against same-shape windows elsewhere, mean over "
            "layers; 1 is no preference.",
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.looking import look

        shown, hidden = with_shown_boxes(samples)
        looks, errors = look(model, shown)
        for sample, error in [*hidden, *errors]:
            yield self.failed(sample, error)
        for one in looks:
            yield self._record(one, model.latents, one.sample.id in samples.detailed)

    def _record(self, one: Look, latents: int, detailed: bool) -> Record:
        from realvr.diagnostics.measuring import looking

        found = looking.region(one.sample, one.grids, self.settings.windows == "box")
        record: Record = {
            "id": one.sample.id,
            "latents": latents,
            "correct": one.said.correct,
            "block": one.said.block,
            "extracted": one.said.extracted,
            "windows": found.windows,
            "skipped": looking.why_not(found) or (looking.NO_CONTENT if one.answer_LN is None else None),
            "error": None,
        }
        attention = {"answer": one.answer_LN, "latent": one.latents_LKN.mean(1) if latents else None}
        if record["skipped"] is None:
            for name, a_LN in attention.items():
                if a_LN is not None:
                    target, around, rho = found.measured(a_LN)
                    values = {"target": target, "background": around, "ratio": rho, "image": a_LN.sum(-1)}
                    record[name] = {key: looking.digits(value) for key, value in values.items()}
        if detailed:
            queries: list[tuple[int | str, Any]] = [(t + 1, one.latents_LKN[:, t]) for t in range(latents)]
            queries += [("answer", one.answer_LN)] if one.answer_LN is not None else []
            record["detail"] = [{"query": name, "maps": looking.maps(a, one.grids)} for name, a in queries]
        return record

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Curves over layers for right and wrong answers and for the latents, with what was left out."""
        good = [record for record in records if record["error"] is None]
        used = [record for record in good if record["skipped"] is None]
        chosen = {
            "correct": [record["answer"] for record in used if record["correct"]],
            "incorrect": [record["answer"] for record in used if not record["correct"]],
            "latents_curve": [record["latent"] for record in used if record["latents"]],
        }
        layers = max((len(record["answer"]["ratio"]) for record in used), default=0)
        return {
            "questions": len(used),
            "latents": max((record["latents"] for record in good), default=0),
            "windows": self.settings.windows,
            "skipped": dict(Counter(record["skipped"] for record in good if record["skipped"] is not None)),
            "unparsed": sum(not record["block"] for record in used),
            "accuracy": rate(sum(record["correct"] for record in used), len(used)),
            "answers": mean(over_layers([record["answer"]["ratio"] for record in used])),
            **{name: _group(values, layers) for name, values in chosen.items()},
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        found += [f"{many} of {count} questions left out: {why}" for why, many in summary["skipped"].items()]
        if summary["unparsed"]:
            found.append(f"{summary['unparsed']} replies have no answer block: all their tokens count as the answer")
        for name in ("correct", "incorrect"):
            if summary["questions"] and not summary[name]["questions"]:
                found.append(f"no question has {'a right' if name == 'correct' else 'a wrong'} answer: no such curve")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        if summary is None:
            return {"answer_enrichment": None}
        one = summary["answers"]
        return {"answer_enrichment": {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}}

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        widgets: list[Widget] = [_overall(results), Fold("Every layer", [_by_layer(results)])]
        charts = [
            (f"ρ of {what} by layer", _chart(results, group))
            for group, what in GROUPS.items()
            if any(one.summary[group]["questions"] for one in results)
        ]
        if not charts:
            return widgets
        keys = [Key(one.number, one.name) for one in results]
        note = "Mean over questions of their ratios; bars: 95 % intervals over questions. 1: no preference."
        return [Figures("Attention on the evidence", charts, keys, note=note), *widgets]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure:
        from matplotlib.ticker import NullLocator

        from realvr.widgets import figures

        drawn, axes = figures.new(1, len(results), width=max(3.6, 3.0 * len(results)), height=2.9, sharey=True)
        peak = 0.0
        for place, (one, ax) in enumerate(zip(results, axes[0], strict=True)):
            figures.panel(ax, chr(ord("a") + place), one.name)
            for group, what in GROUPS.items():
                found = one.summary[group]
                if not found["questions"]:
                    continue
                ratios = [layer["ratio"] for layer in found["layers"]]
                color, line, marker = _LOOKS[group]
                middle, low, high = ([value[end] for value in ratios] for end in ("mean", "low", "high"))
                x = [layer["layer"] for layer in found["layers"]]
                label = f"{what} (n = {found['questions']})"
                figures.curve(ax, x, middle, low, high, label=label, color=color, linestyle=line, marker=marker)
                peak = max([peak, *(value for value in middle if value is not None)])
            if not one.summary["questions"]:
                figures.empty(ax)
                continue
            ax.axhline(1.0, color="#666666", linewidth=0.8)
            ax.set_xlabel("layer")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.legend(loc="best")
        axes[0][0].set_ylabel("attention on the evidence ρ")
        if peak > 10:  # a band may reach 0: linear there
            axes[0][0].set_yscale("symlog", linthresh=2)
            marks = [0, 1, *(step * 10**power for power in range(7) for step in (2, 5, 10) if step * 10**power < peak)]
            axes[0][0].set_yticks(marks, [f"{mark:,}" for mark in marks], minor=False)
            axes[0][0].yaxis.set_minor_locator(NullLocator())
        return drawn

    @override
    def panel(self, record: Record) -> Panel | None:
        if not record.get("detail"):
            return None
        maps = [Map(one["query"], layer["layer"], layer["grids"]) for one in record["detail"] for layer in one["maps"]]
        about = "Mean over heads, of a latent at its slot or of the generated answer's content tokens."
        return Panel([Overlay("attention", maps, "share of attention", about)])


# ---------------------------------------------------------------------- numbers


def over_layers(ratios: Sequence[Sequence[float | None]]) -> list[float]:
    """Mean over the layers that have a ratio, question by question; a question without any is left out."""
    known = [[value for value in row if value is not None] for row in ratios]
    return [sum(row) / len(row) for row in known if row]


def _group(found: Sequence[dict[str, Any]], layers: int) -> dict[str, Any]:
    """The curve of some questions."""
    return {
        "questions": len(found),
        "ratio": mean(over_layers([one["ratio"] for one in found])),
        "layers": [
            {
                "layer": place + 1,
                "ratio": mean([one["ratio"][place] for one in found if one["ratio"][place] is not None]),
                "ratio_of_means": ratio(
                    [one["target"][place] for one in found], [one["background"][place] for one in found]
                ),
                **{key: mean([one[key][place] for one in found]) for key in ("target", "background", "image")},
            }
            for place in range(layers)
        ],
    }


# ---------------------------------------------------------------------- tables


def _peak(found: dict[str, Any]) -> Cell:
    """The layer with the largest ratio."""
    known = [layer for layer in found["layers"] if layer["ratio"]["mean"] is not None]
    if not known:
        return Cell(DASH)
    best = max(known, key=lambda layer: layer["ratio"]["mean"])
    cell = average(best["ratio"], 2, False)
    return Cell(cell.text, f"layer {best['layer']}", cell.few, cell.value)


def _overall(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        found = one.summary
        cells = [average(found[group]["ratio"], 2, False) for group in GROUPS]
        left_out = sum(found["skipped"].values())
        own = [share(found["accuracy"]), *cells, _peak(found["correct"]), _peak(found["latents_curve"])]
        rows.append([one.name, str(found["questions"]), str(left_out), *own])
    header = ["arm", "questions", "left out", "right, %", *(f"ρ, {what}" for what in GROUPS.values())]
    header += ["highest, right answers", "highest, latents"]
    note = "ρ: mean over layers, then over questions with bootstrap intervals; left out: no window, or an empty reply."
    return Table("Attention on the evidence", header, rows, note)


def _by_layer(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [
            one.name,
            what,
            str(layer["layer"]),
            average(layer["ratio"], 2, False),
            average(layer["ratio_of_means"], 2, False),
            *(average(layer[key], 4, False) for key in ("target", "background", "image")),
        ]
        for one in results
        for group, what in GROUPS.items()
        for layer in one.summary[group]["layers"]
    ]
    header = ["arm", "queries", "layer", "ρ", "ratio of means", "on the evidence", "on a window", "on the picture"]
    return Table("By layer", header, rows, "Shares of attention are means over questions, positions and heads.")


def _chart(results: Sequence[Shown], group: str) -> Markup:
    drawn, spoken = [], []
    for one in results:
        known = [layer for layer in one.summary[group]["layers"] if layer["ratio"]["mean"] is not None]
        points = [Point(layer["layer"], *(layer["ratio"][end] for end in ("mean", "low", "high"))) for layer in known]
        drawn.append(Line(one.name, points, one.number))
        spoken.append(f"{one.name} " + ", ".join(f"{point.x:g}: {number(point.y, 2)}" for point in points))
    return lines(drawn, f"ρ of {GROUPS[group]} by layer: {'; '.join(spoken)}.", "layer", "ρ", include=(1.0,))
