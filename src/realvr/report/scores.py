"""Sections made of evaluations: benchmarks, ablations of the span, latent budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.benchmarks import tables
from realvr.benchmarks.catalog import CATALOG
from realvr.benchmarks.rules import FIVE
from realvr.benchmarks.scoring import ABLATIONS
from realvr.report.charts import Bar, Line, Point, forest, lines
from realvr.report.parts import (
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
    missing,
    number,
)
from realvr.report.results import Arm, Json, Result, Results

EVAL = "realvr eval MODEL --bench mmvp=PATH --bench blink=PATH … --out DIR"
SWEEP = "realvr eval MODEL --bench mmvp=PATH … --latents 0,2,4,8,12,16,20 --out DIR"
EFFECTS = {"none": "without a span", "mean": "with mean latents", "other": "with another's latents"}


def bench_names(arms: Sequence[Arm]) -> list[str]:
    """Benchmarks of these arms, the five first."""
    order = [name for names in FIVE for name in names]
    found = {name for arm in arms if (result := arm.get("eval")) for name in result.content["benches"]}
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def title(bench: str) -> str:
    return tables.NAMES.get(bench, bench)


def score_cell(entry: Json | None) -> Cell:
    """A headline with its 95 % interval, or mean ± standard deviation over checkpoints."""
    if entry is None:
        return Cell(DASH)
    if "values" in entry:
        below = f"± {number(entry['std'])}, {entry['n']} runs" if entry["std"] is not None else f"{entry['n']} run"
        return Cell(number(entry["mean"]), below, value=entry["mean"])
    value = entry.get("headline", entry.get("mean"))
    few = "n" in entry and entry["n"] < FEW_QUESTIONS
    return Cell(number(value), interval(entry["ci"]), few, value)


def difference_cell(entry: Json | None, p: bool = False) -> Cell:
    """A difference in points with its interval (over checkpoints: standard deviation)."""
    found = (entry or {}).get("difference")
    if entry is None or found is None:
        return Cell(DASH)
    if isinstance(found, dict):
        below = f"± {number(found['std'])}" if found["std"] is not None else ""
        return Cell(number(found["mean"], sign=True), below, value=found["mean"])
    below = interval(entry["difference_ci"], sign=True)
    if p and entry.get("p") is not None:
        below += f" p = {entry['p']:.2g}"
    few = "common" in entry and entry["common"] < FEW_QUESTIONS
    return Cell(number(found, sign=True), below, few, found)


def five_mean(summary: Json, condition: str = "own") -> Json | None:
    return summary.get("five_task_mean", {}).get(condition)


def last_tenth(result: Result | None, metric: str) -> Cell:
    """Mean of a metric over the last tenth of the steps (at least one)."""
    if result is None:
        return Cell(DASH)
    with result.reading():
        values = [step[metric] for step in result.content["steps"] if step.get(metric) is not None]
        last = values[-max(1, len(values) // 10) :]
        if not last:
            return Cell(DASH)
        mean = sum(last) / len(last)
        return Cell(number(mean, 3), f"{len(last)} of {len(values)} steps", value=mean)


# ---------------------------------------------------------------------- benchmarks


def benchmarks(results: Results, published: Sequence[Any]) -> Section:
    """Every score with what is needed to judge it."""
    section = Section("benchmarks", "Benchmarks")
    arms = results.having("eval")
    rows: list[list[Cell | str]] = []
    folds: list[Fold] = []
    for arm in arms:
        result = arm.results["eval"]
        with result.reading():
            rows += [_score_row(arm, name, entry) for name, entry in result.content["benches"].items()]
            if fold := _details(arm, result.content):
                folds.append(fold)
    if rows:
        header = ["arm", "benchmark", "score, %", "metric", "answers read by", "K", "questions", "whole set"]
        header += ["read, %", "unread", "errors"]
        note = (
            "Whole set: questions in the published set; a score over other questions or fewer cannot be compared with "
            "a published one. Unread answers and errors count as wrong."
        )
        section.parts += [Table("Measured", header, rows, note), *folds]
    else:
        section.parts += missing(EVAL)
    section.parts += published
    return section


def _score_row(arm: Arm, name: str, entry: Json) -> list[Cell | str]:
    row: list[Cell | str] = [arm.name, title(name), score_cell(entry), entry["metric"], entry["policy"]]
    whole = f"{CATALOG[name].rows:,}" if name in CATALOG else DASH
    if "values" in entry:
        return [*row, "", f"{entry['n']} runs", whole, "", "", ""]
    asked = f"{entry['n']:,}" + (f" ({entry['status']})" if entry["complete"] is False else "")
    counts = [number(entry["coverage"]), str(entry["parse_failures"]), str(entry["errors"])]
    return [*row, str(entry["latents"]), asked, whole, *counts]


def _details(arm: Arm, summary: Json) -> Fold | None:
    found = tables.tables(summary)[-1]
    if not found.title.startswith("Details"):
        return None
    return Fold(f"{arm.name}: subtasks, pairs and cycles", [Table(found.title, found.header, found.rows)])


# ---------------------------------------------------------------------- ablation and sweep


def ablation(results: Results) -> Section:
    """What is left when the model's own latents are replaced."""
    section = Section("ablation", "Without the model's own latents")
    rows: list[list[Cell | str]] = []
    bars: dict[str, list[Bar]] = {}
    for arm in results.having("eval"):
        result = arm.results["eval"]
        with result.reading():
            rows += _ablation_rows(arm, result.content, bars)
    if not rows:
        section.parts += missing(EVAL)
        return section
    header = ["arm", "benchmark", "own latents, %"]
    header += [text for name in ABLATIONS for text in (f"{tables.CONDITIONS[name]}, %", "Δ points")]
    note = (
        "Same prompt, same decoding; only the latent span differs. An arm that uses its latents loses where they are "
        "replaced: a high score alone is no evidence that they are read."
    )
    if bars:
        section.parts.append(_ablation_figures(bars, results))
    section.parts.append(Table("Span ablation", header, rows, note))
    return section


