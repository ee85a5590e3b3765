"""Whether the latents walk through the evidence: is the visual token nearest to z_t in the t-th box? For any checkpoint
with a span, on data whose boxes are a trail, or any boxes at all.

Estimator (ours; the paper has no such number). ``n(t) = argmax_n cos(z_t, v_n)`` over the visual tokens v_n of the
question's pictures, thumbnails left out. M_1 … M_b are the visual tokens that share some area with each box; where the
order of boxes means nothing, M_1 is their union (b = 1). Of one question

    inside = 1/K Σ_t 1[n(t) ∈ M_min(t,b)]        evidence = 1/K Σ_t 1[n(t) ∈ M_1 ∪ … ∪ M_b]

``on_the_way`` averages over t ≤ b, ``at_the_end`` over t > b, ``whole`` is 1 where every latent is inside, ``cosine``
is the mean over t of the cosine of z_t to the mean token of M_min(t,b).

Denominators. Latents of a question, then questions, with bootstrap intervals over questions (Wilson for ``whole`` and
for single steps). A question with b ≥ K has no latent at the end and does not count there; one with b > K is counted
(``longer``): its last boxes have no latent. A question whose boxes cover no token, or are on a picture that is not
shown, is an error, counted and left out.

Controls. Chance is the share of visual tokens in the set, |M| / N: what a random token would reach. The verdict takes
``evidence_above_chance``, evidence minus chance of the same question. Chance knows nothing of where boxes lie; a latent
that always points at the middle of a picture may be above it, so compare models on the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from pydantic import Field
from typing_extensions import override

from realvr.data.boxes import unshown_box
from realvr.diagnostics import results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import by_number, mean, rate
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.errors import UserError
from realvr.runs.journal import Record
from realvr.widgets import DASH, FEW_PAIRS, Cell, Figures, Fold, Key, Table, Widget, average, interval, number, share
from realvr.widgets.browser import Bars, Panel, Series
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHANCE = 7
"""Color of the chance line."""


class WalkSettings(DiagnosticSettings):
    """How questions are grouped."""

    by: str = Field(default="arrows", description="Tag whose values get rows of their own.")


class Walk(Diagnostic[WalkSettings]):
    """Nearest visual tokens of z_1 … z_K against the boxes, step by step."""

    name = "walk"
    title = "The walk of the latents"
    question = "Is the visual token nearest to the t-th latent in the t-th evidence box?"
    reading = (
        "The last box stands for all further latents; where the order of the boxes means nothing, all of them count at "
        "every step. On the way: latents that have a box of their own; at the end: those on the repeated last one. "
        "Chance: the share if the nearest token were a random one of the pictures. Cosine: to the mean visual token of "
        "the box."
    )
    needs = Needs(boxes=True, span=True)
    paper = ""
    Settings = WalkSettings
    shape = results.Walk
    batch = 32
    examples = (100, 1000)
    order = 45
    highlights = (
        Highlight(
            "latents in their box",
            lambda summary: _percent(summary["inside"]),
            "Latents in their box: share of latents whose nearest visual token is in the t-th evidence box.",
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        import torch

        from realvr.diagnostics.measuring.walking import walk_record

        unshown = {sample.id: problem for sample in samples if (problem := unshown_box(sample)) is not None}
        reading = model.read([sample for sample in samples if sample.id not in unshown])
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample in samples:
            if sample.id in unshown:
                yield self.failed(sample, f"{sample.source or sample.id}: {unshown[sample.id]}")
        rows = zip(reading.spans(), reading.features(), reading.prompts, strict=True)
        for (sample, latents_KD), features, prompt in rows:
            try:
                grids = [image.grid for image in prompt.images]
                found = walk_record(sample, latents_KD, torch.cat(features), grids)
            except UserError as error:
                yield self.failed(sample, str(error))
                continue
            group = sample.tags.get(self.settings.by, "")
            yield {"id": sample.id, "latents": model.latents, "group": group, **found, "error": None}

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None or not record["latents"]:
            return None
        series = [
            Series("to its box", record["cosine"], "cosine", "Cosine of z_t with the mean visual token of its box."),
            Series(
                "to the nearest", record["nearest_cosine"], "cosine", "Cosine of z_t with its nearest visual token."
            ),
            Series("in its box", [int(value) for value in record["inside"]], "1: yes, 0: no"),
        ]
        return Panel([Bars(series)])

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Shares and cosines of each question, averaged over questions with bootstrap intervals."""
        good = [record for record in records if record["error"] is None]
        latents = max((record["latents"] for record in good), default=0)
        groups = sorted({record["group"] for record in good}, key=by_number)
        return {
            "latents": latents,
            "by": self.settings.by,
            "longer": sum(record["boxes"] > record["latents"] for record in good),
            **_numbers(good),
            "steps": [_step(good, t) for t in range(latents)],
            "groups": {
                group: _numbers([record for record in good if record["group"] == group])
                for group in groups
                if groups != [""]
            },
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["longer"]:
            which = f"{summary['longer']} of {summary['questions']} questions"
            found.append(f"{which} have more boxes than K = {summary['latents']}: their last boxes have no latent")
        if summary["thumbnail"]["mean"]:
            share_of = f"{100 * summary['thumbnail']['mean']:.1f} % of the latents"
            found.append(f"{share_of} are closer to a token of a thumbnail; the nearest of the tiles counts")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        called = {"walk_inside": "inside", "walk_cosine": "cosine"}
        if summary is None:
            return dict.fromkeys(called)
        values = {name: summary[key] for name, key in called.items()}
        return {
            name: {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}
            for name, one in values.items()
        }

    def table(self, summary: OwnSummary, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """What fits a terminal."""
        names = ("inside", "on_the_way", "whole", "chance", "cosine")
        cells = [f"{cell.text} {cell.below}".strip() for cell in _cells(summary, names)]
        header = ["arm", "questions", "K", *(_OVERALL[one][0] for one in names)]
        return header, [[name, str(summary["questions"]), str(summary["latents"]), *cells]]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        widgets: list[Widget] = [_overall(results)]
        if any(result.summary["groups"] for result in results):
            widgets.append(_by_group(results))
        widgets.append(Fold("Every latent", [_by_step(results)]))
        figures = _figures([result for result in results if result.summary["questions"]])
        return [*([figures] if figures is not None else []), *widgets]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        return _printed([one for one in results if one.summary["questions"]])


# ---------------------------------------------------------------------- numbers


def _numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Means over questions of the share (or mean) over their latents."""

    def over(name: str, which: Callable[[Record, int], bool] = lambda record, t: True) -> dict[str, Any]:
        chosen = [[value for t, value in enumerate(record[name]) if which(record, t)] for record in records]
        return mean([math.fsum(values) / len(values) for values in chosen if values])

    whole = [all(record["inside"]) for record in records]
    above = [
        math.fsum(record["evidence"]) / len(record["evidence"]) - record["chance_evidence"]
        for record in records
        if record["evidence"]
    ]
    return {
        "questions": len(records),
        "inside": over("inside"),
        "on_the_way": over("inside", lambda record, t: t < record["boxes"]),
        "at_the_end": over("inside", lambda record, t: t >= record["boxes"]),
        "whole": rate(sum(whole), len(whole)),
        "evidence": over("evidence"),
        "chance": over("chance"),
        "chance_evidence": mean([record["chance_evidence"] for record in records]),
        "evidence_above_chance": mean(above),
        "cosine": over("cosine"),
        "nearest_cosine": over("nearest_cosine"),
        "thumbnail": over("thumbnail"),
    }


def _step(records: Sequence[Record], t: int) -> dict[str, Any]:
    """One latent: a question is in its box or not, so these shares are counts."""
    reached = [record for record in records if t < record["latents"]]
    counts = {name: rate(sum(record[name][t] for record in reached), len(reached)) for name in ("inside", "evidence")}
    means = {name: mean([record[name][t] for record in reached]) for name in ("chance", "cosine", "nearest_cosine")}
    return {"step": t + 1, **counts, **means}


# ---------------------------------------------------------------------- tables and figures


def _percent(found: dict[str, Any]) -> Cell:
    """A mean of shares, or a rate, as a percentage with its interval."""
    if "rate" in found:
        return share(found)
    if found["mean"] is None:
        return Cell(DASH)
    below = interval((100 * found["low"], 100 * found["high"]))
    return Cell(number(100 * found["mean"]), below, found["pairs"] < FEW_PAIRS, 100 * found["mean"])


def _plain(found: dict[str, Any]) -> Cell:
    """The mean alone: chance is known, not estimated."""
    return Cell(DASH) if found["mean"] is None else Cell(number(100 * found["mean"]), value=100 * found["mean"])


_OVERALL: dict[str, tuple[str, Callable[[dict[str, Any]], Cell]]] = {
    "inside": ("in its box, %", _percent),
    "on_the_way": ("on the way, %", _percent),
    "at_the_end": ("at the end, %", _percent),
    "whole": ("whole walk, %", share),
    "evidence": ("in any box, %", _percent),
    "chance": ("chance, %", _plain),
    "chance_evidence": ("chance of any, %", _plain),
    "cosine": ("cosine to its box", lambda found: average(found, 3, False)),
    "nearest_cosine": ("to the nearest", lambda found: average(found, 3, False)),
}


def _cells(numbers: dict[str, Any], names: Iterable[str] = _OVERALL) -> list[Cell]:
    return [_OVERALL[name][1](numbers[name]) for name in names]


def _overall(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [one.name, str(one.summary["questions"]), str(one.summary["latents"]), *_cells(one.summary)] for one in results
    ]
    header = ["arm", "questions", "K", *(heading for heading, _ in _OVERALL.values())]
    note = "Means over questions with bootstrap intervals; whole walk: questions with every latent in its box."
    return Table("Latents in their boxes", header, rows, note)


def _by_step(results: Sequence[Shown]) -> Table:
    names = ("inside", "evidence", "chance", "cosine", "nearest_cosine")
    rows: list[list[Cell | str]] = [
        [one.name, f"z{step['step']}", *_cells(step, names)] for one in results for step in one.summary["steps"]
    ]
    return Table("By step", ["arm", "latent", *(_OVERALL[name][0] for name in names)], rows)


def _by_group(results: Sequence[Shown]) -> Table:
    names = ("inside", "on_the_way", "at_the_end", "whole", "chance", "cosine")
    rows: list[list[Cell | str]] = [
        [one.name, group or DASH, str(found["questions"]), *_cells(found, names)]
        for one in results
        for group, found in one.summary["groups"].items()
    ]
    tag = results[0].summary["by"]
    return Table(f"By {tag}", ["arm", tag, "questions", *(_OVERALL[name][0] for name in names)], rows)


def _figures(results: Sequence[Shown]) -> Figures | None:
    """Shares and cosines by step; where groups are numbers, also the share by group."""
    if not results:
        return None
    by_step = [(one, [(step["step"], step) for step in one.summary["steps"]]) for one in results]
    pictures = [
        ("In its box, % by latent", _lines(by_step, "inside", 100, "latent", "% in its box", chance=True)),
        ("Cosine to its box by latent", _lines(by_step, "cosine", 1, "latent", "cosine", chance=False)),
    ]
    by_group = [(one, _numbered(one.summary["groups"])) for one in results]
    if any(len(points) > 1 for _, points in by_group):
        tag = results[0].summary["by"]
        pictures.append((f"In its box, % by {tag}", _lines(by_group, "inside", 100, tag, "% in its box", chance=True)))
    keys = [*(Key(one.number, one.name) for one in results), Key(_CHANCE, "chance", dashed=True)]
    return Figures("The walk of the latents", pictures, keys, note="Bars: 95 % intervals over questions.")


def _center(found: dict[str, Any]) -> float | None:
    value: float | None = found["rate"] if "rate" in found else found["mean"]
    return value


def _lines(
    series: Sequence[tuple[Shown, list[tuple[float, dict[str, Any]]]]],
    name: str,
    scale: float,
    x_label: str,
    y_label: str,
    chance: bool,
) -> Markup:
    drawn, spoken = [], []
    for one, points in series:
        known = [(x, found[name], _center(found[name])) for x, found in points]
        values = [Point(x, scale * y, scale * m["low"], scale * m["high"]) for x, m, y in known if y is not None]
        drawn.append(Line(one.name, values, one.number))
        spoken.append(f"{one.name} " + ", ".join(f"{p.x:g}: {number(p.y, 1 if scale > 1 else 3)}" for p in values))
    if chance:  # the data decide it: the same for every model on them
        of_first = [(x, found["chance"]["mean"]) for x, found in series[0][1] if found["chance"]["mean"] is not None]
        drawn.append(Line("chance", [Point(x, scale * value) for x, value in of_first], _CHANCE, dashed=True))
    alt = f"{y_label} by {x_label}: {'; '.join(spoken)}."
    return lines(drawn, alt, x_label, y_label, include=(0.0, scale) if chance else (1.0,))


def _printed(results: Sequence[Shown]) -> Figure | None:
    """For print: (a) share in the own box and (b) cosine by latent, (c) share by group where groups are numbers."""
    from realvr.widgets import figures

    if not results:
        return None
    by_step = [(one, [(step["step"], step) for step in one.summary["steps"]]) for one in results]
    by_group = [(one, _numbered(one.summary["groups"])) for one in results]
    grouped = any(len(points) > 1 for _, points in by_group)
    made, axes = figures.new(1, 2 + grouped, height=2.6)
    panels = [("In its box", "inside", "latent t", by_step), ("Cosine to its box", "cosine", "latent t", by_step)]
    if grouped:
        panels.append(("In its box", "inside", results[0].summary["by"], by_group))
    for ax, letter, (title, name, x_label, series) in zip(axes[0], "abc", panels, strict=False):
        figures.panel(ax, letter, f"{title}, by {x_label.removesuffix(' t')}")
        scale = 100 if name == "inside" else 1
        for one, points in series:
            value, low, high = (
                [_scaled(found[name], end, scale) for _, found in points] for end in ("", "low", "high")
            )
            figures.curve(ax, [x for x, _ in points], value, low, high, one.number, one.name)
        if name == "inside":
            chance = [(x, found["chance"]["mean"]) for x, found in series[0][1] if found["chance"]["mean"] is not None]
            ax.plot([x for x, _ in chance], [100 * value for _, value in chance], ":", color="#777777", label="chance")
            ax.set_ylim(0, 105)
        ax.set(xlabel=x_label, ylabel="%" if name == "inside" else "cosine")
    axes[0][0].legend()
    return made


def _numbered(groups: Mapping[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    return [(float(group), found) for group, found in groups.items() if by_number(group)[0] < math.inf]


def _scaled(found: dict[str, Any], end: str, scale: float) -> float | None:
    value = found[end] if end else _center(found)
    return None if value is None else scale * value
