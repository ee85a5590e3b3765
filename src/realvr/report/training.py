"""Training curves: one small figure per metric, arms overlaid, stages apart because their losses are not comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.report.results import Arm, Results
from realvr.report.scores import last_tenth
from realvr.training.records import STAGES, Metric, Step, TrainingRun, number_of
from realvr.widgets import Cell, Figures, Fold, Key, Section, Table, Text, number, significant
from realvr.widgets.charts import Line, Point, lines

MOST_POINTS = 100
COMMAND = "realvr train rl CONFIG --run.out DIR"
Run = tuple[Arm, TrainingRun]


def training(results: Results) -> Section:
    """The section of training curves, stage by stage."""
    section = Section("training", "Training")
    by_title: dict[str, list[Run]] = {title: [] for title, _ in STAGES.values()}
    for arm in results.arms:
        if arm.train is not None:
            by_title.setdefault(arm.train.about["title"], []).append((arm, arm.train))
    seen: list[str] = []
    for title, runs in by_title.items():
        if runs:
            stage = runs[0][1].about["stage"]
            id = f"{stage}-{len(seen)}" if stage in seen else stage
            seen.append(stage)
            section.widgets += [Text(title, "heading"), *_stage(title, id, runs)]
    if not section.widgets:
        section.command = COMMAND
    return section


def _metrics(runs: Sequence[Run]) -> list[Metric]:
    """Metrics of these runs, each once, in the order of the first that has it."""
    found: dict[str, Metric] = {}
    for _, run in runs:
        for metric in run.about["metrics"]:
            found.setdefault(metric["name"], metric)
    return list(found.values())


def _stage(title: str, id: str, runs: Sequence[Run]) -> list[Any]:
    first: list[tuple[str, Any]] = []
    more: list[tuple[str, Any]] = []
    widest = 1
    for metric in _metrics(runs):
        series, spoken = [], []
        for arm, run in runs:
            points, width = curve(run.steps, metric["name"])
            if points:
                widest = max(widest, width)
                series.append(Line(arm.name, points, arm.number, arm=arm.number))
                spoken.append(f"{arm.name} from {significant(points[0].y)} to {significant(points[-1].y)}")
        if series:
            alt = f"{metric['title']} over training steps: {'; '.join(spoken)}."
            (first if metric.get("first") else more).append((metric["title"], lines(series, alt, "step", "")))
    note = "Every step as it was logged." if widest == 1 else f"Each point is the mean of up to {widest} steps."
    keys = [Key(arm.number, arm.name) for arm, _ in runs]

    def shown(which: Sequence[tuple[str, Any]], id: str) -> Figures:
        return Figures(title, which, keys, switch=True, note=note, id=id)

    widgets: list[Any] = [shown(first, f"curves-{id}")] if first else []
    if more:
        widgets.append(Fold("More curves", [shown(more, f"more-{id}")], open=not first))
    return [*widgets, _last(title, runs)]


def curve(steps: Sequence[Step], metric: str) -> tuple[list[Point], int]:
    """At most `MOST_POINTS` points, each the mean over so many steps in a row (the second result) at their middle."""
    found = [(number_of(step), float(value)) for step in steps if (value := step.get(metric)) is not None]
    width = max(1, -(-len(found) // MOST_POINTS))
    points = []
    for start in range(0, len(found), width):
        part = found[start : start + width]
        points.append(Point(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return points, width


def _last(title: str, runs: Sequence[Run]) -> Table:
    """Where each run ended."""
    shown = [metric for metric in _metrics(runs) if metric.get("last")]
    rows: list[list[Cell | str]] = []
    for arm, run in runs:
        done = f"{run.done} of {run.planned}" if run.planned else str(run.done)
        minutes = sum(step.get("seconds") or 0.0 for step in run.steps) / 60
        skipped = run.steps[-1].get("skipped") or 0
        cells = [last_tenth(run, metric["name"]) for metric in shown]
        rows.append([arm.name, run.about["method"], done, number(minutes), f"{skipped:.0f}", *cells])
    header = ["arm", "method", "steps", "minutes", "skipped steps", *(metric["title"] for metric in shown)]
    return Table(f"{title}: mean of the last tenth of the steps", header, rows, "One run each: no interval.")