def _ablation_rows(arm: Arm, summary: Json, bars: dict[str, list[Bar]]) -> list[list[Cell | str]]:
    rows: list[list[Cell | str]] = []
    found = [(title(name), entry, entry["ablation"]) for name, entry in summary["benches"].items()]
    if own := five_mean(summary):
        found.append(("five-task mean", own, summary["five_task_mean"]))
    for name, entry, conditions in found:
        if not any(condition in conditions for condition in ABLATIONS):
            continue
        row: list[Cell | str] = [arm.name, name, score_cell(entry)]
        for condition in ABLATIONS:
            cell = conditions.get(condition)
            row += [score_cell(cell), difference_cell(cell, p=True)]
            if cell and isinstance(cell.get("difference"), float) and name == "five-task mean":
                bars.setdefault(condition, []).append(
                    Bar(arm.name, cell["difference"], cell["difference_ci"][0], cell["difference_ci"][1], arm.number)
                )
        rows.append(row)
    return rows


def _ablation_figures(bars: dict[str, list[Bar]], results: Results) -> Figures:
    figures = []
    for condition, found in bars.items():
        spoken = "; ".join(f"{bar.name} {number(bar.value, sign=True)}" for bar in found)
        alt = f"Change of the five-task mean {EFFECTS[condition]}, in points, with 95 % intervals: {spoken}."
        figures.append((f"Δ five-task mean {EFFECTS[condition]}", forest(found, alt, "percentage points")))
    return Figures("Change of the five-task mean", figures)


def sweep(results: Results, published: Sequence[Any]) -> Section:
    """Scores over the number of latents K."""
    section = Section("sweep", "Latent budget")
    panels = []
    for arm in results.arms:
        result = arm.get("sweep") or arm.get("eval")
        if result is None or "sweep" not in result.content:
            continue
        with result.reading():
            if len(result.content["sweep"]["latents"]) > 2:  # K = 0 beside the trained K is the ablation above
                panels.append((f"sweep-{arm.number}", arm.name, _sweep_parts(arm, result.content)))
    if panels:
        section.parts.append(
            Text("The same checkpoint with other numbers of latents than the one it was trained with.")
        )
        section.parts += [Switch("Arm", panels)] if len(panels) > 1 else panels[0][2]
    else:
        section.parts += missing(SWEEP)
    section.parts += published
    return section


def _sweep_parts(arm: Arm, summary: Json) -> list[Any]:
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
