"""Find results below folders and sort them into arms.

``demo.json`` names arms where there is one. Everything else is grouped by model: evaluations that record the same hash
of the weights, and the training run whose folder holds these weights, belong together. Names are folder names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from realvr.answers.extract import POLICIES
from realvr.errors import UserError
from realvr.evaluation.summary_files import SUMMARY, other_policies, summary_path
from realvr.report.results import KINDS, Arm, Json, Kind, Result, Results, read_settings, read_steps
from realvr.runs.files import read_json

FILES = {
    "metrics.jsonl": "training runs",
    f"{SUMMARY}.json": "evaluations",
    "counterfactual.json": "counterfactual pairs",
    "exchange.json": "latent exchange",
    "grounding.json": "latents against evidence",
}
_SKIPPED = {"final", "checkpoints", "latents", "tensorboard", "report", "world"}
_GENERIC = {"train", "training", "eval", "evaluation", "counterfactual", "pairs", "exchange", "sweep", "grounding"}
"""Folder names that say what was done and not to which model."""


def find(roots: Sequence[Path], policy: str | None = None) -> Results:
    """Results below ``roots``, arms in display order; scores under ``policy``, by default each run's own."""
    if policy is not None and policy not in POLICIES:
        raise UserError(f"'{policy}' is not an extraction policy; there are {', '.join(POLICIES)}")
    results, arms, notes, demo = Results([]), [], [], False
    found: dict[Path, list[tuple[Result, str]]] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: not a folder; give the folder of a run")
        for folder in _folders(root):
            if folder not in found:
                name = _name(folder, root)
                found[folder] = [(one, name) for one in _read(folder, results.unfinished, policy)]
            if (folder / "demo.json").is_file():
                named, said = _demo(folder)
                arms += named
                notes += said
                demo = True
    rest = _take(arms, found)
    if not arms and not rest:
        raise UserError(_nothing(roots, results.unfinished, policy))
    for arm in _group(rest):
        arm.main = not demo
        arms.append(arm)
    _set_apart(arms)
    for number, arm in enumerate(arms):
        arm.number = number
    _rename(arms)
    results.arms, results.notes, results.demo, results.policy = arms, notes, demo, policy
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
    widgets = [part for part in folder.relative_to(root).parts if part not in _GENERIC]
    return "/".join(widgets) or root.name or "results"


def _read(folder: Path, unfinished: list[Path], policy: str | None) -> list[Result]:
    """What is in one folder, without its subfolders."""
    made = []

    def add(kind: Kind, content: Json, file: str, settings: str) -> None:
        made.append(Result(kind, folder, content, read_settings(folder / settings), folder / file))

    if (folder / "metrics.jsonl").is_file():
        steps = read_steps(folder / "metrics.jsonl")
        if steps:
            add("train", {"steps": steps}, "metrics.jsonl", "settings.yaml")
    scored = _summary_file(folder, policy)
    if scored is not None:
        summary = read_json(scored)
        if "arms" not in summary:  # the demo's own overview repeats numbers that are read where they were made
            _expect(scored, summary, "benches", "realvr score")
            add("eval", summary, scored.name, "eval.json")
    elif (folder / "eval.json").is_file() or any(folder.glob("predictions*.jsonl")):
        unfinished.append(folder)
    for kind, key in (("counterfactual", "protocols"), ("exchange", "rows"), ("grounding", "cos_positive")):
        file = folder / f"{kind}.json"
        if file.is_file():
            content = read_json(file)
            _expect(file, content, key, "realvr demo" if kind == "grounding" else f"realvr {kind}")
            add(kind, content, file.name, f"{kind}_settings.json")  # type: ignore[arg-type]
    return made


def _summary_file(folder: Path, policy: str | None) -> Path | None:
    """The summary under a policy; without one the run's own, else the only one there is."""
    own = summary_path(folder)
    if policy is None:
        others = other_policies(folder)
        return own if own.is_file() else summary_path(folder, others[0]) if len(others) == 1 else None
    named = summary_path(folder, policy)
    if named.is_file() or not own.is_file():
        return named if named.is_file() else None
    content = read_json(own)
    benches = content.get("benches") or {}
    read = {entry.get("policy") for entry in benches.values() if isinstance(entry, dict)}
    return own if "arms" in content or read == {policy} else None


