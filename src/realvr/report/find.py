"""Find results below folders and sort them into arms.

``demo.json`` names arms where there is one. Everything else is grouped by model: evaluations that record the same hash
of the weights, and the training run whose folder holds these weights, belong together. Names are folder names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.results import SETTINGS_FILE, Settings
from realvr.errors import UserError
from realvr.evaluation.benchmark import known_policies
from realvr.evaluation.results import EVAL_FILE, EvalRecord, is_spread, load_summary
from realvr.evaluation.run_folder import RECORD
from realvr.evaluation.summary_files import SUMMARY, other_policies, summary_path
from realvr.report.results import ARMS_FILE, Arm, Evaluation, Measurement, Result, Results
from realvr.runs.files import read_json
from realvr.training.records import METRICS, TrainingRun, load_run

ARM_LIST = "demo.json"
_SETTINGS = "_settings.json"
_SKIPPED = {"final", "best", "checkpoints", "latents", "tensorboard", "wandb", "report", "world"}
_GENERIC = {"train", "training", "eval", "evaluation", "pairs", "sweep"}
"""Folder names that say what was done and not to which model, beside the names of diagnostics."""
Found = dict[Path, list[tuple[Result, str]]]
"""Results by folder, each with the name that its folder suggests for an arm."""


def find(roots: Sequence[Path], policy: str | None = None) -> Results:
    """Results below ``roots``, arms in display order; scores under ``policy``, by default each run's own."""
    if policy is not None and policy not in known_policies():
        raise UserError(f"'{policy}' is not an extraction policy; there are {', '.join(known_policies())}")
    results, arms = Results([], policy=policy), []
    found: Found = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: not a folder; give the folder of a run")
        for folder in _folders(root):
            if folder not in found:
                name = _name(folder, root)
                found[folder] = [(one, name) for one in _read(folder, results)]
    rest = [one for several in found.values() for one in several]
    for folder in found:
        if (folder / ARM_LIST).is_file():
            arms += _listed(folder, found, rest, results)
    if not arms and not rest:
        raise UserError(_nothing(roots, results))
    for arm in _group(rest):
        arm.main = not results.demo
        arms.append(arm)
    _set_apart(arms)
    for number, arm in enumerate(arms):
        arm.number = number
    _rename(arms)
    results.arms = arms
    return results


def _folders(root: Path) -> list[Path]:
    """``root`` and what is below it, without what cannot hold results. A folder that is given is always looked at."""
    kept = []
    for folder, names, _ in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        kept.append(Path(folder).resolve())
    return kept


def _name(folder: Path, root: Path) -> str:
    root = root.resolve()
    parts = [part for part in folder.relative_to(root).parts if part not in _GENERIC and part not in DIAGNOSTICS]
    return "/".join(parts) or root.name or "results"


def _read(folder: Path, results: Results) -> list[Result]:
    """What is in one folder, without its subfolders."""
    made: list[Result] = []
    if (folder / METRICS).is_file():
        run = load_run(folder)
        made += [run] if run.steps else []
    scored = _summary_file(folder, results.policy)
    if scored is not None:
        if not _is_overview(scored):
            record = EVAL_FILE.load(folder / RECORD) if (folder / RECORD).is_file() else EvalRecord()
            made.append(Evaluation(folder, scored, load_summary(scored), record))
    elif (folder / RECORD).is_file() or any(folder.glob("predictions*.jsonl")):
        results.unfinished.append(folder)
    for kind in DIAGNOSTICS:
        measured = kind.read(folder)
        if measured is not None:
            file, summary = measured
            made.append(Measurement(kind.name, folder, file, summary, _settings(folder, kind.name, summary, file)))
    results.foreign += _foreign(folder)
    return made


def _settings(folder: Path, name: str, summary: Mapping[str, Any], file: Path) -> Settings:
    """What a diagnostic was run with, from its own file or from its summary."""
    own = folder / f"{name}{_SETTINGS}"
    return SETTINGS_FILE.load(own) if own.is_file() else SETTINGS_FILE.parse(summary.get("settings") or {}, file)


def _foreign(folder: Path) -> list[tuple[Path, str]]:
    """(folder, name) of diagnostics that left results here and are not registered."""
    beside = {file.name.removesuffix(_SETTINGS): file for file in sorted(folder.glob(f"*{_SETTINGS}"))}
    return [
        (folder, name)
        for name, file in beside.items()
        if name not in DIAGNOSTICS and (folder / f"{name}.json").is_file() and _says(file, name)
    ]


def _says(file: Path, diagnostic: str) -> bool:
    """Whether a file is the settings of that diagnostic. Somebody else's file may hold anything."""
    with suppress(UserError):
        return read_json(file).get("diagnostic") == diagnostic
    return False


