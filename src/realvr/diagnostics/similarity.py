"""Similarity of latents (tab:diag-raw-similarity, tab:diag-context-normalized): alike, and alike beside what?

Within the trajectory z_1 … z_K of a question, cosines as they are: the mean over different positions (off-diagonal),
the mean over neighbours cos(z_t, z_t+1) (adjacent), and the largest of different positions (maximum). Each is averaged
over questions.

Adjacent cosines are then compared with two references, all hidden states behind the final norm:

* *dummies*: states at K dummy tokens (``--dummy``, full stops) in place of the latents, behind the same prompt and
  ``<|lvr_start|>``;
* *ordinary*: states at the tokens of the model's own greedy reply behind its span, at most K of them. A reply of fewer
  than two tokens has no adjacent cosine and is counted.

Normalisations, each with the statistics of its own kind of token over all questions and positions of the run:

* *centred*: z - mean;
* *whitened*: C^(-1/2) (z - mean), C the covariance;
* *residualised* (latents only): z_t - mean - (h - mean_h) B, B the least squares of z_t on the context h, the hidden
  state at the last token of the prompt. It takes away what a linear map of the prompt can say.

Fewer rows than dimensions leave C without an inverse (and let least squares fit every question exactly). C, and the
covariance of the contexts, are then shrunk toward a multiple of the identity (OAS, see `realvr.maths.geometry`), which
makes the regression a ridge regression; the summary states the amount. ``--shrinkage`` sets it for all. The paper does
not say what it did with 697 questions of width 3,584.

*Same task*, *different task*: the cosine of the mean latent of a question with those of all other questions of its task
(``--by``), and of other tasks. The mean over questions of the mean over partners; intervals resample questions, each as
one of a pair and as the other (`realvr.maths.pairs`).

The length of the trajectory is K of the run (``--latents 16``), or with ``--latents evidence`` the number of visual
tokens inside the evidence boxes of each question (``--length evidence``), as a span of Stage 1 has.

Vectors are written to ``similarity-states``; the numbers over all questions are computed from these files, in memory of
D x D and one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.data.sample import Sample
from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.lengths import EVIDENCE, LengthSettings, measured
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.readout import group_of
from realvr.diagnostics.similarity_states import normalised, tasks
from realvr.diagnostics.states import StateFiles
from realvr.runs.journal import Record
from realvr.widgets import Cell, Table, Text, Widget, average, number
from realvr.widgets.browser import Facts, Matrix, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"latents": "latents", "dummies": "dummy tokens", "ordinary": "ordinary tokens"}
NORMS = {"raw": "raw", "centred": "centred", "whitened": "whitened"}
WITHIN = {"off_diagonal": "off-diagonal", "adjacent": "adjacent", "maximum": "maximum"}


class Shrinkage(TypedDict):
    """How a covariance was made invertible."""

    rows: int
    width: int
    amount: float


class Summary(TypedDict):
    """``similarity.json``."""

    questions: int
    length: shapes.Text
    latents: shapes.Mean
    within: dict[shapes.Text, shapes.Mean]
    adjacent: dict[shapes.Text, dict[shapes.Text, shapes.Mean]]
    """By normalisation and kind of token."""
    minus_ordinary: dict[shapes.Text, shapes.Mean]
    """Latents minus ordinary tokens of the same question."""
    residualised: shapes.Mean
    shrinkage: dict[shapes.Text, Shrinkage]
    by: shapes.Text
    tasks: int
    same_task: shapes.Mean
    different_task: shapes.Mean
    without_neighbours: int
    """Replies of fewer than two tokens."""
    errors: int
    settings: NotRequired[shapes.Settings]


class SimilaritySettings(LengthSettings):
    """References, normalisation and tasks."""

    dummy: str = Field(default=".", description="Text whose tokens fill the K slots as dummies, over and over.")
    by: str = Field(
        default="task",
        description="What makes a task: task (the file's name where the data states none), category, source (the file),"
        " or the name of a tag.",
    )
    shrinkage: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="How much covariances are shrunk toward the identity; by default only with fewer rows than "
        "dimensions, as the OAS rule says.",
    )


class Similarity(Diagnostic[SimilaritySettings]):
    """Cosines within a trajectory, beside dummy tokens and ordinary ones."""

    name = "similarity"
    title = "Similarity of latents"
    question = "Are the latents of one question alike, more than dummy tokens or ordinary ones?"
    reading = (
        "Cosines of hidden states. High raw cosines often are a common mean of all states: centring, whitening and "
        "residualising take away what all tokens, or all latents of one prompt, share."
    )
    needs = Needs(span=True)
    paper = (
        "off-diagonal, adjacent, maximum 0.7342, 0.9417, 0.9951 (126 latents) and 0.8408, 0.9215, 0.9958 (63) "
        "on two examples of VISCOT (tab:diag-raw-similarity); adjacent cosine of latents, dummies and ordinary tokens "
        "on BLINK 0.8877, 0.9923, 0.4817 raw, 0.8166, 0.9978, 0.5210 centred, 0.6074, 0.6481, 0.0952 whitened; 0.7760 "
        "residualised; 0.9960 within a task, 0.9907 between tasks (tab:diag-context-normalized)"
    )
    Settings = SimilaritySettings
    shape = Summary
    batch = 16
    order = 700
    examples: ClassVar[tuple[int, int]] = (256, 1000)
    highlights = (
        Highlight(
            "cosine of neighboring latents",
            lambda summary: average(summary["within"]["adjacent"], 3, False),
            overview=False,
        ),
        Highlight(
            "the same, residualised on the prompt",
            lambda summary: average(summary["residualised"], 3, False),
            "Residualised: without what a linear map of the state before the span tells.",
            overview=False,
        ),
    )
    _good: tuple[tuple[str, str], ...] = ()
    _computed: tuple[tuple[tuple[str, str], ...], dict[str, Any]] | None = None

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        return measured(self.settings, items, data)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.similarity import cosines_of, lengths_of, states_of

        lengths, errors = lengths_of(model, samples, self.settings.length == EVIDENCE)
        found = []
        for latents, own in lengths.items():
            states, unread = states_of(model, own, latents, self.settings.dummy)
            found += states
            errors += unread
        for sample, error in errors:
            yield self.failed(sample, error)
        place = {sample.id: number for number, sample in enumerate(samples)}
        found.sort(key=lambda one: place[one.sample.id])

        def array(rows: Any) -> Any:  # noqa: ANN401  # torch's, numpy's
            return rows.float().cpu().numpy()

        if found:
            kinds = {"latents": "latents_KD", "dummies": "dummies_KD", "ordinary": "ordinary_SD"}
            kept = {kind: [array(getattr(one, field)) for one in found] for kind, field in kinds.items()}
            kept["context"] = [array(one.context_D[None]) for one in found]
            samples.keep([one.sample.id for one in found], {}, kept)
        for one in found:
            about = cosines_of(one, one.sample.id in samples.detailed)
            yield {"id": one.sample.id, "group": group_of(one.sample, self.settings.by), **about, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        self._good = tuple((record["id"], record["group"]) for record in good)
        raw = {kind: mean(_there([record["adjacent"][kind] for record in good])) for kind in KINDS}
        pairs = [(record["adjacent"]["latents"], record["adjacent"]["ordinary"]) for record in good]
        within = {name: mean(_there([record[name] for record in good])) for name in ("off_diagonal", "maximum")}
        return {
            "questions": len(good),
            "length": self.settings.length,
            "latents": mean([float(record["latents"]) for record in good]),
            "within": {name: {**within, "adjacent": raw["latents"]}[name] for name in WITHIN},
            "adjacent": {"raw": raw},
            "minus_ordinary": {"raw": mean([a - b for a, b in pairs if a is not None and b is not None])},
            "residualised": mean([]),
            "shrinkage": {},
            "by": self.settings.by,
            "tasks": len({group for _, group in self._good}),
            "same_task": mean([]),
            "different_task": mean([]),
            "without_neighbours": sum(record["adjacent"]["ordinary"] is None for record in good),
            "errors": len(records) - len(good),
        }

    @override
    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        if not self._good:
            return dict(summary)
        if self._computed is None or self._computed[0] != self._good:  # a suite asks twice
            files, ids = StateFiles(folder / f"{self.name}-states"), [name for name, _ in self._good]
            found = normalised(files, ids, tuple(KINDS), self.settings.shrinkage) | tasks(files, dict(self._good))
            self._computed = (self._good, found)
        found = dict(self._computed[1])
        adjacent, minus = found.pop("adjacent"), found.pop("minus_ordinary")
        return {
            **summary,
            **found,
            "adjacent": {**summary["adjacent"], **adjacent},
            "minus_ordinary": {**summary["minus_ordinary"], **minus},
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        for name, one in summary["shrinkage"].items():
            if one["rows"] <= one["width"]:
                found.append(
                    f"{name}: {one['rows']} in {one['width']} dimensions; covariance shrunk by {one['amount']:.3g}"
                )
        if summary["tasks"] == 1:
            found.append("all questions are of one task: there is no cosine between tasks (--by names another tag)")
        if summary["without_neighbours"]:
            found.append(
                f"{summary['without_neighbours']} replies have fewer than two tokens, and no neighbours to compare"
            )
        if summary["questions"] and summary["within"]["adjacent"]["mean"] is None:
            found.append("one latent has no neighbour: cosines within a trajectory need K of at least 2")
        return found

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None or record["off_diagonal"] is None:
            return None
        facts = [[words, number(record[name], 4)] for name, words in WITHIN.items() if name != "adjacent"]
        facts += [
            [f"adjacent, {KINDS[kind]}", number(value, 4)]
            for kind, value in record["adjacent"].items()
            if value is not None
        ]
        steps = [f"z{step}" for step in range(1, record["latents"] + 1)]
        parts: list[Any] = [Facts(facts)]
        if record.get("detail"):
            parts.insert(0, Matrix("cosines", steps, steps, record["detail"], "cosine", low=-1.0, high=1.0))
        return Panel(parts)

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        within: list[list[Cell | str]] = []
        rows: list[list[Cell | str]] = []
        for one in results:
            found = one.summary
            length = average(found["latents"], 1, False)
            within.append([one.name, length, *(average(found["within"][name], 4, False) for name in WITHIN)])
            for norm, own in found["adjacent"].items():
                cells = [average(own[kind], 4, False) for kind in KINDS]
                rows.append([one.name, f"{NORMS[norm]} adjacent", *cells, average(found["minus_ordinary"][norm], 4)])
            more = {
                "residualised": "residualised adjacent",
                "same_task": "mean latents, same task",
                "different_task": "mean latents, different tasks",
            }
            rows += [[one.name, words, average(found[key], 4, False), "", "", ""] for key, words in more.items()]
        widgets: list[Widget] = [
            Table("Cosines within a trajectory", ["arm", "latents", *WITHIN.values()], within),
            Table(
                "Cosines beside references",
                ["arm", "cosine", *KINDS.values(), "latents - ordinary"],
                rows,
                "Centred, whitened and residualised with the statistics of all questions.",
            ),
        ]
        for one in results:
            told = [
                f"{name} {found['amount']:.3g} ({found['rows']:,} in {found['width']:,} dimensions)"
                for name, found in one.summary["shrinkage"].items()
                if found["amount"]
            ]
            if told:
                widgets.append(Text(f"{one.name}, shrinkage: {'; '.join(told)}."))
        return widgets

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["questions"]]
        if not known:
            return None
        columns = len(known) + 2
        figure, axes = figures.new(1, columns, width=max(7.0, 2.4 * columns), height=2.8)
        first, *each, last = axes[0]
        numbers, letters = [one.number for one in known], figures.letters()
        figures.panel(first, next(letters), "Within a trajectory")
        figures.bars(
            first,
            list(WITHIN.values()),
            [(one.name, *_ends([one.summary["within"][key] for key in WITHIN])) for one in known],
            numbers,
            tilt=20,
        )
        first.set_ylabel("cosine")
        for one, ax in zip(known, each, strict=True):
            figures.panel(ax, next(letters), f"Adjacent, {one.name}")
            norms = one.summary["adjacent"]
            series = [(words, *_ends([norms[norm][kind] for norm in norms])) for kind, words in KINDS.items()]
            figures.bars(ax, [NORMS[norm] for norm in norms], series, [one.number, 5, 4], tilt=20)
            ax.set_ylim(top=1.6)  # room for the legend
            ax.legend(loc="upper right")
        figures.panel(last, next(letters), "Context and task")
        keys = {"residualised": "residualised", "same_task": "same task", "different_task": "other task"}
        figures.bars(
            last,
            list(keys.values()),
            [(one.name, *_ends([one.summary[key] for key in keys])) for one in known],
            numbers,
            tilt=20,
        )
        if len(known) > 1:
            first.legend()
        return figure


def _there(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ends(found: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Values and both ends of their intervals."""
    value, low, high = ([one[end] for one in found] for end in ("mean", "low", "high"))
    return value, low, high
