"""Sections made of evaluations: benchmarks, ablations of the span, latent budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realvr.evaluation import tables
from realvr.evaluation.benchmark import benchmark_of, eval_command, title
from realvr.evaluation.effects import TITLES, effects
from realvr.evaluation.five_tasks import five_title, in_order
from realvr.evaluation.results import AnyBench, AnySummary, Summary, is_spread
from realvr.evaluation.scoring import ABLATIONS
from realvr.report.results import Arm, Evaluation, Results
from realvr.training.records import TrainingRun
from realvr.widgets import (
    DASH,
    FEW_QUESTIONS,
    Cell,
    Figures,
    Fold,
    Key,
    Section,
    Switch,
    Table,
    Text,
    interval,
    number,
    significant,
)
from realvr.widgets.charts import Bar, Line, Point, forest, lines

Found = Mapping[str, Any]
"""A score, an effect or a difference of a summary, under whatever condition."""


def bench_names(arms: Sequence[Arm]) -> list[str]:
    """Benchmarks of these arms, the five first."""
    return in_order({name for arm in arms if arm.eval is not None for name in arm.eval.summary["benches"]})


def evaluated(arms: Sequence[Arm]) -> list[tuple[Arm, AnySummary]]:
    """Arms with an evaluation, and its summary."""
    return [(arm, arm.eval.summary) for arm in arms if arm.eval is not None]


def rule_missing(results: Evaluation) -> set[str]:
    """Benchmarks of an evaluation that were scored by a rule which is not loaded, such as that of a plugin."""
    benches: Mapping[str, AnyBench] = {**results.summary["benches"]}
    return {name for name, entry in benches.items() if entry["metric"] != benchmark_of(name).rule.metric}


def score_cell(entry: Found | None, read: bool = False) -> Cell:
    """A headline with its 95 % interval, or mean ± standard deviation over checkpoints; with ``read``, the share of
    readable replies."""
    if entry is None:
        return Cell(DASH)
    share = f"\n{number(entry['coverage'])} % read" if read and entry.get("coverage") is not None else ""
    if "values" in entry:
        below = f"± {number(entry['std'])}, {entry['n']} runs" if entry["std"] is not None else f"{entry['n']} run"
        return Cell(number(entry["mean"]), below + share, value=entry["mean"])
    value = entry.get("headline", entry.get("mean"))
    few = "n" in entry and entry["n"] < FEW_QUESTIONS
    return Cell(number(value), (interval(entry["ci"]) + share).strip(), few, value)


def effect_cell(effect: Found | None, read: bool = False) -> Cell:
    """Help or dependence in points with its interval and, with ``read``, the share of readable replies."""
    if effect is None:
        return Cell(DASH)
    std = effect.get("std")
    below = interval(effect["ci"], sign=True) if "ci" in effect else "" if std is None else f"± {number(std)}"
    if read and effect["read"] is not None:
        below += f"\n{number(effect['read'])} % read"
    few = "ci" in effect and "n" in effect and effect["n"] < FEW_QUESTIONS
    return Cell(number(effect["points"], sign=True), below.strip(), few, effect["points"])


def difference_cell(entry: Found | None, p: bool = False) -> Cell:
    """A difference in points with its interval (over checkpoints: standard deviation). Between two models it is the
    gain by the paper's rule, of the displayed scores."""
    found = (entry or {}).get("difference")
    if entry is None or found is None:
        return Cell(DASH)
    if isinstance(found, dict):
        below = f"± {number(found['std'])}" if found["std"] is not None else ""
        return Cell(number(found["mean"], sign=True), below, value=found["mean"])
    below = interval(entry["difference_ci"], sign=True)
    if p and entry.get("p") is not None:
        below += f"\np = {significant(entry['p'], 2)}"
    few = "common" in entry and entry["common"] < FEW_QUESTIONS
    return Cell(number(entry.get("gain", found), sign=True), below, few, found)


def means(summary: AnySummary) -> Mapping[str, Found]:
    """Conditions of the five-task mean, or of the mean over whatever tasks there are; empty for neither."""
    return summary.get("five_task_mean") or summary.get("task_mean") or {}


def mean_title(tasks: Sequence[str], five: bool) -> str:
    """What the mean over these tasks is called."""
    return (
        five_title(tasks) if five else f"mean of {len(tasks)} tasks" if len(tasks) > 1 else f"{title(tasks[0])} alone"
    )


