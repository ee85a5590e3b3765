"""The folder of a demo: whose it is, what it was begun with, and what is complete. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from realvr import models
from realvr.demo.plan import DemoSettings, Step
from realvr.demo.steps import mark
from realvr.errors import UserError
from realvr.runs import lock as runlock
from realvr.runs.files import differences, read_json, write_json

SETTINGS = "demo_settings.json"
VERSION = 2
"""What the steps leave behind. A folder of another version cannot be continued: its numbers would be incomplete."""


@contextmanager
def claim(folder: Path, settings: DemoSettings, take_over: bool = False) -> Iterator[None]:
    """Keep the folder for this demo. A folder of something else is refused and left alone."""
    note = folder / SETTINGS
    record = {
        "version": VERSION,
        "settings": asdict(settings),
        "models": {name: models.fingerprint(name) for name in models.NAMES},
    }
    record = json.loads(json.dumps(record))
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give --out a folder")
    if folder.is_dir() and not note.exists() and any(path.name != runlock.NAME for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no demo: give --out another folder")
    with runlock.hold(folder, "demo", take_over):
        if note.exists():
            _refuse_other(folder, read_json(note), record)
        else:
            write_json(note, record)
        yield


def _refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("version", 1) != now["version"]:
        raise UserError(f"{folder} holds a demo of another version of realvr: name another --out, or remove the folder")
    weights = before.get("models", {})
    different = differences(before.get("settings", {}), now["settings"])
    different += [
        f"the weights of {name} differ" for name, found in now["models"].items() if weights.get(name) != found
    ]
    if different:
        raise UserError(
            f"{folder} holds a demo with other settings ({'; '.join(different[:4])}): give the same ones to continue "
            "it, name another --out, or remove the folder"
        )


def read_settings(folder: Path) -> DemoSettings:
    """The settings that a folder was begun with."""
    stored = read_json(folder / SETTINGS)["settings"]
    known = {field.name for field in fields(DemoSettings)}
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return DemoSettings(**{name: value for name, value in chosen.items() if name in known})


def is_done(folder: Path, step: Step) -> bool:
    """Whether a step is complete."""
    return (folder / mark(step)).is_file()


def set_done(folder: Path, step: Step, outcome: dict[str, Any]) -> None:
    """Remember that a step is complete, and what it took."""
    write_json(folder / mark(step), {name: outcome[name] for name in ("seconds", "cpu_seconds")})


def lines(path: Path) -> int:
    """Whole lines of a file; 0 where there is none."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def progress(folder: Path, step: Step) -> int:
    """How many units of a step its journals hold."""
    return min(sum(lines(folder / journal) for journal in step.journals), step.units)


def last_metrics(folder: Path, step: Step) -> dict[str, Any]:
    """The newest line of a training's metrics, or nothing."""
    try:
        text = (folder / step.journals[0]).read_text(encoding="utf-8").splitlines()
        return dict(json.loads(text[-1]))
    except (OSError, ValueError, IndexError):
        return {}
