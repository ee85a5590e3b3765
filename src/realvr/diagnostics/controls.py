"""Controls (ours): does the answer need these latents, or would anything in their place do?

The model answers every question greedily under each condition. The prompt, the decoding and the token limit stay the
same; only the span differs:

* ``free``: the model's own latents. ``sham``: the same latents put back in one pass. In float32 every reply is equal;
  in bfloat16 rounding may change some, and that much of every other change may be rounding, too.
* ``another``: the latents of another question about other pictures. ``position-mean``: the mean of each position over
  the questions of the run. ``noise``: Gaussian directions, slot t as long as the own z_t. All three are
  `realvr.diagnostics.replacements`.
* ``repeated``: the mean of the question's own K latents, in all K slots. The average content stays, the order and the
  differences between the slots go.
* ``dummies``: the embeddings of K ordinary tokens (``--dummy``, by default full stops) between the same markers. Equal
  compute after the prompt, but no content of the latents.
* ``removed``: ``<|lvr_start|><|lvr_end|>`` without slots. ``no-span``: no markers either.
* ``image-hidden``: own latents, but ``<|lvr_end|>`` and the answer cannot attend to visual tokens. The text of the
  question stands behind the picture and has read it, so that the answer may still get it from there.
* ``latents-only``: own latents, and the text of the prompt, ``<|lvr_end|>`` and the answer cannot attend to visual
  tokens. Only ``<|lvr_start|>`` and the slots can: what the answer knows of the picture came through them.

Estimators, over the n questions that have the condition: accuracy = right / n, an answer that cannot be read counts as
wrong; readable = answers that can be read / n; both with Wilson intervals. Difference = mean over questions of
[right under the condition] - [right with own latents], with a bootstrap interval over questions. Changed = answers that
differ from the one with own latents / questions with both readable. Inputs that a model has never seen (noise,
dummies, no span) can break its format: read no accuracy without the readable share beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from pydantic import Field, field_validator
from typing_extensions import override

from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.controls_summary import CONDITIONS, Controls, condition_of, summarise_controls
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import by_number
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.replacements import REPLACEMENTS
from realvr.errors import UserError
from realvr.runs.journal import Record
from realvr.widgets import DASH, FEW_PAIRS, Cell, Figures, Fold, Table, Text, Widget, interval, number, share
from realvr.widgets.browser import Facts, Panel
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ControlsSettings(AnswerSettings):
    """Which controls."""

    conditions: tuple[str, ...] = Field(
        default=tuple(CONDITIONS), description=f"Conditions beside the own latents: {', '.join(CONDITIONS)}."
    )
    dummy: str = Field(default=".", description="Text whose tokens fill the K slots as dummies, over and over.")
    seed: int = Field(default=0, description="Fixes the noise and whose latents each question gets.")
    by: str = Field(default="arrows", description="Tag whose values get rows of their own.")

    @field_validator("conditions")
    @classmethod
    def _there(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in CONDITIONS]
        if unknown:
            raise UserError(f"--conditions: there is no '{unknown[0]}'; choose from {', '.join(CONDITIONS)}")
        return tuple(name for name in CONDITIONS if name in (*names, "free"))

    @field_validator("dummy")
    @classmethod
    def _some(cls, text: str) -> str:
        if not text:
            raise UserError("--dummy is empty: give a text such as '.'")
        return text


class ControlsTest(Diagnostic[ControlsSettings]):
    """Accuracy with the latents replaced, the slots removed, or the image hidden."""

    name = "controls"
    title = "Controls of the latents"
    question = "Does the answer need these latents, or would anything in their place do?"
    reading = (
        "Every question is answered again with something else in the span. Latents matter where answers change with "
        "another sample's latents and can still be read: those are inputs of the kind that the model knows. A fall "
        "together with the readable share may only mean that the input is strange to the model. Difference: to the "
        "own latents, question by question."
    )
    needs = Needs(span=True)
    paper = ""
    Settings = ControlsSettings
    shape = Controls
    batch = 32
    order = 50
    examples = (64, 500)
    highlights = (
        Highlight(
            "answers that change with another's latents, %",
            lambda summary: _changed(summary),
            "Another's latents: the span is filled with those of another question; of answers readable both times.",
        ),
    )

    @override
    def prepare(self, model: Model, samples: Sequence[Any]) -> None:
        from realvr.diagnostics.measuring.replacing import Replacing

        kinds = [kind for kind in REPLACEMENTS if kind in self.settings.conditions]
        self._replacing = Replacing(model, samples, kinds, self.settings.seed, batch=self.batch)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.controls import ControlOptions, control_records

        settings = self.settings
        options = ControlOptions(settings.conditions, settings.dummy, settings.policy, model.sampling)
        reading = model.read(samples)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        groups = {sample.id: sample.tags.get(settings.by, "") for sample in samples}
        for record in control_records(model.backbone, reading, self._replacing, options):
            yield record | {"group": groups[record["id"]]}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_controls(records, self.settings.dummy, self.settings.seed, self.settings.by)

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        equal = summary["sham"]["equal_replies"]
        if equal["count"] < equal["of"]:
            found.append(
                f"{equal['of'] - equal['count']} of {equal['of']} replies change when the own latents are put back: "
                "that much of every change may be rounding (--dtype float32 avoids it)"
            )
        for one in summary["conditions"]:
            if one["questions"] < summary["questions"]:
                lacking = summary["questions"] - one["questions"]
                words = CONDITIONS[one["condition"]]
                found.append(f"{words}: {lacking} of {summary['questions']} questions do not have it (n differs)")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        called = {"controls_another": "another", "controls_noise": "noise", "controls_dummies": "dummies"}
        if summary is None:
            return dict.fromkeys(called)
        found = {name: condition_of(summary, condition) for name, condition in called.items()}
        return {
            name: None
            if one is None
            else {
                "rate": one["accuracy"]["rate"],
                "ci": [one["accuracy"]["low"], one["accuracy"]["high"]],
                "n": one["questions"],
                "readable": one["readable"]["rate"],
            }
            for name, one in found.items()
        }

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        figures = [(one.name, _forest(one)) for one in results if one.summary["questions"]]
        drawn: list[Widget] = [Figures("Right answers, %, by what fills the span", figures)] if figures else []
        told = [
            Text(
                f"{one.name}: guessing would be right in {number(100 * one.summary['guessing']['mean'])} % of the "
                f"{one.summary['guessing']['pairs']} questions with options; dummies are {one.summary['dummy']!r}."
            )
            for one in results
            if one.summary["guessing"]["mean"] is not None
        ]
        return [*drawn, _table(results), *told, *_by_group(results)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        names = [name for name in CONDITIONS if any(condition_of(one.summary, name) for one in results)]
        drawing, axes = figures.new(2, 1, height=5.2, sharex=True)
        above, below = axes[:, 0]
        figures.panel(above, "a", "right answers (bars) and answers that can be read (marks)")
        figures.panel(below, "b", "difference to the own latents, question by question")
        if not names:
            figures.empty(above)
            figures.empty(below)
            return drawing
        words = [CONDITIONS[name] for name in names]
        numbers = [one.number for one in results]
        figures.bars(above, words, _series(results, names, "accuracy"), numbers, percent=True, tilt=30)
        above.tick_params(axis="x", labelbottom=False)
        _mark_readable(above, results, names)
        figures.bars(below, words, _series(results, names, "difference"), numbers, tilt=30)
        below.axhline(0, color="#444444", linewidth=0.8)
        below.set_ylabel("points")
        return drawing

    @override
    def panel(self, record: Record) -> Panel | None:
        if record.get("error") is not None:
            return None
        rows = [
            [CONDITIONS[name], DASH if said is None else str(said), record["texts"][name].strip()]
            for name, said in record["extracted"].items()
            if name in CONDITIONS
        ]
        return Panel([Facts(rows, header=("span", "answer", "reply"))], note=f"Right: {record['truth']}.")


# ---------------------------------------------------------------------- tables and figures


def _changed(summary: OwnSummary) -> Cell:
    found = condition_of(summary, "another")
    return Cell(DASH) if found is None else share(found["changed"])


def _points(found: dict[str, Any]) -> Cell:
    """A mean difference in points of percent."""
    if found["mean"] is None:
        return Cell(DASH)
    below = interval((100 * found["low"], 100 * found["high"]), 1, True)
    return Cell(number(100 * found["mean"], 1, True), below, found["pairs"] < FEW_PAIRS, 100 * found["mean"])


def _table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [
            one.name,
            CONDITIONS[found["condition"]],
            str(found["questions"]),
            share(found["accuracy"], counts=False),
            share(found["readable"], counts=False),
            share(found["accuracy_readable"], counts=False),
            _points(found["difference"]),
            share(found["changed"], counts=False),
        ]
        for one in results
        for found in one.summary["conditions"]
    ]
    header = ["arm", "span", "n", "right, %", "readable, %", "right of readable, %", "difference", "changed, %"]
    note = (
        "Right: of all n, what cannot be read is wrong; Wilson intervals. Difference: points to the own latents, "
        "paired, bootstrap interval. Changed: other answer than with the own latents, where both can be read."
    )
    return Table("Answers by what fills the span", header, rows, note)


def _by_group(results: Sequence[Shown]) -> list[Widget]:
    """Right answers by the value of the tag, a column each."""
    groups = sorted({group for one in results for group in one.summary["groups"]}, key=by_number)
    if not groups:
        return []
    rows: list[list[Cell | str]] = []
    for one in results:
        for whole in one.summary["conditions"]:
            name = whole["condition"]
            found = [condition_of({"conditions": one.summary["groups"].get(group, [])}, name) for group in groups]
            cells = [Cell(DASH) if entry is None else share(entry["accuracy"], counts=False) for entry in found]
            rows.append([one.name, CONDITIONS[name], *cells])
    tag = results[0].summary["by"]
    return [Fold(f"By {tag}", [Table(f"Right, %, by {tag}", ["arm", "span", *groups], rows)])]


def _forest(shown: Shown) -> Markup:
    known = [one for one in shown.summary["conditions"] if one["accuracy"]["rate"] is not None]
    bars = [
        Bar(CONDITIONS[one["condition"]], 100 * found["rate"], 100 * found["low"], 100 * found["high"], shown.number)
        for one in known
        for found in [one["accuracy"]]
    ]
    spoken = "; ".join(
        f"{CONDITIONS[one['condition']]} {number(100 * one['accuracy']['rate'])} "
        f"(readable {number(100 * one['readable']['rate'])})"
        for one in known
    )
    return forest(bars, f"{shown.name}: right answers, % with 95 % intervals: {spoken}.", "% right")


def _series(results: Sequence[Shown], names: Sequence[str], what: str) -> list[Any]:
    """Bars of each model in percent: label, values, low and high."""
    centre = "mean" if what == "difference" else "rate"

    def column(one: Shown, key: str) -> list[float | None]:
        found = [condition_of(one.summary, name) for name in names]
        values = [None if entry is None else entry[what][key] for entry in found]
        return [None if value is None else 100 * value for value in values]

    return [(one.name, column(one, centre), column(one, "low"), column(one, "high")) for one in results]


def _mark_readable(axes: Axes, results: Sequence[Shown], names: Sequence[str]) -> None:
    """A short line above each bar at the share of answers that can be read, and the level of guessing."""
    width = 0.8 / max(1, len(results))
    for place, one in enumerate(results):
        for group, name in enumerate(names):
            found = condition_of(one.summary, name)
            if found is not None and found["readable"]["rate"] is not None:
                left, level = group - 0.4 + width * place, 100 * found["readable"]["rate"]
                label = "readable" if (place, group) == (0, 0) else "_"  # matplotlib leaves such labels out
                axes.hlines(level, left, left + 0.92 * width, color="black", linewidth=1.4, label=label)
    guessing = next((one.summary["guessing"]["mean"] for one in results if one.summary["guessing"]["mean"]), None)
    if guessing is not None:
        axes.axhline(100 * guessing, color="#444444", linestyle=":", linewidth=1, label="guessing")
    axes.legend(ncols=len(results) + 2, loc="lower center", bbox_to_anchor=(0.5, 1.12))
