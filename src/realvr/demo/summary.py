"""The numbers of a demo, collected from the files that its steps wrote: ``summary.json`` and ``demo.json``.

Pure functions of these files; no model, no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from realvr.demo.choice import Arm, Training, choice
from realvr.demo.plan import ARMS, DemoSettings, Step
from realvr.demo.words import notes
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.evaluation.comparison import compare
from realvr.evaluation.effects import EFFECTS
from realvr.evaluation.five_tasks import five_title
from realvr.evaluation.records import PREDICTIONS, read_predictions
from realvr.evaluation.results import SUMMARY_FILE, Summary
from realvr.report.results import ArmEntry, ArmList
from realvr.runs.records import ResultFile, Text
from realvr.training.records import METRICS, read_steps

Json = dict[str, Any]
VERSION = 2


class DemoSummary(TypedDict):
    """The content of ``summary.json``. Every number that was measured on a sample has its 95 % interval beside it."""

    version: int
    settings: dict[Text, Any]
    arms: dict[Text, dict[Text, Any]]
    """Name of the arm -> its metrics."""
    differences: dict[Text, dict[Text, Any]]
    short_stage1: dict[Text, Any]
    notes: list[Text]


DEMO_FILE = ResultFile(DemoSummary, "realvr demo", "run realvr demo again, it goes on where it stopped", VERSION)
_ENDS = 5  # steps averaged at the beginning and at the end of a training


def collect(folder: Path, settings: DemoSettings) -> DemoSummary:
    """The content of ``summary.json``."""
    arms = {arm.name: _arm(folder, arm) for arm in ARMS}
    differences, watched = _differences(folder), choice().watched
    return {
        "version": VERSION,
        "settings": settings.as_json(),
        "arms": arms,
        "differences": differences,
        "short_stage1": _training(folder / watched.folder, watched.training),
        "notes": notes(settings, arms, differences),
    }


def index(summary: DemoSummary) -> ArmList:
    """The content of ``demo.json``: where the results of each arm are, for the report."""
    arms: list[Any] = []
    for arm in ARMS:
        entry: Json = {"name": arm.name, "train": f"{arm.folder}/train" if arm.training else None}
        kinds = ["eval", *arm.diagnostics, *(["sweep"] if arm.sweep else [])]
        arms.append(entry | {kind: f"{arm.folder}/{kind}" for kind in kinds})
    watched: ArmEntry = {"name": choice().watched.name, "train": f"{choice().watched.folder}/train"}
    return {"arms": [*arms, watched], "notes": summary["notes"]}


def _scores(home: Path) -> Summary:
    return SUMMARY_FILE.load(home / "eval" / "summary.json")


def _arm(folder: Path, arm: Arm) -> Json:
    home = folder / arm.folder
    scores = _scores(home)
    own = scores["five_task_mean"]["own"]
    found: Json = {
        "model": arm.model,
        "latents": arm.latents,
        "five_task_mean": {name: own[name] for name in ("mean", "ci", "coverage", "tasks")},  # type: ignore[literal-required]
        "benches": {
            name: {"headline": bench["headline"], "ci": bench["ci"], "n": bench["n"], "coverage": bench["coverage"]}
            for name, bench in scores["benches"].items()
        },
    }
    found |= {name: scores.get("effects", {}).get(name) for name in EFFECTS}
    for name in choice().diagnostics:
        diagnostic = DIAGNOSTICS.get(name)()
        measured = diagnostic.read(home / name)
        found |= diagnostic.numbers(measured[1] if measured else None)
    return found | ({"train": _training(home, arm.training)} if arm.training else {})


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


def _differences(folder: Path) -> Json:
    """The chosen comparisons on the same questions: mean over the tasks, in points, with a paired interval."""
    predictions = {arm.name: list(read_predictions(folder / arm.folder / "eval" / PREDICTIONS)) for arm in ARMS}
    latents = {arm.name: arm.latents for arm in ARMS}
    found = {}
    for first, second in choice().comparisons:
        both = compare(
            predictions[first],
            predictions[second],
            first_latents=latents[first],
            second_latents=latents[second],
        )["five_task_mean"]
        found[f"{second} - {first}"] = {
            "gain": both["gain"],
            "difference": both["difference"],
            "ci": both["difference_ci"],
        }
    return found


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