def last_tenth(run: TrainingRun | None, metric: str) -> Cell:
    """Mean of a metric over the last tenth of the steps (at least one)."""
    values = [value for step in run.steps if (value := step.get(metric)) is not None] if run is not None else []
    last = values[-max(1, len(values) // 10) :]
    if not last:
        return Cell(DASH)
    mean = sum(last) / len(last)
    return Cell(number(mean, 3), f"{len(last)} of {len(values)} steps", value=mean)


# ---------------------------------------------------------------------- benchmarks


def benchmarks(results: Results, published: Callable[[Sequence[str]], list[Any]]) -> Section:
    """Every score with what is needed to judge it. ``published`` makes the paper's columns for the benchmarks of which
    the published set was asked."""
    section = Section("benchmarks", "Benchmarks")
    rows: list[list[Cell | str]] = []
    folds: list[Fold] = []
    whole: set[str] = set()
    for arm, summary in evaluated(results.arms):
        for name, entry in summary["benches"].items():
            rows.append(_score_row(arm, name, entry))
            whole |= {name} if entry.get("not_published_set") == "" else set()
        if fold := _details(arm, summary):
            folds.append(fold)
    if rows:
        header = ["arm", "benchmark", "score, %", "metric", "answers read by", "K", "questions", "published set"]
        header += ["read, %", "unread", "errors"]
        note = (
            "Published set: whether the questions are those of the published benchmark, and if not, why; only then can "
            "a score be compared with a published one. Unread answers and errors count as wrong."
        )
        section.widgets += [Table("Measured", header, rows, note), *folds]
    else:
        section.command = eval_command()
    section.widgets += published(in_order(whole)) if whole else []
    return section


def _score_row(arm: Arm, name: str, entry: Found) -> list[Cell | str]:
    row: list[Cell | str] = [arm.name, title(name), score_cell(entry), entry["metric"], entry["policy"]]
    why = entry.get("not_published_set", "not recorded")
    whole = f"no: {why}" if why else "yes"
    if "values" in entry:
        return [*row, "", f"{entry['n']} runs", whole, "", "", ""]
    asked = f"{entry['n']:,}" + (f" ({entry['status']})" if entry["complete"] is False else "")
    counts = [number(entry["coverage"]), str(entry["parse_failures"]), str(entry["errors"])]
    return [*row, str(entry["latents"]), asked, whole, *counts]


def _details(arm: Arm, summary: AnySummary) -> Fold | None:
    found = tables.tables(summary)[-1]
    if not found.title.startswith("Details"):
        return None
    return Fold(f"{arm.name}: subtasks, pairs and cycles", [Table(found.title, found.header, found.rows)])


# ---------------------------------------------------------------------- ablation and sweep


def ablation(results: Results) -> Section:
    """What the model's own latents do for its answers: help and dependence, and the scores behind them."""
    section = Section("ablation", "Help and dependence")
    rows: list[list[Cell | str]] = []
    scores: list[list[Cell | str]] = []
    bars: dict[str, list[Bar]] = {}
    for arm, summary in evaluated(results.arms):
        for name, entry, conditions in _entries(summary):
            rows += _effect_rows(arm, name, entry, conditions)
            scores += _condition_rows(arm, name, entry, conditions)
        _bars(arm, summary, bars)
    if not rows:
        section.command = eval_command()
        return section
    section.widgets += [
        Text(
            "Help is the score with own latents minus that without a span. Dependence is own latents minus those of "
            "another question, and minus noise of the same norms. A model may gain from a span whose contents it "
            "ignores, or follow its latents and gain nothing. A reply that cannot be read counts as wrong: where a "
            "condition has fewer readable replies than the own latents, part of its effect is lost format, not use."
        ),
        *([_effect_figures(bars)] if bars else []),
        Table("Help and dependence, percentage points", _EFFECT_HEADER, rows, _EFFECT_NOTE),
        Fold("Scores under every condition", [Table("Span ablation", _condition_header(), scores, _CONDITION_NOTE)]),
    ]
    return section


_EFFECT_HEADER = [
    "arm",
    "benchmark",
    "own latents, %",
    *(text for name in TITLES.values() for text in (name, "where both can be read")),
]
_EFFECT_NOTE = (
    "Same prompt, same decoding; only the span differs. % read: readable replies under the condition. Where both can "
    "be read: the same difference over the questions answered readably with own latents and under the condition."
)
_CONDITION_NOTE = "Δ points: the condition minus own latents, over the same questions; p: McNemar's exact test."


def _condition_header() -> list[str]:
    columns = [text for name in ABLATIONS for text in (f"{tables.CONDITIONS[name]}, %", "Δ points")]
    return ["arm", "benchmark", "own latents, %", *columns]


def _entries(summary: AnySummary) -> list[tuple[str, Found, Mapping[str, Found]]]:
    """(name, scores with own latents, conditions) of every benchmark and of their mean."""
    benches: Mapping[str, AnyBench] = {**summary["benches"]}
    found: list[tuple[str, Found, Mapping[str, Found]]] = [
        (title(name), entry, entry["ablation"]) for name, entry in benches.items()
    ]
    own = means(summary).get("own")
    if own and len(own.get("tasks", ())) > 1:
        found.append((mean_title(own["tasks"], "five_task_mean" in summary), own, means(summary)))
    return [one for one in found if any(condition in one[2] for condition in ABLATIONS)]


def _effect_rows(arm: Arm, name: str, entry: Found, conditions: Mapping[str, Found]) -> list[list[Cell | str]]:
    found = effects(conditions)
    row: list[Cell | str] = [arm.name, name, score_cell(entry, read=True)]
    for effect in TITLES:
        one = found.get(effect)
        both = (one or {}).get("readable") or {}
        row += [effect_cell(one, read=True), effect_cell({**both, "read": None}) if both.get("ci") else Cell(DASH)]
    return [row] if found else []


def _condition_rows(arm: Arm, name: str, entry: Found, conditions: Mapping[str, Found]) -> list[list[Cell | str]]:
    row: list[Cell | str] = [arm.name, name, score_cell(entry)]
    for condition in ABLATIONS:
        cell = conditions.get(condition)
        row += [score_cell(cell), difference_cell(cell, p=True)]
    return [row]


def _bars(arm: Arm, summary: AnySummary, bars: dict[str, list[Bar]]) -> None:
    for name, effect in effects(means(summary)).items():
        if "ci" in effect:
            low, high = effect["ci"]
            bars.setdefault(name, []).append(Bar(arm.name, effect["points"], low, high, arm.number))


def _effect_figures(bars: dict[str, list[Bar]]) -> Figures:
    figures = []
    for name, found in bars.items():
        spoken = "; ".join(f"{bar.name} {number(bar.value, sign=True)}" for bar in found)
        alt = f"{TITLES[name]}, mean over tasks, in points, with 95 % intervals: {spoken}."
        figures.append((TITLES[name], forest(found, alt, "percentage points")))
    return Figures("Help and dependence, mean over tasks", figures)


def sweep(results: Results) -> Section:
    """Scores over the number of latents K."""
    section = Section("sweep", "Latent budget")
    panels = []
    for arm in results.arms:
        result = arm.sweep or arm.eval
        if result is None or is_spread(result.summary) or "sweep" not in result.summary:
            continue
        if len(result.summary["sweep"]["latents"]) > 2:  # K = 0 beside the trained K is the ablation above
            panels.append((f"sweep-{arm.number}", arm.name, _sweep_parts(arm, result.summary)))
    if panels:
        section.widgets.append(
            Text("The same checkpoint with other numbers of latents than the one it was trained with.")
        )
        section.widgets += [Switch("Arm", panels)] if len(panels) > 1 else panels[0][2]
    else:
        section.command = f"{eval_command()} --latents 0,2,4,8,12,16,20"
    return section


def _sweep_parts(arm: Arm, summary: Summary) -> list[Any]:
    found = summary["sweep"]
    budgets = [str(k) for k in found["latents"]]
    rows: list[list[Cell | str]] = []
    drawn = []
    for place, (name, row) in enumerate(found["rows"].items()):
        cells = summary["benches"][name]["sweep"]
        rows.append([title(name), *(difference_cell(cells.get(k)) for k in budgets), str(found["best"][name])])
        drawn.append(Line(title(name), [Point(int(k), row[k]) for k in budgets if k in row], place, dashed=True))
    mean = [Cell(number(found["mean"].get(k), sign=True), value=found["mean"].get(k)) for k in budgets]
    rows.append(["mean", *mean, f"oracle {number(found['oracle'], sign=True)}"])
    drawn.append(Line("mean", [Point(int(k), v) for k, v in found["mean"].items()], len(drawn)))
    spoken = ", ".join(f"K = {k}: {number(v, sign=True)}" for k, v in found["mean"].items())
    alt = f"{arm.name}: difference from K = {found['reference']} in points over K, per benchmark. Mean: {spoken}."
    figure = lines(drawn, alt, "latents K", "points", include=[0.0])
    keys = [Key(line.style, line.name, line.dashed) for line in drawn]
    caption = f"{arm.name}: difference from the trained K = {found['reference']}, percentage points"
    note = "Mean and oracle have no interval here; the best K is chosen after the fact and so overstates."
    return [
        Figures(f"{arm.name}: latent budget", [("Difference from the trained K", figure)], keys),
        Table(caption, ["benchmark", *(f"K = {k}" for k in budgets), "best K, post hoc"], rows, note),
    ]
