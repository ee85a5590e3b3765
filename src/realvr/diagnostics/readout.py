"""Readout against correctness (tab:diag-credit-residual, first part): do right answers look at the latents more?

The model answers greedily. One teacher-forced pass over its own answer gives the readout of each slot,

    r_t = mean over layers, heads and content positions j of A_{j,t},

with the content positions of the *generated* answer (`measuring.attending` says which they are). From it, for each
question:

* ``mass``: sum over t of r_t, the attention of the answer on all K slots;
* ``top1``: max_t r_t / mass, the share of the slot that is read most. The paper prints "top-1 attention" without a
  definition; its change (+0.0307) is three times that of the mass (+0.0099), so it is read as a share. With K = 1 it
  is 1;
* ``peak``: max_t r_t, the other reading of "top-1". Ours.

``delta`` is the mean over right answers minus the mean over wrong ones, for each benchmark (``--by``), with a bootstrap
interval that resamples right and wrong answers each. Replies that cannot be parsed are wrong, as in an evaluation.
Where all answers are right, or all wrong, there is no delta, and ``reason`` says so. An empty reply has no content and
is left out of mass and top-1, not of the accuracy.

An association, not an effect: right answers may be those to short or easy questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.data.sample import Sample
from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import difference, mean, rate
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Table, Text, Widget, average, number, share
from realvr.widgets.browser import Bars, Facts, Panel, Series
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {"mass": "answer-to-latent mass", "top1": "top-1 share", "peak": "largest readout"}
ALL = "all"
"""Name of the row over everything."""


class Compared(TypedDict):
    """One number of right and of wrong answers."""

    correct: shapes.Mean
    incorrect: shapes.Mean
    delta: shapes.Mean


class Group(TypedDict):
    """One benchmark."""

    questions: int
    accuracy: shapes.Rate
    parsed: shapes.Rate
    mass: Compared
    top1: Compared
    peak: Compared
    slots: dict[shapes.Text, list[shapes.Mean]]
    reason: shapes.Text | None


class Summary(TypedDict):
    """``readout.json``."""

    by: shapes.Text
    latents: int
    groups: dict[shapes.Text, Group]
    empty: int
    errors: int
    settings: NotRequired[shapes.Settings]


class ReadoutSettings(AnswerSettings):
    """How questions are grouped."""

    by: str = Field(
        default="task",
        description="What makes a benchmark of its own: task (the file's name where the data states none), category, "
        "source (the file), or the name of a tag.",
    )


def group_of(sample: Sample, by: str) -> str:
    """The benchmark of a sample."""
    file = Path(sample.source.file).stem if sample.source is not None else ""
    known = {"task": sample.task or file, "category": sample.category, "source": file}
    return (known[by] if by in known else sample.tags.get(by, "")) or "none"


class Readout(Diagnostic[ReadoutSettings]):
    """Attention of generated answers on the latents, right answers against wrong ones."""

    name = "readout"
    title = "Readout and correctness"
    question = "Do right answers look at the latents more than wrong ones?"
    reading = (
        "Mass: attention of the generated answer on the K latents, mean over layers, heads and content positions. "
        "Top-1: the share of it on the latent that is read most. Delta: right minus wrong answers; an association, "
        "not an effect."
    )
    needs = Needs(span=True)
    paper = (
        "a mass delta of +0.0099 and a top-1 delta of +0.0307 on MMVP (accuracy 64.00 %), +0.0029 and +0.0217 on BLINK "
        "(49.28 %) (tab:diag-credit-residual)"
    )
    Settings = ReadoutSettings
    shape = Summary
    batch = 16
    order = 50
    examples: ClassVar[tuple[int, int]] = (256, 2048)
    highlights = (
        Highlight(
            "attention of right answers on the latents",
            lambda summary: _highlight(summary, "correct", False),
            "Readout: mean over layers, heads and content positions.",
            overview=False,
        ),
        Highlight(
            "the same, right minus wrong",
            lambda summary: _highlight(summary, "delta", True),
            overview=False,
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.readout import readout_records

        reading = model.read(samples)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample, found in readout_records(model, reading, self.settings.policy):
            yield {"id": sample.id, "group": group_of(sample, self.settings.by), **found, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        groups: dict[str, list[Record]] = {}
        for record in good:
            groups.setdefault(record["group"], []).append(record)
        if len(groups) != 1:
            groups[ALL] = good
        return {
            "by": self.settings.by,
            "latents": max((record["latents"] for record in good), default=0),
            "groups": {name: _numbers(found) for name, found in groups.items()},
            "empty": sum(record["readout"] is None for record in good),
            "errors": len(records) - len(good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["empty"]:
            found.append(f"{summary['empty']} replies are empty: they count as wrong, and have no readout")
        return found + [
            f"{name}: no delta, {one['reason']}" for name, one in summary["groups"].items() if one["reason"]
        ]

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None or record["readout"] is None:
            return None
        about = "Mean attention of the answer's content tokens, over layers and heads."
        said = "cannot be parsed" if record["extracted"] is None else "right" if record["correct"] else "wrong"
        facts = [["answer", f"{record['extracted'] or DASH} ({said})"], ["mass", f"{sum(record['readout']):.4f}"]]
        return Panel([Bars([Series("readout", record["readout"], "share of attention", about)]), Facts(facts)])

    # ------------------------------------------------------------------ tables and figures

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for name, found in one.summary["groups"].items():
                deltas = [_delta(found, key, digits) for key, digits in (("mass", 4), ("top1", 4), ("peak", 4))]
                means = [
                    average(found[key][which], 4, False)
                    for key in ("mass", "top1")
                    for which in ("correct", "incorrect")
                ]
                rows.append([one.name, name, share(found["accuracy"]), *deltas, *means])
        header = ["arm", "benchmark", "accuracy, %", *(f"Δ {words}" for words in MEASURES.values())]
        header += [f"{words}, {which}" for words in ("mass", "top-1") for which in ("right", "wrong")]
        note = "Δ: right minus wrong answers, with a bootstrap interval that resamples both."
        told = [
            Text(f"{one.name}, {name}: no Δ, {found['reason']}.")
            for one in results
            for name, found in one.summary["groups"].items()
            if found["reason"]
        ]
        return [*_charts(results), Table("Readout of right and wrong answers", header, rows, note), *told]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["groups"]]
        if not known:
            return None
        names = list(dict.fromkeys(name for one in known for name in one.summary["groups"]))
        figure, axes = figures.new(1, 3, height=2.6, width_ratios=[1, 1, 1.3])
        for letter, key, ax in zip("ab", ("mass", "top1"), axes[0], strict=False):
            figures.panel(ax, letter, {"mass": "Δ mass", "top1": "Δ top-1 share"}[key])
            for place, one in enumerate(known):
                _points(ax, one, names, key, (place - (len(known) - 1) / 2) * 0.5 / len(known))
            ax.axvline(0, color="#999999", linewidth=0.8)
            shown = [f"{name}\n{_accuracies(known, name)}" for name in names]
            ax.set_yticks(range(len(names)), shown if key == "mass" else [""] * len(names))
            ax.set_ylim(len(names) - 0.5, -0.5)
            ax.set_xlabel("right − wrong answers")
            ax.grid(axis="x", visible=True)
            ax.locator_params(axis="x", nbins=4)
        _by_latent(axes[0][2], known)
        return figure


def _numbers(records: Sequence[Record]) -> dict[str, Any]:
    right, wrong = ([r for r in records if r["correct"] is verdict] for verdict in (True, False))
    read = {"correct": _read(right), "incorrect": _read(wrong)}
    reason = None
    if not all(read.values()):
        verdict = "there is no question" if not records else "all answers are right" if not wrong else None
        reason = verdict or ("all answers are wrong" if not right else "no wrong answer has a readout")
    compared = {
        key: {which: mean(values) for which, values in found.items()} | {"delta": difference(*found.values())}
        for key, of in _OF.items()
        for found in [{which: [of(r_K) for r_K in rows] for which, rows in read.items()}]
    }
    latents = max((len(r_K) for rows in read.values() for r_K in rows), default=0)
    return {
        "questions": len(records),
        "accuracy": rate(len(right), len(records)),
        "parsed": rate(sum(record["extracted"] is not None for record in records), len(records)),
        **compared,
        "slots": {which: [mean([r_K[t] for r_K in rows]) for t in range(latents)] for which, rows in read.items()},
        "reason": reason,
    }


def _read(records: Sequence[Record]) -> list[list[float]]:
    return [record["readout"] for record in records if record["readout"] is not None]


def _top1(r_K: Sequence[float]) -> float:
    """The largest share; 1 / K where nothing at all is read."""
    return max(r_K) / sum(r_K) if sum(r_K) > 0 else 1 / len(r_K)


_OF: dict[str, Callable[[Sequence[float]], float]] = {"mass": math.fsum, "top1": _top1, "peak": max}


def _delta(found: Mapping[str, Any], key: str, digits: int) -> Cell:
    cell = average(found[key]["delta"], digits)
    few = min(found[key][which]["pairs"] for which in ("correct", "incorrect")) < 30
    return Cell(cell.text, cell.below, few, cell.value)


def _charts(results: Sequence[Shown]) -> list[Widget]:
    figures = []
    for key in ("mass", "top1"):
        bars = [
            Bar(
                one.name,
                found[key]["delta"]["mean"],
                found[key]["delta"]["low"],
                found[key]["delta"]["high"],
                one.number,
                name,
            )
            for one in results
            for name, found in one.summary["groups"].items()
            if found[key]["delta"]["mean"] is not None
        ]
        if bars:
            order = list(dict.fromkeys(bar.group for bar in bars))
            bars.sort(key=lambda bar: order.index(bar.group))
            spoken = "; ".join(f"{bar.group}, {bar.name} {number(bar.value, 4, sign=True)}" for bar in bars)
            alt = f"{MEASURES[key]} of right minus wrong answers, with 95 % intervals: {spoken}."
            figures.append((f"Δ {MEASURES[key]}", forest(bars, alt, "right − wrong")))
    return [Figures("Readout of right minus wrong answers", figures)] if figures else []


def _points(ax: Any, one: Shown, names: Sequence[str], key: str, aside: float) -> None:  # noqa: ANN401  # matplotlib's
    """Deltas of one model, a row for each benchmark; "none" where there is no delta."""
    from realvr.widgets import figures

    for row, name in enumerate(names):
        found = one.summary["groups"].get(name)
        delta = found[key]["delta"] if found else {"mean": None}
        if delta["mean"] is None:
            ax.text(0, row + aside, " none", va="center", fontsize=7, color=figures.color(one.number))
            continue
        ends = [[delta["mean"] - delta["low"]], [delta["high"] - delta["mean"]]]
        mark = figures.MARKERS[one.number % len(figures.MARKERS)]
        ax.errorbar([delta["mean"]], [row + aside], xerr=ends, fmt=mark, color=figures.color(one.number), capsize=2)


def _accuracies(results: Sequence[Shown], name: str) -> str:
    rates = [one.summary["groups"].get(name, {}).get("accuracy", {}).get("rate") for one in results]
    return "acc. " + " / ".join(DASH if value is None else f"{100 * value:.1f} %" for value in rates)


def _by_latent(ax: Any, results: Sequence[Shown]) -> None:  # noqa: ANN401  # matplotlib's
    """Readout of each latent over all questions: right answers solid, wrong ones dotted."""
    from realvr.widgets import figures

    figures.panel(ax, "c", "Readout by latent")
    for one in results:
        groups = one.summary["groups"]
        slots = groups.get(ALL, next(iter(groups.values())))["slots"]
        for which, label, more in (("correct", "right", {}), ("incorrect", "wrong", {"linestyle": ":", "mfc": "none"})):
            values, low, high = ([found[end] for found in slots[which]] for end in ("mean", "low", "high"))
            if any(value is not None for value in values):
                steps = range(1, len(values) + 1)
                figures.curve(ax, steps, values, low, high, one.number, f"{one.name}, {label}", **more)
    ax.set_xlabel("latent t")
    ax.set_ylabel("attention of the answer")
    ax.set_ylim(bottom=0)
    if ax.lines:
        ax.legend()


def _highlight(summary: OwnSummary, name: str, sign: bool) -> Cell:
    """Of all questions."""
    groups = summary["groups"]
    found = groups.get(ALL) or next(iter(groups.values()), None)
    return Cell(DASH) if found is None else average(found["mass"][name], 4, sign)
