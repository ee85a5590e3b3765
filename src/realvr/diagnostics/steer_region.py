"""Steering to any region (ours): do later latents and the answer react to where a latent is put? For any boxes.

z_t is replaced by the mean visual token of another region of the same picture, and the recurrence goes on by itself.
The region has the shape of the t-th evidence box (the last repeated) in visual tokens, lies outside all evidence of
that picture, and is drawn evenly by ``--seed``, the sample's id and the step. Questions without such a region are
counted with the reason. Which answer would follow is not known (`steer` is for data that knows it), so the numbers are

* ``toward``: the mean over s > t of cos(z_s, v) - cos(z_s free, v), with v the region's vector: do later latents stay
  near the region? Above zero they do. A model that *goes on* from the region need not stay near it;
* ``inside``: percentage of later latents whose nearest visual token is in the region;
* ``changed``: percentage of answers that differ from the free-running one, of those that parse in both;
* ``right``: percentage of right answers, with ``free`` as the reference.

Sham ``own_place``: the mean visual token of the t-th evidence box. Control ``random``: a random vector with the norm of
the region's. By step and by distance between the middles of region and evidence box, in visual tokens (groups 1, 2,
3-4, …); a question is one value, the mean over its steps, with a bootstrap interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.data import with_shown_boxes
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.steer import SteerSettings, _BySteps
from realvr.diagnostics.steer_figure import Panel, by_distance, by_step, conditions_figure, distance_words
from realvr.diagnostics.steer_panels import steer_region_panel
from realvr.diagnostics.steer_summary import by_distance as group_by_distance
from realvr.diagnostics.steer_summary import by_question
from realvr.runs.journal import Record
from realvr.widgets import Cell, Table, Text, Widget, average
from realvr.widgets.browser import Panel as CasePanel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {"moved": "another region", "own_place": "the evidence box", "random": "random direction"}
_Values = dict[str, Callable[[Record], float | None]]


class RegionNumbers(TypedDict):
    """Means over questions, by condition."""

    questions: int
    toward: dict[shapes.Text, shapes.Mean]
    inside: dict[shapes.Text, shapes.Mean]
    changed: dict[shapes.Text, shapes.Mean]
    right: dict[shapes.Text, shapes.Mean]


class RegionStep(RegionNumbers):
    """One replaced latent."""

    step: int
    skipped: dict[shapes.Text, int]


class RegionDistance(RegionNumbers):
    """Regions ``near`` … ``far`` visual tokens from the evidence box."""

    near: int
    far: int


class Summary(RegionNumbers):
    """``steer-region.json``."""

    latents: int
    steps: list[RegionStep]
    distances: list[RegionDistance]
    errors: int
    settings: NotRequired[shapes.Settings]


class RegionSettings(SteerSettings):
    """Which latents are replaced."""

    seed: int = Field(default=0, description="Fixes the region of each question, alike for every model.")


class SteerRegion(_BySteps[RegionSettings]):
    """A latent is replaced by another region of the picture; later latents and the answer may react."""

    name = "steer-region"
    title = "Steering to any region"
    question = "Do later latents and the answer react to where a latent is put?"
    reading = (
        "z_t is replaced by another region of the same picture, as large as the evidence, and the recurrence goes on. "
        "Toward: gain in cosine of later latents to the region. Changed: answers other than without the move. The sham "
        "is the evidence box itself; the control is a random vector of the same length."
    )
    needs = Needs(boxes=True, span=True)
    paper = ""
    Settings = RegionSettings
    shape = Summary
    batch = 16
    order = 37
    examples: ClassVar[tuple[int, int]] = (48, 512)
    highlights = (
        Highlight(
            "cosine that later latents gain to a region",
            lambda summary: average(summary["toward"]["moved"], 3),
            "Region: where an earlier latent was moved to.",
            overview=False,
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.steer_region import steer_regions

        shown, hidden = with_shown_boxes(samples)
        for sample, error in hidden:
            yield self.failed(sample, error)
        yield from steer_regions(model.backbone, shown, self.options(model))

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        moved = [record for record in good if record["skipped"] is None]
        return {
            "latents": moved[0]["latents"] if moved else 0,
            **_numbers(moved),
            "steps": [_step(t, [r for r in good if r["step"] == t]) for t in sorted({r["step"] for r in good})],
            "distances": group_by_distance(moved, _numbers),
            "errors": len(records) - len(good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        return super().notes(records, summary, count) + _skipped(summary)

    @override
    def panels(self, records: Sequence[Record]) -> list[CasePanel | None]:
        return [steer_region_panel(records)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        steps = [(one.name, f"z_{step['step']}", step) for one in results for step in one.summary["steps"]]
        far = [(one.name, distance_words(row), row) for one in results for row in one.summary["distances"]]
        told = [Text(f"{one.name}: {line}.") for one in results for line in _skipped(one.summary)]
        tables: list[Widget] = [_table("A latent put to another region", "replaced", steps)]
        return [*tables, *([_table("By distance", "visual tokens from the evidence", far)] if far else []), *told]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        step = "replaced latent t"
        panels = [
            Panel(
                "Latents toward region",
                step,
                by_step(results, lambda s, c: s["toward"][c], CONDITIONS),
                "gain in cosine",
            ),
            Panel("Answers that change", step, by_step(results, lambda s, c: s["changed"][c], CONDITIONS)),
            Panel("Answers that change", "distance, visual tokens", by_distance(results, CONDITIONS, "changed")),
        ]
        return conditions_figure(results, panels)


def _value(name: str, condition: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found = record[name][condition]
        if name == "inside":
            return 100.0 * sum(found) / len(found) if found else None
        if name == "toward" or found is None:
            return found  # type: ignore[no-any-return]
        return 100.0 * found

    return value


def _numbers(records: Sequence[Record]) -> dict[str, Any]:
    conditions = {"right": ("free", *CONDITIONS)}
    return {
        "questions": len({record["id"] for record in records}),
        **{
            name: {c: by_question(records, _value(name, c)) for c in conditions.get(name, tuple(CONDITIONS))}
            for name in ("toward", "inside", "changed", "right")
        },
    }


def _step(step: int, records: Sequence[Record]) -> dict[str, Any]:
    skipped = Counter(record["skipped"] for record in records if record["skipped"] is not None)
    numbers = _numbers([record for record in records if record["skipped"] is None])
    return {"step": step, **numbers, "skipped": dict(sorted(skipped.items()))}


def _skipped(summary: OwnSummary) -> list[str]:
    return [
        f"z_{step['step']}: {count} questions are left out because {reason}"
        for step in summary["steps"]
        for reason, count in step["skipped"].items()
    ]


def _table(caption: str, head: str, found: Sequence[tuple[str, str, Any]]) -> Table:
    columns = [
        (name, condition, digits)
        for name, digits in (("toward", 3), ("inside", 1), ("changed", 1))
        for condition in CONDITIONS
    ]
    columns += [("right", condition, 1) for condition in ("free", "moved")]
    rows: list[list[Cell | str]] = [
        [arm, at, str(row["questions"])]
        + [average(row[name][condition], digits, name == "toward") for name, condition, digits in columns]
        for arm, at, row in found
    ]
    words = CONDITIONS | {"free": "without a move"}
    units = {"toward": "toward the region", "inside": "in the region, %", "changed": "changed, %", "right": "right, %"}
    header = ["arm", head, "n", *(f"{units[name]}: {words[condition]}" for name, condition, _ in columns)]
    return Table(caption, header, rows, "A question is one value; bootstrap intervals over questions.")
