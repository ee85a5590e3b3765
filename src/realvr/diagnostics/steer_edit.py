"""Steering by an edited picture (ours): is a latent made of the edited object enough to change the answer?

For each pair whose right answer changes, the model sees the *original* picture. z_t is replaced by the mean of the
*edited* picture's visual tokens in the region that the edit changed, and the recurrence goes on by itself. The answer
follows if it becomes the right answer of the edited picture. The region: tokens whose pixels differ between the views,
of these only the edited view's evidence where it has any among them (an edit may touch other objects too); where pixels
do not tell, the evidence boxes of the edited view.

* sham ``original``: the original picture's tokens of the same region, put at the same step: the place without the edit;
* control ``random``: a random vector with the norm of the edited one;
* ``free``: the span as it is.

Shares of answers that follow, over pairs that have a region, by step (Wilson intervals), by edit and by the distance of
the region from the t-th evidence box in visual tokens (groups 0, 1, 2, 3-4, …; a pair is one value, the mean over its
steps). ``toward``: gain of the later latents' cosine to those of the edited view over the free-running span, mean over
the steps behind t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.edits import words
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import rate
from realvr.diagnostics.pairs import Pair, changed_pairs
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.steer import SteerSettings, _BySteps
from realvr.diagnostics.steer_figure import Panel, by_distance, by_step, conditions_figure, distance_words
from realvr.diagnostics.steer_panels import steer_edit_panel
from realvr.diagnostics.steer_summary import OUTCOMES, by_question, outcome
from realvr.diagnostics.steer_summary import by_distance as group_by_distance
from realvr.latent.steps import check_steps, parse_steps
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Text, Widget, average, share
from realvr.widgets.browser import Panel as CasePanel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL_STEPS = (2, 4, 6)
CONDITIONS = {"edited": "edited object", "original": "the same place, not edited", "random": "random direction"}


class EditStep(TypedDict):
    """What happens when one latent is replaced."""

    step: int
    pairs: int
    edited: shapes.Outcomes
    original: shapes.Outcomes
    random: shapes.Outcomes
    free: shapes.Outcomes
    toward: dict[shapes.Text, shapes.Mean]
    edits: dict[shapes.Text, dict[shapes.Text, shapes.Rate]]
    skipped: dict[shapes.Text, int]


class EditDistance(TypedDict):
    """Regions ``near`` … ``far`` visual tokens from the step's evidence: percentage of answers that follow."""

    near: int
    far: int
    edited: shapes.Mean
    original: shapes.Mean
    random: shapes.Mean


class Summary(TypedDict):
    """``steer-edit.json``."""

    latents: int
    pairs: int
    steps: list[EditStep]
    distances: list[EditDistance]
    errors: int
    settings: NotRequired[shapes.Settings]


class EditSettings(SteerSettings):
    """Which latents are replaced."""

    at: str | None = Field(
        default=None,
        description="Steps t whose latent is replaced, one at a time, separated by commas; by default 2,4,6 and the "
        "last, as far as the span has them. Other steps may be added to a folder later.",
    )
    seed: int = Field(default=0, description="Fixes the random direction of each pair, alike for every model.")

    @override
    def steps(self, latents: int) -> tuple[int, ...]:
        if self.at is None:
            return tuple(step for step in USUAL_STEPS if step < latents) + (latents,)
        steps = parse_steps(self.at, "--at")
        check_steps(steps, latents, "--at")
        return steps


