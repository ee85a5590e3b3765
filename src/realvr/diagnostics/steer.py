"""Steering: does a thought go on from where it was moved to?

z_t is replaced by the visual token (or the mean of several) of another place of the picture, and the recurrence goes on
by itself. `steer_moves` has the rule for the place, `measuring.steer` does it, `steer_summary` has the numbers. Every
moved latent has two shams at the same step: the visual token of the sample's *own* place there, and z_t itself put
back, which must change nothing to the bit; and a control: a random vector with the norm of the one that is put.

Numbers: the share of answers that follow, by step (Wilson intervals) and by the distance of the place, rows plus
columns of the board from the own place (of the picture's visual tokens where there is no board), in groups 1, 2, 3-4,
5-8, …; there a question is one value, the mean over its steps, with a bootstrap interval. `steer_edit` moves a latent
to an edited object, `steer_region` to any region.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, field_validator
from typing_extensions import override

from realvr.data.sample import Sample
from realvr.diagnostics import results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Highlight, Item, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.steer_figure import Panel, by_distance, by_step, conditions_figure, distance_words
from realvr.diagnostics.steer_moves import check, steerable
from realvr.diagnostics.steer_panels import steer_panel
from realvr.diagnostics.steer_summary import summarise_steer
from realvr.errors import UserError
from realvr.latent.steps import check_steps, parse_steps
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Key, Table, Text, Widget, average, number, share
from realvr.widgets.browser import Panel as CasePanel
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realvr.diagnostics.measuring.steer import SteerOptions

USUAL_STEPS = (2, 4, 6)


class SteerSettings(AnswerSettings):
    """Which latents are replaced."""

    at: str | None = Field(
        default=None,
        description="Steps t whose latent is replaced, one at a time, separated by commas; by default those of 2,4,6 "
        "that have a latent behind them. Other steps may be added to a folder later.",
    )
    seed: int = Field(default=0, description="Fixes which place each question is moved to, alike for every model.")

    @field_validator("at")
    @classmethod
    def _numbers(cls, value: str | None) -> str | None:
        if value is not None:
            parse_steps(value, "--at")
        return value

    def steps(self, latents: int) -> tuple[int, ...]:
        """The steps of a span of K latents."""
        if self.at is None:
            return tuple(step for step in USUAL_STEPS if step < latents) or (1,)
        steps = parse_steps(self.at, "--at")
        check_steps(steps, latents, "--at")
        return steps


T = TypeVar("T", bound=SteerSettings)


class _BySteps(Diagnostic[T]):
    """What diagnostics with a record for every step of a sample or pair share. No diagnostic by itself: the underscore
    keeps it out of the registry. Steps can be added to a folder later, so they are not among what must not change."""

    @override
    def settle(self, model: Model) -> None:
        self._steps = self.settings.steps(model.latents)

    def options(self, model: Model) -> SteerOptions:
        """For the measurement."""
        from realvr.diagnostics.measuring.steer import SteerOptions

        settings = self.settings
        return SteerOptions(model.latents, self._steps, settings.seed, settings.policy, model.sampling)

    @override
    def key(self, record: Record) -> Hashable:
        return record[self.item], record.get("step")

    @override
    def keys(self, item: Item) -> list[Hashable]:
        return [(item.id, step) for step in self._steps]

    def complete(self, item: Item, done: Collection[Hashable]) -> bool:
        """What cannot be read has one record that says so."""
        return (item.id, None) in done or super().complete(item, done)

    @override
    def fixed(self) -> dict[str, Any]:
        return {"policy": self.settings.policy, "seed": self.settings.seed}


class Steer(_BySteps[SteerSettings]):
    """A latent is replaced by another place of the picture; later latents and the answer may go on from there."""

    name = "steer"
    title = "Steering"
    question = "Does the model go on from where a latent was moved to?"
    reading = (
        "z_t is replaced by the visual token of an arrow off the own trail, and the recurrence goes on by itself. The "
        "model is steered where the answer becomes that of the new trail and later latents lie on it; the sham, the "
        "visual token of the own place at the same step, should change neither."
    )
    needs = Needs(span=True)
    paper = ""
    Settings = SteerSettings
    shape = results.Steer
    command = "realvr steer MODEL DATA --out DIR"
    batch = 32
    order = 35
    examples: ClassVar[tuple[int, int]] = (64, 512)
    highlights = (
        Highlight(
            "answers that follow a moved latent, %",
            lambda summary: average(summary["follows"], 1, False),
            "Moved latent: z_t replaced by another place of the picture, averaged over the steps t.",
        ),
    )

    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        """Samples that say where a thought could be moved to."""
        found = [sample for sample in items if steerable(sample)]
        if not found:
            raise UserError(
                f"{data}: none of its {len(items)} samples has a trail (meta['trail']; `realvr world make OUT --split "
                "trails` makes some) or lists places to move to (meta['steer'])"
            )
        for sample in found:
            check(sample)
        self._left_out = len(items) - len(found)
        return found

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.steer import steer_samples

        return steer_samples(model.backbone, list(samples), self.options(model))

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_steer(records)

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        lines = super().notes(records, summary, count)
        if self._left_out:
            lines.append(f"{self._left_out} samples have no trail and list no places to move to; they are left out")
        return lines + [f"z_{step['step']}: {_skipped(step)}" for step in summary["steps"] if step["skipped"]]

    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        """By step: answers that follow the move, that keep the old answer, and that go there with the own place put."""
        places = {
            "steer_follows": ("moved", "new"),
            "steer_keeps": ("moved", "old"),
            "steer_sham": ("own_place", "new"),
        }
        if summary is None:
            return dict.fromkeys(places)

        def by_step(condition: str, outcome: str) -> dict[str, Any]:
            rates = {str(step["step"]): step[condition][outcome] for step in summary["steps"]}
            return {t: {"rate": x["rate"], "ci": [x["low"], x["high"]], "n": x["of"]} for t, x in rates.items()}

        return {name: by_step(*place) for name, place in places.items()}

    @override
    def panels(self, records: Sequence[Record]) -> list[CasePanel | None]:
        return [steer_panel(records)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        told = [
            Text(f"{result.name}, z_{step['step']}: {_skipped(step)}.")
            for result in results
            for step in result.summary["steps"]
            if step["skipped"]
        ]
        return [
            *_figures(results),
            _moved(results),
            _shams(results),
            *_progress(results),
            *_distances(results),
            *told,
        ]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        conditions = {"moved": "moved there", "own_place": "own place", "random": "random direction"}
        panels = [
            Panel("Answers that follow", "replaced latent t", by_step(results, lambda s, c: s[c]["new"], conditions)),
            Panel("Answers that follow", "distance, cells", by_distance(results, conditions)),
            Panel(
                "Later latents follow",
                "replaced latent t",
                by_step(results, lambda s, c: s[f"later_{c}"], {k: conditions[k] for k in ("moved", "random")}),
            ),
        ]
        return conditions_figure(results, panels)


def _skipped(step: Mapping[str, Any]) -> str:
    reasons = "; ".join(f"{count} because {reason}" for reason, count in step["skipped"].items())
    return f"{sum(step['skipped'].values())} questions are not moved: {reasons}"


# ---------------------------------------------------------------------- tables and figures

_SERIES = (
    ("follows the move", lambda step: step["moved"]["new"], False),
    ("keeps the old answer", lambda step: step["moved"]["old"], False),
    ("later latents on the new trail", lambda step: step["later_moved"], True),
    ("own place put there: follows the move", lambda step: step["own_place"]["new"], True),
)


def _figures(results: Sequence[Shown]) -> list[Widget]:
    """Shares over the step, one figure a model."""
    figures = []
    for result in results:
        drawn = []
        for place, (words, value, dashed) in enumerate(_SERIES):
            found = [(step["step"], _percent(value(step))) for step in result.summary["steps"]]
            points = [Point(step, *three) for step, three in found if three is not None]
            if points:
                drawn.append(Line(words, points, place, dashed))
        if drawn:
            spoken = "; ".join(
                f"{line.name} " + ", ".join(f"{number(p.y)} % at z_{p.x:.0f}" for p in line.points) for line in drawn
            )
            alt = f"{result.name}: shares by the latent that is replaced. {spoken}."
            figures.append((result.name, lines(drawn, alt, "replaced latent t", "%", [0.0, 100.0])))
    keys = [Key(place, words, dashed) for place, (words, _, dashed) in enumerate(_SERIES)]
    return [Figures("Answers and latents after a moved latent", figures, keys)] if figures else []


def _percent(found: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """A rate or a mean of percentages, with its interval."""
    if "mean" in found:
        return None if found["mean"] is None else (found["mean"], found["low"], found["high"])
    return None if found["rate"] is None else tuple(100 * found[key] for key in ("rate", "low", "high"))  # type: ignore[return-value]


def _rows(results: Sequence[Shown]) -> Iterable[tuple[list[Cell | str], Any]]:
    for result in results:
        for step in result.summary["steps"]:
            yield [result.name, f"z_{step['step']}"], step


def _moved(results: Sequence[Shown]) -> Table:
    rows = [
        [*head, str(step["questions"])]
        + [share(step["moved"][name], counts=False) for name in ("new", "old", "neither", "unreadable")]
        + [average(step["later_moved"], 1, False), share(step["free"]["old"], counts=False)]
        for head, step in _rows(results)
    ]
    header = ["arm", "replaced", "n", "follows the move, %", "keeps the old answer, %", "neither, %"]
    header += ["unreadable, %", "later latents on the new trail, %", "right without a move, %"]
    note = (
        "Later latents: of those behind the replaced one, the share whose nearest visual token lies in the cell that "
        "comes next on the new trail, the last repeated; mean over questions with a bootstrap interval. Shares of "
        "answers: Wilson intervals."
    )
    return Table("A latent moved to another trail", header, rows, note)


def _shams(results: Sequence[Shown]) -> Table:
    rows = [
        [*head, share(step["own_place"]["old"]), share(step["own_place"]["new"], counts=False)]
        + [average(step["later_own_place"], 1, False), average(step["later_free"], 1, False)]
        + [share(step["random"]["new"], counts=False) if "random" in step else Cell(DASH), share(step["unchanged"])]
        for head, step in _rows(results)
    ]
    header = ["arm", "replaced", "own place: keeps the old answer, %", "own place: follows the move, %"]
    header += ["own place: later latents on the own trail, %", "free-running: the same, %"]
    header += ["random direction: follows the move, %", "z_t put back: nothing changes to the bit, %"]
    note = (
        "Own place: the visual token of the cell where the own trail is at this step, put there in the same way. "
        "Random direction: a random vector as long as the moved one."
    )
    return Table("Shams", header, rows, note)


def _progress(results: Sequence[Shown]) -> list[Table]:
    """Apart: moved while the own trail goes on, and after it has ended."""
    rows: list[list[Cell | str]] = [
        [*head, words, share(step[key]["new"]), share(step[key]["old"], counts=False)]
        for head, step in _rows(results)
        for key, words in (("under_way", "goes on"), ("ended", "has ended"))
        if step[key]["new"]["of"] and step["ended"]["new"]["of"]
    ]
    header = ["arm", "replaced", "the own trail", "follows the move, %", "keeps the old answer, %"]
    note = "Has ended: the own trail is at its circle at this step, where the latents would have stayed."
    return [Table("By whether the own trail has ended", header, rows, note)] if rows else []


def _distances(results: Sequence[Shown]) -> list[Table]:
    rows: list[list[Cell | str]] = [
        [result.name, distance_words(row), str(row["moved"]["pairs"])]
        + [average(row[name], 1, False) for name in ("moved", "own_place", "random", "later_moved")]
        for result in results
        for row in result.summary.get("distances", ())
    ]
    header = ["arm", "cells from the own place", "questions", "follows the move, %", "own place: the same, %"]
    header += ["random direction: the same, %", "later latents on the new trail, %"]
    note = "Rows plus columns between the own place and the new one. A question is one value, the mean over its steps."
    return [Table("By the distance of the place", header, rows, note)] if rows else []
