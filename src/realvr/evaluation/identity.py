"""What a set of questions is called, and whether it is the published set of that name.

Every table, summary and page takes the name from `called` and asks `differs` before a published number may stand beside
a score. A catalogue name belongs to files in that benchmark's layout. The embedded world's exports are ``mini-NAME``,
whatever they were called on the command line, and your own question file is called by its file name. Nothing here
imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.benchmark import BENCHMARKS, MINI, base_name
from realvr.world.mark import is_drawn

DRAWN = "drawn by the embedded world"
_LEVELS = 3
"""How far above the data the world's recipe may be: SPLIT/BLINK/Counting is the deepest."""


def called(name: str, path: str | Path, format: str, world: bool) -> str:
    """The name under which questions are asked and shown; ``world``: drawn by the embedded world."""
    base = base_name(name)
    if base not in BENCHMARKS:
        return name
    if world:
        return MINI + base
    if format == BENCHMARKS.get(base).reader.name:
        return name  # a set that its user calls mini-NAME is never called the published one
    own = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", Path(path).name) or "questions"
    return f"{own}-questions" if base_name(own.lower()) in BENCHMARKS else own


def from_world(path: str | Path, samples: Iterable[Sample]) -> bool:
    """Whether questions were written by ``realvr world make``: their first picture says so, or the recipe above."""
    for sample in samples:
        for image in sample.images:
            try:
                return is_drawn(_head(image)) or has_recipe(path)
            except (UserError, OSError):
                continue  # an unreadable picture tells nothing
    return has_recipe(path)


def has_recipe(path: str | Path) -> bool:
    """Whether the files lie in a folder that ``realvr world make`` wrote: pictures drawn earlier carry no mark."""
    here = Path(path).resolve()
    for folder in (here, *list(here.parents)[:_LEVELS]):
        try:
            if "split" in json.loads((folder / "recipe.json").read_text(encoding="utf-8")):
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False


def _head(image: ImageRef) -> bytes:
    if image.path is None:
        return image.read()
    with image.path.open("rb") as source:
        return source.read(1024)


def differs(name: str, facts: Mapping[str, Any]) -> str:
    """Why the questions are not the published set of this name; empty where they are.

    ``facts`` are those of `Questions.describe` with ``world`` and ``task_rows`` (questions by subtask) of `set_facts`.
    Records of earlier versions have no such keys; their path is then looked at, where it still exists.
    """
    if name not in BENCHMARKS:
        if base_name(name) == name:
            return "no benchmark of the catalogue"
        return "called a mini set" if facts.get("world") is False else DRAWN
    bench = BENCHMARKS.get(name)
    published, world = bench.facts, facts.get("world")
    if world is None:
        path = facts.get("path")
        world = has_recipe(path) if path and Path(path).exists() else None
    if world is None:
        return "the record does not say where the questions come from"
    if world:
        return DRAWN
    if facts.get("format") != bench.reader.name:
        return "not in its layout"
    if facts.get("limit") is not None:
        return f"only {facts.get('questions')} questions (--limit {facts['limit']})"
    if set(facts.get("tasks") or ()) != set(published.tasks) or facts.get("missing_tasks"):
        return "other subtasks than those of the paper"
    if facts.get("questions") != published.rows:
        return f"{facts.get('questions')} questions; the published set has {published.rows:,}"
    rows = facts.get("task_rows")
    if rows is not None and published.task_rows and rows != {t: published.task_rows[t] for t in published.tasks}:
        return "other numbers of questions per subtask than the published set"
    return ""


def record_sets(benches: Mapping[str, Mapping[str, Any]], sets: Mapping[str, Any]) -> dict[str, str]:
    """Per benchmark of a run's record (``benches``, ``sets`` of eval.json) why it is not the published set, or ''."""
    return {name: differs(name, {**facts, **(sets.get(name) or {})}) for name, facts in benches.items()}


def renamed(benches: Mapping[str, Mapping[str, Any]], sets: Mapping[str, Any]) -> dict[str, str]:
    """Names of a run's record that mean something else today: records of earlier versions call everything as given."""
    found = {}
    for name, facts in benches.items():
        if name not in sets:
            path = str(facts.get("path") or "")
            world = bool(path) and Path(path).exists() and has_recipe(path)
            now = called(name, path, str(facts.get("format") or ""), world)
            if now != name:
                found[name] = now
    return found
