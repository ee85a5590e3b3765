"""Ranking against intervention (fig:design-latent-intervention): does the readout point at the latents that matter?

(a) ``r_t(y)`` after the right answer and its mean after wrong ones, teacher-forced behind the same free-running span as
    in training, and the contrast ``gamma_t = [r_t^+ - r_t^-]+``, not normalised.
(b) Loss in nats, ``log p(Fmt(y*) | x, z) - log p(Fmt(y*) | x, z with k latents replaced)``, over the entire formatted
    answer, of the first k latents in the order of the contrast, of the raw readout of the right answer, and of random
    orders (``--seeds`` permutations per question by seed and id, losses averaged per question). All other latents stay
    as recorded. All orders replace the same at k = K and coincide there exactly. Ours: the order by the losses of (c),
    which says how much there is to find.
(c) Loss where one position is replaced, against its contrast: Spearman's correlation over the K latents of a question
    (mean over questions where both vary) and over the K position means (bootstrap over questions), for the contrast
    and for the raw readout.

Wrong answers: of a question with options all others, as they are all that can be answered. An open question has none of
its own; it takes at most ``--wrong`` right answers of other open questions of the same task that the judge does not
find equal, drawn by ``--seed`` and the id (ours). A question without a wrong answer has no contrast: it is left out and
counted.

``--replacement`` (`realvr.diagnostics.replacements`) says what latents are replaced by; the paper does not. Many
contrasts are zero: latents of equal rank are taken in a random order of the question (by its id), so that an order
without information is a random one. (Latent exchange takes the first slot first.) Where boxes are a trail, the shares
of questions whose first-ranked latent is on the last box are given beside chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from pydantic import Field
from typing_extensions import override

from realvr.answers.canonical import wrong as distinct_wrong
from realvr.answers.text import LETTERS
from realvr.data.sample import Sample
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.dependence import trail
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown, Skip
from realvr.diagnostics.ranking_summary import ORDERS, RANKED, Summary, summarise_ranking
from realvr.diagnostics.replacements import Replacement
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Fold, Key, Table, Widget, average, interval, number, share, significant
from realvr.widgets.browser import Bars, Panel, Series
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_WRONG = "it has no wrong answer"
_NAMES = {"contrast": "contrast", "attention": "raw attention", "random": "random", "utility": "own loss (ours)"}


class RankingSettings(DiagnosticSettings):
    """What is replaced, and what answers are compared."""

    replacement: Replacement = Field(
        default="position-mean",
        description="What latents are replaced by: position-mean, another (another sample's) or noise of their norm.",
    )
    seeds: int = Field(default=5, ge=1, description="Random orders per question: seeds 0, 1, …")
    wrong: int = Field(default=4, ge=1, description="At most so many wrong answers of an open question.")
    seed: int = Field(
        default=0, description="Fixes wrong answers of open questions, noise and whose latents are given."
    )


class Ranking(Diagnostic[RankingSettings]):
    """Latents replaced in the order of their contrast, of their readout and at random."""

    name = "ranking"
    title = "Ranking against intervention"
    question = "Do contrast and attention point at the latents that the answer depends on?"
    reading = (
        "Loss by k: nats that the right answer loses when the first k latents of an order are replaced. An order that "
        "finds the latents that matter lies above random ones in between; all coincide at k = K. Correlation: of a "
        "latent's contrast (or readout) with the loss where it alone is replaced."
    )
    needs = Needs(span=True)
    paper = ""  # fig:design-latent-intervention is a figure whose caption and text give no number
    Settings = RankingSettings
    shape = Summary
    batch = 8
    order = 51
    examples = (64, 1000)
    highlights = (
        Highlight(
            "rank correlation of contrast and loss",
            lambda summary: average(summary["correlation"]["contrast"]["within"], 2),
            "Rank correlation: Spearman's, over the latents of a question, of γ_t and the loss where z_t is replaced.",
        ),
    )

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        answers = open_answers(items)
        if not any(len(sample.choices) > 1 or len(answers.get(sample.task, ())) > 1 for sample in items):
            raise Skip(
                f"{data}: none of its {len(items)} questions has a wrong answer, which diagnostic {self.name} compares "
                "with the right one: give questions with options, or open ones with different answers"
            )
        return list(items)

    @override
    def prepare(self, model: Model, samples: Sequence[Sample]) -> None:
        from realvr.diagnostics.measuring.replacing import Replacing

        settings = self.settings
        self._answers = open_answers(samples)
        self._replacing = Replacing(model, samples, [settings.replacement], settings.seed, batch=self.batch)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.forcing import without_answer
        from realvr.diagnostics.measuring.ranking import measure_ranking

        settings, wrong = self.settings, {}
        for sample in samples:
            why = without_answer(model.backbone, sample)
            if why is not None:
                yield self.failed(sample, why)
                continue
            wrong[sample.id] = wrong_answers(sample, self._answers, settings.wrong, settings.seed)
            if not wrong[sample.id]:
                yield {"id": sample.id, "skipped": NO_WRONG, "error": None}
        reading = model.read([sample for sample in samples if wrong.get(sample.id)])
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        chosen = [wrong[sample.id] for sample in reading.samples]
        measured = measure_ranking(model, reading, chosen, self._replacing, settings.replacement, settings.seeds)
        for sample, found in measured:
            yield {"id": sample.id, "latents": model.latents, "boxes": trail(sample), **found, "error": None}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """See `ranking_summary`."""
        return summarise_ranking(records, self.settings.replacement, self.settings.seeds)

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        if summary is None:
            return {f"ranking_rho_{name}": None for name in RANKED}
        found = {name: summary["correlation"][name]["within"] for name in RANKED}
        return {
            f"ranking_rho_{name}": {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}
            for name, one in found.items()
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        return [*found, *(f"{n} of {count} questions are left out: {why}" for why, n in summary["skipped"].items())]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        shown = [result for result in results if result.summary["questions"]]
        figures: list[Widget] = [_figures(result) for result in shown]
        return [_overall(results), *figures, Fold("Every latent", [_by_latent(results)]), _by_k(results)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        figure, axes = figures.new(max(1, len(results)), 3, width=7.4, height=2.5 * max(1, len(results)))
        letters = iter("abcdefghijklmnopqrstuvwxyz" * len(results))
        titles = ("readout", "loss by k", "loss of one latent")
        for result, row in zip(results, axes, strict=False):
            row[0].set_ylabel(result.name)
            for panel, title in zip(row, titles, strict=True):
                figures.panel(panel, next(letters), title)
                if not result.summary["questions"]:
                    figures.empty(panel)
            if result.summary["questions"]:
                _draw_readout(row[0], result.summary)
                _draw_losses(row[1], result.summary)
                _draw_scatter(row[2], result.summary)
        return figure

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None or record["skipped"] is not None:
            return None
        unit = "share of attention"
        readouts = [
            Series("readout, right answer", record["correct"], unit, "attention of the right answer to the latent"),
            Series("readout, wrong answers", record["incorrect"], unit, "the same of wrong answers, their mean"),
        ]
        credit = Series("credit γ", record["contrast"], "credit", "positive part of the difference")
        loss = Series("loss if replaced", record["single"], "nats", "log p(right answer) minus that without the latent")
        return Panel([Bars(readouts), Bars([credit]), Bars([loss])])


# ---------------------------------------------------------------------- wrong answers


def open_answers(samples: Sequence[Sample]) -> dict[str, list[str]]:
    """Right answers of the open questions of each task, each once, in the order of the data."""
    found: dict[str, dict[str, None]] = {}
    for sample in samples:
        if not sample.choices and sample.answer.strip():
            found.setdefault(sample.task, {})[sample.answer] = None
    return {task: list(answers) for task, answers in found.items()}


def wrong_answers(sample: Sample, answers: Mapping[str, Sequence[str]], most: int, seed: int) -> list[str]:
    """Other options of a question; of an open one, at most so many right answers of others of its task."""
    if sample.choices:
        return distinct_wrong(LETTERS[: len(sample.choices)], sample.answer, sample.choices)
    others = [answer for answer in answers.get(sample.task, ()) if answer != sample.answer]
    # Twice as many as are wanted: some may be the right answer in other words.
    drawn = random.Random(f"{seed}/{sample.id}").sample(others, min(2 * most, len(others)))
    return distinct_wrong(drawn, sample.answer)[:most]


# ---------------------------------------------------------------------- tables


def _rho(found: Mapping[str, Any]) -> Cell:
    if found["rho"] is None:
        return Cell(DASH)
    return Cell(number(found["rho"], 2, True), interval((found["low"], found["high"]), 2, True), value=found["rho"])


def _overall(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for result in results:
        found = result.summary
        for name in RANKED:
            correlation = found["correlation"][name]
            mass = found["contrast_mass" if name == "contrast" else "correct_mass"]
            cells = [average(found["over_random"][name], 3), average(correlation["within"], 2)]
            zero = found["zero_contrast"]["mean"] if name == "contrast" else None
            cells += [_rho(correlation["positions"]), share(found["top"][name]), share(found["top_on_last"][name])]
            none = Cell(DASH if zero is None else number(100 * zero), value=zero)
            rows.append([result.name, _NAMES[name], str(found["questions"]), average(mass, 5, False), none, *cells])
        best = [average(found["over_random"]["utility"], 3), *[Cell(DASH)] * 4]
        rows.append([result.name, _NAMES["utility"], str(found["questions"]), Cell(DASH), Cell(DASH), *best])
    first = results[0].summary if results else None
    chance = [average(result.summary["share_on_last"], 2, False).text for result in results]
    note = (
        "Mass: sum over the latents; zero: share of them without any. Loss over random: mean over 0 < k < K of the "
        "loss in nats above that of random orders. Rho: Spearman's, of the score with the loss where one latent is "
        "replaced. Largest loss: questions whose first-ranked latent is the one with the largest loss. On the last "
        f"box: of trails, those whose first-ranked latent is on it (chance: {', '.join(chance)})."
        + (f" Replaced by: {first['replacement']}; {first['seeds']} random orders." if first else "")
    )
    header = [
        "arm",
        "order",
        "questions",
        "mass",
        "zero, %",
        "loss over random",
        "rho in a question",
        "rho of positions",
    ]
    return Table("Do they find what matters?", [*header, "largest loss, %", "on the last box, %"], rows, note)


def _by_latent(results: Sequence[Shown]) -> Table:
    most = max((result.summary["latents"] for result in results), default=0)
    names = {
        "correct": "readout, right",
        "incorrect": "readout, wrong",
        "contrast": "contrast γ",
        "single": "loss, nats",
    }
    rows: list[list[Cell | str]] = []
    for result in results:
        for name, words in names.items():
            digits = {"contrast": 6, "single": 3}.get(name, 5)
            cells: list[Cell | str] = [average(one, digits, name == "single") for one in result.summary[name]]
            rows.append([result.name, words, *cells, *[Cell(DASH)] * (most - len(cells))])
    note = "Readouts: share of attention, mean over layers, heads and content tokens. Loss: this latent alone replaced."
    return Table("Every latent", ["arm", "what", *(f"z{t}" for t in range(1, most + 1))], rows, note)


def _by_k(results: Sequence[Shown]) -> Table:
    most = max((result.summary["latents"] for result in results), default=0)
    rows: list[list[Cell | str]] = []
    for result in results:
        for name in ORDERS:
            cells: list[Cell | str] = [average(one, 3) for one in result.summary["losses"][name]]
            rows.append([result.name, _NAMES[name], *cells, *[Cell(DASH)] * (most + 1 - len(cells))])
    note = "Nats that the right answer loses when the first k latents of an order are replaced."
    return Table("Loss by k", ["arm", "order", *(f"k = {k}" for k in range(most + 1))], rows, note)


# ---------------------------------------------------------------------- figures


def _figures(result: Shown) -> Figures:
    """Loss by k and readouts of one model, for the page."""
    found = result.summary

    def drawn(names: Mapping[str, tuple[str, Sequence[dict[str, Any]]]], first: int, x: str, y: str) -> Markup:
        series, spoken = [], []
        for place, (words, values) in enumerate(names.values()):
            points = [Point(k, one["mean"], one["low"], one["high"]) for k, one in enumerate(values, first)]
            series.append(Line(words, points, place))
            spoken.append(f"{words} " + ", ".join(f"{p.x:g}: {significant(p.y)}" for p in points))
        return lines(series, f"{result.name}, {y} by {x}: {'; '.join(spoken)}.", x, y, include=(0.0,))

    losses = {name: (_NAMES[name], found["losses"][name]) for name in ORDERS}
    single = {"single": ("one latent", found["single"])}
    pictures = [
        ("Loss by k, nats", drawn(losses, 0, "k", "loss, nats")),
        ("Loss of one latent, nats", drawn(single, 1, "latent", "loss, nats")),
    ]
    keys = [Key(place, _NAMES[name]) for place, name in enumerate(ORDERS)]
    return Figures(f"{result.name}: loss by order", pictures, keys, note="Bars: 95 % intervals over questions.")


def _ends(values: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    return tuple([one[end] for one in values] for end in ("mean", "low", "high"))  # type: ignore[return-value]


def _draw_readout(axes: Axes, found: OwnSummary) -> None:
    from realvr.widgets import figures

    steps = range(1, found["latents"] + 1)
    beside = axes.twinx()
    beside.bar(list(steps), [1000 * one["mean"] for one in found["contrast"]], color="#cccccc", width=0.6, zorder=0)
    beside.set_ylabel("contrast γ × 1000 (bars)")
    axes.set_zorder(beside.get_zorder() + 1)
    axes.patch.set_visible(False)
    for place, (name, words) in enumerate({"correct": "right answer", "incorrect": "wrong answers"}.items()):
        figures.curve(axes, steps, *_ends(found[name]), number=place, label=words)
    axes.set_xlabel("latent t")
    axes.set_ylabel(f"{axes.get_ylabel()}\nreadout")
    axes.set_xticks(list(steps))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _draw_losses(axes: Axes, found: OwnSummary) -> None:
    from realvr.widgets import figures

    for place, name in enumerate(ORDERS):
        figures.curve(
            axes, range(found["latents"] + 1), *_ends(found["losses"][name]), number=place, label=_NAMES[name]
        )
    axes.set_xlabel("latents replaced, k")
    axes.set_ylabel("loss, nats")
    axes.legend(loc="upper left")


def _draw_scatter(axes: Axes, found: OwnSummary) -> None:
    from realvr.widgets import figures

    points = found["points"]
    axes.scatter([1000 * p[1] for p in points], [p[2] for p in points], s=3, color="#999999", alpha=0.5, linewidths=0)
    x, x_low, x_high = ([1000 * value for value in end] for end in _ends(found["contrast"]))
    y, y_low, y_high = _ends(found["single"])
    across, up = (
        [[b - a, c - b] for a, b, c in zip(*ends, strict=True)] for ends in ((x_low, x, x_high), (y_low, y, y_high))
    )
    axes.errorbar(
        x,
        y,
        xerr=[[max(0.0, one[side]) for one in across] for side in (0, 1)],
        yerr=[[max(0.0, one[side]) for one in up] for side in (0, 1)],
        fmt="o",
        color=figures.color(0),
        elinewidth=0.8,
    )
    for t, (right, above) in enumerate(zip(x, y, strict=True), 1):
        axes.annotate(str(t), (right, above), xytext=(3, 3), textcoords="offset points", fontsize=7)
    within = found["correlation"]["contrast"]["within"]["mean"]
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_xlabel("contrast γ × 1000")
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylabel("loss, nats")
    axes.text(0.98, 0.98, f"ρ in a question {number(within, 2, True)}", ha="right", va="top", transform=axes.transAxes)
