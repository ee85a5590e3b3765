"""Training curves: one small figure per metric, arms overlaid, stages apart because their losses are not comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.report.results import Arm, Json, Results
from realvr.report.scores import last_tenth
from realvr.widgets import Cell, Figures, Fold, Key, Section, Table, Text, missing, number
from realvr.widgets.charts import Line, Point, lines

MOST_POINTS = 100
COMMAND = "realvr train rl CONFIG --run.out DIR"
_METRICS = {
    "rl": {
        "reward": "Reward",
        "evidence/margin": "Evidence margin g",
        "evidence/cos_positive": "Cosine to p⁺",
        "evidence/cos_hardest_negative": "Cosine to the hardest negative",
        "evidence/active_hinge": "Slots with an active hinge",
        "loss": "Loss",
        "reward/accuracy": "Accuracy reward",
        "reward/format": "Format reward",
        "evidence/credit_mass": "Credit mass Σγ",
        "loss/policy": "Policy loss",
        "loss/evidence": "Evidence loss",
        "groups/without_variance": "Groups without variance",
        "policy/entropy": "Entropy, nats",
        "policy/kl": "KL from the starting policy",
        "completions/tokens": "Tokens per completion",
        "latents/adjacent_cosine": "Cosine of adjacent latents",
        "grad_norm": "Gradient norm",
    },
    "sft": {
        "loss": "Loss",
        "loss/next_token": "Next-token loss",
        "loss/reconstruction": "Reconstruction loss",
        "latents/cos_target": "Cosine of states to their targets",
        "latents/cos_first": "Cosine of the first latent to its target",
        "grad_norm": "Gradient norm",
    },
    "base": {
        "loss": "Loss",
        "loss/next_token": "Next-token loss",
        "loss/caption": "Caption loss",
        "loss/dense": "Dense loss",
        "grad_norm": "Gradient norm",
    },
}
_FIRST = {"reward", "evidence/margin", "evidence/cos_positive", "evidence/active_hinge", "loss", "latents/cos_target"}
"""Metrics that are shown at once, with those listed before them."""
_TITLES = {"base": "Base model", "sft": "Stage 1: reconstruction", "rl": "Stage 2: reinforcement learning"}
_LAST = {
    "rl": ("reward", "evidence/margin", "evidence/cos_positive", "evidence/active_hinge", "loss"),
    "sft": ("loss", "loss/next_token", "loss/reconstruction", "latents/cos_target", "latents/cos_first"),
    "base": ("loss", "loss/next_token", "loss/caption", "loss/dense"),
}


def stage(steps: Sequence[Json]) -> str:
    """Which command wrote these metrics."""
    names = {name for step in steps for name in step}
    return "rl" if "reward" in names else "sft" if "loss/reconstruction" in names else "base"


def training(results: Results) -> Section:
    section = Section("training", "Training")
    by_stage: dict[str, list[Arm]] = {name: [] for name in _TITLES}
    for arm in results.having("train"):
        result = arm.results["train"]
        with result.reading():
            by_stage[stage(result.content["steps"])].append(arm)
    for name, arms in by_stage.items():
        if arms:
            section.widgets += [Text(_TITLES[name], "heading"), *_stage(name, arms)]
    if not section.widgets:
        section.widgets += missing(COMMAND)
    return section


def _stage(name: str, arms: Sequence[Arm]) -> list[Any]:
    figures: list[tuple[str, Any]] = []
    widest, first = 1, 0
    for metric, words in _METRICS[name].items():
        series, spoken = [], []
        for arm in arms:
            with arm.results["train"].reading():
                points, width = curve(arm.results["train"].content["steps"], metric)
            if points:
                widest = max(widest, width)
                series.append(Line(arm.name, points, arm.number, arm=arm.number))
                spoken.append(f"{arm.name} from {_short(points[0].y)} to {_short(points[-1].y)}")
        if series:
            alt = f"{words} over training steps: {'; '.join(spoken)}."
            figures.append((words, lines(series, alt, "step", "")))
            first = len(figures) if metric in _FIRST else first
    note = "Every step as it was logged." if widest == 1 else f"Each point is the mean of up to {widest} steps."
    keys = [Key(arm.number, arm.name) for arm in arms]

    def shown(which: Sequence[tuple[str, Any]], id: str) -> Figures:
        return Figures(_TITLES[name], which, keys, switch=True, note=note, id=id)

    widgets: list[Any] = [shown(figures[:first], f"curves-{name}")]
    if figures[first:]:
        widgets.append(Fold("More curves", [shown(figures[first:], f"more-{name}")]))
    return [*widgets, _last(name, arms)]


def curve(steps: Sequence[Json], metric: str) -> tuple[list[Point], int]:
    """At most `MOST_POINTS` points, each the mean over so many steps in a row (the second result) at their middle."""
    found = [(step["step"], float(step[metric])) for step in steps if step.get(metric) is not None]
    width = max(1, -(-len(found) // MOST_POINTS))
    points = []
    for start in range(0, len(found), width):
        part = found[start : start + width]
        points.append(Point(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return points, width


def _last(name: str, arms: Sequence[Arm]) -> Table:
    """Where each run ended."""
    rows: list[list[Cell | str]] = []
    for arm in arms:
        result = arm.results["train"]
        with result.reading():
            steps = result.content["steps"]
            planned = (result.settings.get("optim") or {}).get("steps")
            done = f"{steps[-1]['step']} of {planned}" if planned else str(steps[-1]["step"])
            minutes = sum(step.get("seconds") or 0.0 for step in steps) / 60
            skipped = steps[-1].get("skipped") or 0
            cells = [last_tenth(result, metric) for metric in _LAST[name]]
            method = str(result.settings.get("method", ""))
            rows.append([arm.name, method, done, number(minutes), f"{skipped:.0f}", *cells])
    words = [_METRICS[name][metric] for metric in _LAST[name]]
    header = ["arm", "method", "steps", "minutes", "skipped steps", *words]
    return Table(f"{_TITLES[name]}: mean of the last tenth of the steps", header, rows, "One run each: no interval.")


def _short(value: float) -> str:
    return f"{value:.3g}"