def _expect(file: Path, content: Json, key: str, command: str) -> None:
    if key not in content:
        raise UserError(f"{file}: has no '{key}', so it is not what {command} writes; write it again or move it away")


def _demo(folder: Path) -> tuple[list[Arm], list[str]]:
    """Arms that demo.json names; each result is a placeholder until `_take` finds its folder."""
    path = folder / "demo.json"
    content = read_json(path)
    arms = []
    try:
        for entry in content["arms"]:
            arm = Arm(str(entry["name"]))
            for kind in KINDS:
                if entry.get(kind):
                    arm.results[kind] = Result(kind, (folder / str(entry[kind])).resolve(), {}, {}, path)
            arms.append(arm)
        notes = [str(note) for note in content.get("notes") or []]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not what realvr demo writes ({type(error).__name__}: {error})") from None
    return arms, notes


def _take(arms: list[Arm], found: dict[Path, list[tuple[Result, str]]]) -> list[tuple[Result, str]]:
    """Give the named arms their results; returns what no arm named. A stage that was not run is simply absent."""
    taken: set[tuple[Path, str]] = set()
    for arm in arms:
        for kind, named in list(arm.results.items()):
            del arm.results[kind]
            wanted = "eval" if kind == "sweep" else kind
            for result, _ in found.get(named.folder, []):
                if result.kind == wanted:
                    arm.results[kind] = Result(kind, result.folder, result.content, result.settings, result.file)
                    taken.add((result.folder, result.kind))
    everything = [one for several in found.values() for one in several]
    return [one for one in everything if (one[0].folder, one[0].kind) not in taken]


def _group(rest: Sequence[tuple[Result, str]]) -> list[Arm]:
    """Arms of the results that nobody named: same weights, same arm, as long as an arm has one result of a kind."""
    arms: list[Arm] = []
    for result, name in rest:
        home = next((arm for arm in arms if result.kind not in arm.results and _same(arm, result, name)), None)
        if home is None:
            home = Arm(name)
            arms.append(home)
        home.results[result.kind] = result
    return arms


def _same(arm: Arm, result: Result, name: str) -> bool:
    """Whether a result is about the model of an arm. Runs may have moved since, so a path can only say yes."""
    for other in arm.results.values():
        first, second = other.model.get("weights"), result.model.get("weights")
        if first and second:
            return first == second
        for run, judged in ((other, result), (result, other)):
            if run.kind == "train" and judged.model.get("path"):
                path = Path(str(judged.model["path"])).resolve()
                if path == run.folder or run.folder in path.parents:
                    return True
    return arm.name == name


def _set_apart(arms: Sequence[Arm]) -> None:
    """Checkpoints that are summarised together stand behind their mean, not beside it."""
    evaluations = [(arm, arm.results["eval"]) for arm in arms if "eval" in arm.results]
    together = {result.folder for _, result in evaluations if "checkpoints" in result.content}
    for arm, result in evaluations:
        if result.folder.parent in together:
            arm.main = False


def _rename(arms: Sequence[Arm]) -> None:
    """Two arms of one name get numbers."""
    seen: dict[str, int] = {}
    for arm in arms:
        seen[arm.name] = seen.get(arm.name, 0) + 1
        if seen[arm.name] > 1:
            arm.name = f"{arm.name} ({seen[arm.name]})"


def _nothing(roots: Sequence[Path], unfinished: Sequence[Path], policy: str | None) -> str:
    where = ", ".join(str(root) for root in roots)
    if unfinished:
        under, again = (f" under {policy}", f" --policy {policy}") if policy else ("", "")
        return f"{where}: only evaluations without a summary{under}; write it with realvr score {unfinished[0]}{again}"
    looked = ", ".join(f"{file} ({what})" for file, what in FILES.items())
    return f"{where}: no results in it or below it; looked for {looked}"
