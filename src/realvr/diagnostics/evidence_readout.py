"""Which latents look at the evidence, and which does the answer read? Layer by layer and step by step.

Estimators (fig:design-evidence-readout), for one question with free-running latents and its greedy answer:

(a) rho_{l,t} = s_l(M) / (E_B[s_l(B)] + eps) as in `enrichment`, with one query: the slot into which z_t is fed.
(b) attention of that query to all visual tokens, thumbnails included; mean over layers and heads.
(c) attention to each slot from the query that *predicts* the first content token of the answer, before that token is
    fed (``<|lvr_end|>`` where the reply starts with content); mean over layers and heads. `readout` and training take
    the content tokens' own positions instead.

Denominators: means over questions (of ratios in (a)); questions whose evidence leaves no window of its shape are left
out of (a) and counted, those with an empty reply are left out of (c).

Ours: where the boxes are a trail (two or more, in order), (a) is also measured against single boxes, every other token
being background: box t for z_t (``own``), and box t + 1 (``next``), which the query at slot t has to find, since it
becomes z_{t+1}. The last box stands for all further ones; ``next`` ends with it. Nothing of the picture is lost on the
way to a slot that looks at it, but a slot that does not look may have got its content from earlier ones: attention
says what is read there, not what is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from typing_extensions import override

from realvr.data.boxes import prompt_boxes, with_area
from realvr.data.sample import Box, Sample
from realvr.diagnostics import attention_results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.data import with_shown_boxes
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, ratio
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Fold, Key, Table, Widget, average, number
from realvr.widgets.browser import Bars, Panel, Series
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from realvr.diagnostics.measuring.looking import Look

TARGETS = {"evidence": "all evidence", "own": "box t", "next": "box t + 1"}
_STEPS = {"image": "attention on the picture", "read": "read by the first answer token"}


def boxes_of(sample: Sample, target: str, latents: int) -> list[list[Box] | None] | None:
    """The boxes that z_1 … z_K are compared with, as the prompt shows them; None where there is none for a latent, or
    where the order of the boxes means nothing."""
    boxes = with_area(prompt_boxes(sample))
    if target == "evidence":
        return [boxes] * latents
    if not sample.ordered or len(boxes) < 2:
        return None
    if target == "own":
        return [[boxes[min(t, len(boxes) - 1)]] for t in range(latents)]
    return [[boxes[t + 1]] if t + 1 < len(boxes) else None for t in range(latents)]


class EvidenceReadout(Diagnostic[DiagnosticSettings]):
    """Attention of single latents to the evidence, and of the answer's first token to single latents."""

    name = "evidence-readout"
    title = "Evidence into latents, latents into the answer"
    question = "Which latents look at the evidence, and which does the first answer token read?"
    reading = (
        "ρ by layer and latent: attention from the slot of z_t to the evidence over that to windows of the same shape; "
        "1 means no preference. Beside it, the share of attention that each latent pays to the whole picture, and the "
        "share that the query before the first answer token pays to each latent. Attention shows where something is "
        "read, not that it is used."
    )
    needs = Needs(boxes=True, span=True)
    paper = ""
    shape = attention_results.EvidenceReadout
    batch = 16
    order = 52
    examples = (100, 1000)
    highlights = (
        Highlight(
            "attention before the first answer token on the latents",
            lambda summary: average(summary["on_latents"], 3, False),
            overview=False,
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
            yield _record(one, model.latents)

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Maps over layers and latents, and numbers of each latent, with intervals over questions."""
        good = [record for record in records if record["error"] is None]
        latents = max((record["latents"] for record in good), default=0)
        maps = {name: _map([record[name] for record in good if name in record], latents) for name in TARGETS}
        return {
            "questions": len(good),
            "latents": latents,
            "skipped": dict(Counter(record["skipped"] for record in good if record["skipped"] is not None)),
            "maps": {name: found for name, found in maps.items() if found},
            "steps": [
                {
                    "step": t + 1,
                    **{name: mean([record[name][t] for record in good if record[name] is not None]) for name in _STEPS},
                }
                for t in range(latents)
            ],
            "on_latents": mean([sum(record["read"]) for record in good if record["read"] is not None]),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        return found + [f"{many} of {count} questions are not in the map: {why}" for why, many in _left_out(summary)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        widgets: list[Widget] = [_overall(results)]
        widgets += [_map_table(one, name) for one in results for name in one.summary["maps"]]
        widgets.append(Fold("Every latent", [_by_step(results)]))
        if not any(one.summary["questions"] for one in results):
            return widgets
        charts = [(f"{what.capitalize()}, by latent", _chart(results, name, what)) for name, what in _STEPS.items()]
        keys = [Key(one.number, one.name) for one in results]
        return [Figures("Latents and the answer", charts, keys, note="Bars: 95 % intervals over questions."), *widgets]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure:
        from realvr.widgets import figures

        names = [name for name in TARGETS if any(name in one.summary["maps"] for one in results)] or ["evidence"]
        columns = max(2, len(names))
        drawn, axes = figures.new(len(results) + 1, columns, width=max(7.0, 3.0 * columns))
        reach = max([1.0, *(abs(value) for one in results for row in _logs(one.summary, names) for value in row)])
        letters = (chr(ord("a") + place) for place in range(26))
        for one, row in zip(results, axes, strict=False):
            for name, ax in zip(names, row, strict=False):
                figures.panel(ax, next(letters, ""), f"{one.name}: ρ, {TARGETS[name]}")
                _heat(ax, one.summary, name, reach)
            for ax in row[len(names) :]:
                ax.remove()
        for place, ax in enumerate(axes[-1]):
            if place > 1:
                ax.remove()
                continue
            name, what = list(_STEPS.items())[place]
            figures.panel(ax, next(letters, ""), what)
            for one in results:
                steps = one.summary["steps"]
                middle, low, high = ([step[name][end] for step in steps] for end in ("mean", "low", "high"))
                figures.curve(ax, [step["step"] for step in steps], middle, low, high, one.number, one.name)
            ax.set_xlabel("latent")
            ax.set_ylabel("share of attention")
            ax.set_ylim(bottom=0)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.legend(loc="best")
        return drawn

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None or not record["latents"]:
            return None
        series = [
            Series(what, record[name], "share of attention")
            for name, what in _STEPS.items()
            if record[name] is not None
        ]
        for name, what in TARGETS.items():
            if name in record:
                ratios = [_mean([row[t] for row in record[name]["ratio"]]) for t in range(record["latents"])]
                series.append(Series(f"ρ, {what}", ratios, "ratio", "Mean over layers; 1 is no preference."))
        return Panel([Bars(series)])


def _record(one: Look, latents: int) -> Record:
    from realvr.diagnostics.measuring import looking

    record: Record = {
        "id": one.sample.id,
        "latents": latents,
        "correct": one.said.correct,
        "skipped": None,
        "image": looking.digits(one.latents_LKN.sum(-1).mean(0)),
        "read": None if one.predicting_LK is None else looking.digits(one.predicting_LK.mean(0)),
        "error": None,
    }
    for name in TARGETS:
        boxes = boxes_of(one.sample, name, latents)
        if boxes is None:
            continue
        regions = [None if own is None else looking.region(one.sample, one.grids, boxes=own) for own in boxes]
        if name == "evidence" and regions and regions[0] is not None:
            record["skipped"] = looking.why_not(regions[0])
        values = looking.measured_each(regions, one.latents_LKN)
        if values is not None:
            record[name] = {key: looking.digits(value) for key, value in values.items()}
    return record


# ---------------------------------------------------------------------- numbers


def _map(found: Sequence[dict[str, Any]], latents: int) -> list[list[dict[str, Any]]]:
    """A row for each layer, a cell for each latent; empty without a question."""
    layers = len(found[0]["ratio"]) if found else 0
    return [[_cell(found, layer, t) for t in range(latents)] for layer in range(layers)]


def _cell(found: Sequence[dict[str, Any]], layer: int, t: int) -> dict[str, Any]:
    known = [one for one in found if one["ratio"][layer][t] is not None]
    tops, bottoms = ([one[key][layer][t] for one in known] for key in ("target", "background"))
    return {
        "layer": layer + 1,
        "step": t + 1,
        "ratio": mean([one["ratio"][layer][t] for one in known]),
        "ratio_of_means": ratio(tops, bottoms),
        "target": mean(tops),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _left_out(summary: OwnSummary) -> list[tuple[str, int]]:
    return list(summary["skipped"].items())


def _highest(summary: OwnSummary, name: str) -> dict[str, Any] | None:
    cells = [cell for row in summary["maps"].get(name, []) for cell in row if cell["ratio"]["mean"] is not None]
    return max(cells, key=lambda cell: cell["ratio"]["mean"]) if cells else None


# ---------------------------------------------------------------------- tables and figures


def _overall(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        found = one.summary
        cells: list[Cell | str] = []
        for name in TARGETS:
            best = _highest(found, name)
            if best is None:
                cells.append(Cell(DASH))
                continue
            cell = average(best["ratio"], 2, False)
            where = f"{cell.below} layer {best['layer']}, z{best['step']}"
            cells.append(Cell(cell.text, where, cell.few, cell.value))
        left_out = sum(many for _, many in _left_out(found))
        asked = [one.name, str(found["questions"]), str(left_out), str(found["latents"])]
        rows.append([*asked, *cells, average(found["on_latents"], 3, False)])
    header = ["arm", "questions", "not in the map", "K", *(f"highest ρ, {what}" for what in TARGETS.values())]
    note = (
        "ρ: mean over questions of their ratios. On all latents: attention of the query before the first answer token."
    )
    return Table("Evidence into latents, latents into the answer", [*header, "on all latents"], rows, note)


def _map_table(one: Shown, name: str) -> Table:
    latents = range(1, one.summary["latents"] + 1)
    rows: list[list[Cell | str]] = [
        [f"layer {row[0]['layer']}", *(average(cell["ratio"], 2, False) for cell in row)]
        for row in one.summary["maps"][name]
    ]
    note = "Mean over questions of their ratios, with 95 % intervals; 1: no preference."
    return Table(f"{one.name}: ρ, {TARGETS[name]}", ["", *(f"z{t}" for t in latents)], rows, note)


def _by_step(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [one.name, f"z{step['step']}", *(average(step[name], 4, False) for name in _STEPS)]
        for one in results
        for step in one.summary["steps"]
    ]
    return Table("By latent", ["arm", "latent", *_STEPS.values()], rows, "Means over layers, heads and questions.")


def _chart(results: Sequence[Shown], name: str, what: str) -> Markup:
    drawn, spoken = [], []
    for one in results:
        known = [step for step in one.summary["steps"] if step[name]["mean"] is not None]
        points = [Point(step["step"], *(step[name][end] for end in ("mean", "low", "high"))) for step in known]
        drawn.append(Line(one.name, points, one.number))
        spoken.append(f"{one.name} " + ", ".join(f"z{point.x:g}: {number(point.y, 3)}" for point in points))
    return lines(drawn, f"{what} by latent: {'; '.join(spoken)}.", "latent", "share of attention", include=(0.0,))


def _logs(summary: OwnSummary, names: Sequence[str]) -> list[list[float]]:
    """log2 of the ratios of a model's maps, without those that have none."""
    rows = [row for name in names for row in summary["maps"].get(name, [])]
    return [[math.log2(max(cell["ratio"]["mean"], 2**-10)) for cell in row if cell["ratio"]["mean"]] for row in rows]


def _heat(ax: Axes, summary: OwnSummary, name: str, reach: float) -> None:
    """ρ by layer and latent, in colours of its logarithm, which all maps of a figure share."""
    from realvr.widgets import figures

    rows = summary["maps"].get(name, [])
    if not rows:
        figures.empty(ax)
        return
    ratios = [[cell["ratio"]["mean"] for cell in row] for row in rows]
    logs = [[None if value is None else math.log2(max(value, 2**-10)) for value in row] for row in ratios]
    names = [str(row[0]["layer"]) if len(rows) <= 12 or place % 4 == 0 else "" for place, row in enumerate(rows)]
    steps = [str(cell["step"]) for cell in rows[0]]
    image = figures.heatmap(ax, logs, names, steps, low=-reach, high=reach, middle=0.0, label="log₂ ρ")
    ax.set_xlabel("latent")
    ax.set_ylabel("layer")
    if len(rows) * len(steps) > 100:
        return
    for y, row in enumerate(ratios):
        for x, value in enumerate(row):
            shade = 0.5 if value is None else (math.log2(max(value, 2**-10)) + reach) / (2 * reach)
            dark = sum(image.cmap(shade)[:3]) < 1.5
            text = "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"
            ax.text(x, y, text, ha="center", va="center", color="white" if dark else "black", fontsize=6.5)
