"""The models that a run leaves, ``final`` at its end and ``best`` on the way: plain model folders with a card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from realvr.errors import UserError, explained
from realvr.runs.files import publish, sync
from realvr.training import configuration
from realvr.training.card import TAG, base_model, card
from realvr.training.engine import Engine
from realvr.training.records import BEST, FINAL
from realvr.training.settings import TrainSettings
from realvr.training.task import Task


def refuse_foreign(out: Path) -> None:
    """A run replaces ``final`` and ``best``: one that no run wrote must not be lost."""
    for name in (FINAL, BEST):
        if (out / name).exists() and not (out / "settings.yaml").exists():
            raise UserError(f"{out / name} is not of a training run: move it away, or choose another run.out")


def write_model(task: Task, settings: TrainSettings, engine: Engine, values: dict[str, Any], name: str = FINAL) -> None:
    """Write a folder with the last metrics in its card. Every rank calls it; the folder appears when it is whole."""
    out = settings.run.out
    partial, final, old = out / f".{name}.partial", out / name, out / f".{name}.old"
    problem = None
    try:
        if engine.main:
            for folder in (partial, old):
                shutil.rmtree(folder, ignore_errors=True)
            partial.mkdir(parents=True)
        engine.export(lambda: task.export(partial))
        if engine.main:
            _publish(partial, final, old, settings, values)
    except Exception as error:
        if explained(error) is None:
            raise
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        shutil.rmtree(partial, ignore_errors=True)
    engine.watchdog.follow_main()
    problems = [text for text in engine.gather_objects(problem) if text]
    if problems:
        raise UserError(f"{final} could not be written ({problems[0]}); the same command tries again")


def _publish(partial: Path, final: Path, old: Path, settings: TrainSettings, values: dict[str, Any]) -> None:
    title, base = settings.run.out.name, base_model(settings.model.path)
    tags = (TAG, configuration.kind_of(settings))
    text = card(title, base, str(final), configuration.dump(settings), values, tags)
    (partial / "README.md").write_text(text, encoding="utf-8")
    for path in partial.rglob("*"):
        sync(path)
    if final.exists():
        publish(final, old)
    publish(partial, final)
    shutil.rmtree(old, ignore_errors=True)