def _is_overview(file: Path) -> bool:
    """Whether it is the demo's own overview, which repeats numbers that are read where they were made."""
    return "arms" in read_json(file)


def _summary_file(folder: Path, policy: str | None) -> Path | None:
    """The summary under a policy; without one the run's own, else the only one there is."""
    own = summary_path(folder)
    if policy is None:
        others = other_policies(folder)
        return own if own.is_file() else summary_path(folder, others[0]) if len(others) == 1 else None
    named = summary_path(folder, policy)
    if named.is_file() or not own.is_file():
        return named if named.is_file() else None
    if _is_overview(own):
        return own
    read = {entry["policy"] for entry in load_summary(own)["benches"].values()}
    return own if read == {policy} else None


def _listed(folder: Path, found: Found, rest: list[tuple[Result, str]], results: Results) -> list[Arm]:
    """Arms that a list names; what they take leaves ``rest``. A stage that was not run is simply absent."""
    content = ARMS_FILE.load(folder / ARM_LIST)
    results.demo = True
    results.leading += content.get("leading") or []
    results.notes += content.get("notes") or []
    arms = []
    for entry in content["arms"]:
        arm = Arm(entry["name"])
        for kind, path in entry.items():
            for one in found.get((folder / str(path)).resolve(), []) if kind != "name" and path else ():
                if _is(one[0], kind):
                    _take(arm, kind, one[0])
                    rest[:] = [other for other in rest if other is not one]
        arms.append(arm)
    return arms


def _is(result: Result, kind: str) -> bool:
    """Whether a result is what a list calls ``kind``."""
    if isinstance(result, Measurement):
        return kind not in ("train", "eval", "sweep")  # diagnostics of one folder are about one model
    return kind == "train" if isinstance(result, TrainingRun) else kind in ("eval", "sweep")


def _take(arm: Arm, kind: str, result: Result) -> None:
    if kind == "sweep" and isinstance(result, Evaluation):
        arm.sweep = result
    else:
        arm.add(result)


def _group(rest: Sequence[tuple[Result, str]]) -> list[Arm]:
    """Arms of the results that nobody named: same weights, same arm, as long as an arm has one result of a kind."""
    arms: list[Arm] = []
    for result, name in rest:
        home = next((arm for arm in arms if not arm.has(result) and _same(arm, result, name)), None)
        if home is None:
            home = Arm(name)
            arms.append(home)
        home.add(result)
    return arms


def _same(arm: Arm, result: Result, name: str) -> bool:
    """Whether a result is about the model of an arm. Runs may have moved since, so a path can only say yes."""
    for _, other in arm.results():
        first, second = _weights(other), _weights(result)
        if first and second:
            return first == second
        for run, judged in ((other, result), (result, other)):
            if isinstance(run, TrainingRun) and not isinstance(judged, TrainingRun) and judged.model.get("path"):
                path = Path(str(judged.model["path"])).resolve()
                if path == run.folder or run.folder in path.parents:
                    return True
    return arm.name == name


def _weights(result: Result) -> str | None:
    found = None if isinstance(result, TrainingRun) else result.model.get("weights")
    return found if isinstance(found, str) else None


def _set_apart(arms: Sequence[Arm]) -> None:
    """Checkpoints that are summarised together stand behind their mean, not beside it."""
    together = {arm.eval.folder for arm in arms if arm.eval is not None and is_spread(arm.eval.summary)}
    for arm in arms:
        if arm.eval is not None and arm.eval.folder.parent in together:
            arm.main = False


def _rename(arms: Sequence[Arm]) -> None:
    """Two arms of one name get numbers."""
    seen: dict[str, int] = {}
    for arm in arms:
        seen[arm.name] = seen.get(arm.name, 0) + 1
        if seen[arm.name] > 1:
            arm.name = f"{arm.name} ({seen[arm.name]})"


def _nothing(roots: Sequence[Path], results: Results) -> str:
    where, policy = ", ".join(str(root) for root in roots), results.policy
    if results.unfinished:
        under, again = (f" under {policy}", f" --policy {policy}") if policy else ("", "")
        first = results.unfinished[0]
        return f"{where}: only evaluations without a summary{under}; write it with realvr score {first}{again}"
    if results.foreign:
        return not_loaded(*results.foreign[0])
    files = [
        f"{METRICS} (training runs)",
        f"{SUMMARY}.json (evaluations)",
        *(f"{one.name}.json" for one in DIAGNOSTICS),
    ]
    return f"{where}: no results in it or below it; looked for {', '.join(files)}"


def not_loaded(folder: Path, name: str) -> str:
    """A sentence about results of a diagnostic that is not registered."""
    return f"{folder} holds results of diagnostic {name}, which is not known here; add --plugin FILE.py to show them"
