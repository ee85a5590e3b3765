"""The numbers of a demo, collected from the files that its steps wrote: ``summary.json`` and ``demo.json``.

Pure functions of these files; no model, no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from realvr.demo.choice import Arm, Comparison, Parts, Training, choice
from realvr.demo.leading import findings, leading
from realvr.demo.plan import ARMS, DemoSettings, Step
from realvr.demo.words import notes
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.evaluation.benchmark import MINI
from realvr.evaluation.comparison import compare
from realvr.evaluation.effects import EFFECTS
from realvr.evaluation.five_tasks import five_title
from realvr.evaluation.records import PREDICTIONS, Prediction, read_predictions
from realvr.evaluation.results import SUMMARY_FILE, BenchScore, ConditionScore, Summary
from realvr.evaluation.scoring import Bench
from realvr.evaluation.statistics import Bootstrap, interval
from realvr.report.results import ArmList
from realvr.runs.records import ResultFile, Text
from realvr.training.records import METRICS, read_steps

Json = dict[str, Any]
VERSION = 3


class DemoSummary(TypedDict):
    """The content of ``summary.json``. Every number that was measured on a sample has its 95 % interval beside it."""

    version: int
    leading: list[Text]
    """What was found, in a few lines."""
    findings: dict[Text, dict[Text, Any]]
    """The numbers of these lines."""
    settings: dict[Text, Any]
    arms: dict[Text, dict[Text, Any]]
    """Name of the arm -> its metrics."""
    differences: dict[Text, dict[Text, Any]]
    notes: list[Text]


DEMO_FILE = ResultFile(DemoSummary, "realvr demo", "run realvr demo again, it goes on where it stopped", VERSION)
_ENDS = 5  # steps averaged at the beginning and at the end of a training


def collect(folder: Path, settings: DemoSettings) -> DemoSummary:
    """The content of ``summary.json``."""
    predictions = {arm.name: list(read_predictions(folder / arm.folder / "eval" / PREDICTIONS)) for arm in ARMS}
    arms = {arm.name: _arm(folder, arm, predictions[arm.name]) for arm in ARMS}
    differences = _differences(predictions)
    found = findings({"arms": arms, "differences": differences})
    return {
        "version": VERSION,
        "leading": leading(found),
        "findings": found,
        "settings": settings.as_json(),
        "arms": arms,
        "differences": differences,
        "notes": notes(settings, arms, differences),
    }


def index(summary: DemoSummary) -> ArmList:
    """The content of ``demo.json``: where the results of each arm are, for the report."""
    suite = choice().suite
    arms: list[Any] = []
    for arm in ARMS:
        entry: Json = {"name": arm.name, "train": f"{arm.folder}/train" if arm.training else None}
        entry |= {"suite": suite.folder} if arm.name == suite.arm else {}  # what follows takes the place of its numbers
        arms.append(entry | {kind: f"{arm.folder}/{kind}" for kind in ("eval", *arm.diagnostics)})
    return {"arms": arms, "leading": summary["leading"], "notes": summary["notes"]}


def _scores(home: Path) -> Summary:
    return SUMMARY_FILE.load(home / "eval" / "summary.json")


def _arm(folder: Path, arm: Arm, predictions: Sequence[Prediction]) -> Json:
    home = folder / arm.folder
    scores = _scores(home)
    own = scores["five_task_mean"]["own"]
    found: Json = {
        "model": arm.model,
        "latents": arm.latents,
        "five_task_mean": {name: own[name] for name in ("mean", "ci", "coverage", "tasks")},  # type: ignore[literal-required]
        "benches": {name: _bench(bench) for name, bench in scores["benches"].items()},
    }
    for name, parts in choice().parts.items():
        found["benches"][MINI + name]["parts"] = _parts(MINI + name, parts, arm, predictions)
    found |= {name: scores.get("effects", {}).get(name) for name in EFFECTS}
    for name in choice().diagnostics:
        diagnostic = DIAGNOSTICS.get(name)()
        measured = diagnostic.read(home / name)
        found |= diagnostic.numbers(measured[1] if measured else None)
    return found | ({"train": _training(home, arm.training)} if arm.training else {})


def _bench(bench: BenchScore) -> Json:
    """Accuracy with own latents, and with what stood in for them."""
    return _score(bench) | {"conditions": {name: _score(cell) for name, cell in bench["ablation"].items()}}


def _score(cell: BenchScore | ConditionScore) -> Json:
    return {"headline": cell["headline"], "ci": cell["ci"], "n": cell["n"], "coverage": cell["coverage"]}


def _parts(name: str, parts: Parts, arm: Arm, predictions: Sequence[Prediction]) -> Json:
    """Accuracy with own latents by the values of a tag."""
    own = [row for row in predictions if (row.bench, row.condition, row.latents) == (name, "own", arm.latents)]
    found = {}
    for group, values in parts.groups.items():
        rows = [row for row in own if row.tags.get(parts.tag) in values]
        if rows:  # few questions need not have all values
            bench = Bench(name, {("own", arm.latents): rows})
            ci = list(interval(bench.replicates(Bootstrap(), rows)[0]))
            found[group] = {"headline": bench.score(rows), "ci": ci, "n": len(rows)}
    return found


def _training(home: Path, training: Training) -> Json:
    return ends(home / "train", choice().recipes[training.recipe].ends)


def ends(run: Path, names: Sequence[str]) -> Json:
    """Means over the first and the last few steps of a training."""
    rows = read_steps(run / METRICS)
    count = max(1, min(_ENDS, len(rows) // 2))
    found: Json = {"steps": len(rows)}
    for name in names:
        for key, part in (("first", rows[:count]), ("last", rows[-count:])):
            values = [value for row in part if (value := row.get(name)) is not None]
            if values:
                found.setdefault(name, {})[key] = sum(values) / len(values)
    return found


def _differences(predictions: Mapping[str, Sequence[Prediction]]) -> Json:
    """The chosen comparisons on the same questions, in points, with paired intervals."""
    latents = {arm.name: arm.latents for arm in ARMS}
    found = {}
    for comparison in choice().comparisons:
        for first, second in comparison.pairs:
            one, two = (_compared(comparison, predictions[name]) for name in (first, second))
            if not one:  # few questions need not have any of the chosen part
                continue
            both = compare(one, two, first_latents=latents[first], second_latents=latents[second])
            gained = both["benches"][MINI + comparison.bench] if comparison.bench else both["five_task_mean"]
            name = f"{second} - {first}" + (f", {comparison.title}" if comparison.bench else "")
            found[name] = {
                "over": comparison.title,
                "second": second,
                "first": first,
                "gain": gained["gain"],
                "difference": gained["difference"],
                "ci": gained["difference_ci"],
            }
    return found


def _compared(comparison: Comparison, rows: Sequence[Prediction]) -> list[Prediction]:
    """The answers that a comparison is over."""
    if not comparison.group:
        return list(rows)
    parts = choice().parts[comparison.bench]
    values = parts.groups[comparison.group]
    return [row for row in rows if row.bench == MINI + comparison.bench and row.tags.get(parts.tag) in values]


def headline(folder: Path, step: Step) -> str:
    """What one finished step found, in a few words."""
    if step.training is not None:
        name = choice().recipes[step.training.recipe].watch
        found = ends(folder / step.out, (name,))
        both = found.get(name)
        return f"{name} {both['first']:.2f} → {both['last']:.2f} in {found['steps']} steps" if both else ""
    if step.kind == "eval" and step.arm is not None:
        own = _scores(folder / step.arm.folder)["five_task_mean"]["own"]
        return f"{five_title(own['tasks'])} {own['mean']:.1f} %"
    return ""