class SteerEdit(_BySteps[EditSettings]):
    """A latent is replaced by the edited object's visual tokens; the answer may become that of the edited picture."""

    name = "steer-edit"
    title = "Steering by an edited picture"
    question = "Is a latent made of the edited object enough to change the answer?"
    reading = (
        "The model sees the original picture. z_t is replaced by the visual tokens of what the edit changed, taken "
        "from the edited picture, and the recurrence goes on. Follows: the answer is the edited picture's. The sham "
        "puts the same region of the original picture; the control is a random vector of the same length."
    )
    needs = Needs(pairs=True, span=True)
    paper = ""
    Settings = EditSettings
    shape = Summary
    batch = 16
    unit = "pairs"
    order = 36
    examples: ClassVar[tuple[int, int]] = (16, 256)
    highlights = (
        Highlight(
            "answers that follow an edited object in a latent, %",
            lambda summary: share(summary["steps"][0]["edited"]["new"]) if summary["steps"] else Cell(DASH),
            "Edited object: put into the first of the steps that were tried.",
            overview=False,
        ),
    )

    @override
    def select(self, items: Sequence[Pair], data: Path) -> list[Pair]:
        return changed_pairs(items, data)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.steer_edit import steer_pairs

        return steer_pairs(model.backbone, list(samples), self.options(model))

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        moved = [record for record in good if record["skipped"] is None]
        return {
            "latents": moved[0]["latents"] if moved else 0,
            "pairs": len({record["pair"] for record in moved}),
            "steps": [_step(t, [r for r in good if r["step"] == t]) for t in sorted({r["step"] for r in good})],
            "distances": group_by_distance(moved, _at_distance),
            "errors": len(records) - len(good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        return super().notes(records, summary, count) + _skipped(summary)

    @override
    def panels(self, records: Sequence[Record]) -> list[CasePanel | None]:
        return [steer_edit_panel(records)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        told = [Text(f"{one.name}: {line}.") for one in results for line in _skipped(one.summary)]
        return [_table(results), *_by_edit(results), *_distances(results), *told]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        panels = [
            Panel("Answers that follow", "replaced latent t", by_step(results, lambda s, c: s[c]["new"], CONDITIONS)),
            Panel("Answers that follow", "distance, visual tokens", by_distance(results, CONDITIONS)),
            Panel(
                "Latents toward the edit",
                "replaced latent t",
                by_step(results, lambda s, c: s["toward"][c], CONDITIONS),
                "gain in cosine",
            ),
        ]
        return conditions_figure(results, panels)


def _follows(condition: str) -> Callable[[Record], float]:
    return lambda record: (
        100.0 * (outcome(record | {"random": {"extracted": record["extracted"]["random"]}}, condition) == "new")
    )


def _outcomes(records: Sequence[Record], condition: str) -> dict[str, Any]:
    counts = Counter(outcome(record, condition) for record in records)
    return {name: rate(counts[name], len(records)) for name in OUTCOMES}


def _step(step: int, records: Sequence[Record]) -> dict[str, Any]:
    moved = [record for record in records if record["skipped"] is None]
    edits = dict.fromkeys(record["edit"] for record in moved)
    return {
        "step": step,
        "pairs": len(moved),
        **{name: _outcomes(moved, name) for name in (*CONDITIONS, "free")},
        "toward": {name: by_question(moved, lambda r, c=name: r["toward"][c], "pair") for name in CONDITIONS},  # type: ignore[misc]
        "edits": {
            edit: {name: _outcomes([r for r in moved if r["edit"] == edit], name)["new"] for name in CONDITIONS}
            for edit in edits
        },
        "skipped": dict(sorted(Counter(r["skipped"] for r in records if r["skipped"] is not None).items())),
    }


def _at_distance(records: Sequence[Record]) -> dict[str, Any]:
    return {name: by_question(records, _follows(name), "pair") for name in CONDITIONS}


def _skipped(summary: OwnSummary) -> list[str]:
    return [
        f"z_{step['step']}: {count} pairs are left out because {reason}"
        for step in summary["steps"]
        for reason, count in step["skipped"].items()
    ]


def _table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [one.name, f"z_{step['step']}", str(step["pairs"])]
        + [share(step["edited"][name], counts=False) for name in ("new", "old", "neither", "unreadable")]
        + [share(step[name]["new"], counts=False) for name in ("original", "random", "free")]
        + [average(step["toward"][name], 3) for name in CONDITIONS]
        for one in results
        for step in one.summary["steps"]
    ]
    header = [
        "arm",
        "replaced",
        "pairs",
        "follows the edit, %",
        "keeps the old answer, %",
        "neither, %",
        "unreadable, %",
    ]
    header += ["sham: follows, %", "random: follows, %", "free: follows, %"]
    header += ["later latents toward the edit", "sham: the same", "random: the same"]
    note = "Toward the edit: gain in cosine to the latents of the edited view, over the free-running span."
    return Table("A latent made of the edited object", header, rows, note)


def _by_edit(results: Sequence[Shown]) -> list[Widget]:
    rows: list[list[Cell | str]] = [
        [one.name, words(edit), f"z_{step['step']}", *(share(found[name]) for name in CONDITIONS)]
        for one in results
        for step in one.summary["steps"]
        for edit, found in step["edits"].items()
    ]
    header = ["arm", "edit", "replaced", "follows the edit, %", "sham: the same, %", "random: the same, %"]
    return [Table("By edit", header, rows)] if rows else []


def _distances(results: Sequence[Shown]) -> list[Widget]:
    rows: list[list[Cell | str]] = [
        [one.name, distance_words(row), str(row["edited"]["pairs"]), *(average(row[c], 1, False) for c in CONDITIONS)]
        for one in results
        for row in one.summary["distances"]
    ]
    header = ["arm", "visual tokens from the evidence", "pairs", "follows the edit, %", "sham, %", "random, %"]
    return [Table("By the distance of the edit from where the walk is", header, rows)] if rows else []
