"""The folder of a demo: whose it is, what it was begun with, and what is complete. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from realvr import models
from realvr.demo.plan import DemoSettings, Step
from realvr.demo.steps import mark
from realvr.errors import UserError
from realvr.runs.files import differences, read_json, write_json
from realvr.runs.folder import RunFolder, open_run_folder

SETTINGS = "demo_settings.json"
VERSION = 3
"""What the steps leave behind. A folder of another version cannot be continued: its numbers would be incomplete."""


@contextmanager
def open_demo_folder(folder: Path, settings: DemoSettings, take_over: bool = False) -> Iterator[None]:
    """Keep the folder for this demo. A folder of something else is refused and left alone."""
    record = {
        "version": VERSION,
        "settings": settings.as_json(),
        "models": {name: models.fingerprint(name) for name in models.NAMES},
    }
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give --out a folder")
    RunFolder(folder).refuse_foreign(SETTINGS, f"{folder} is not empty and holds no demo: give --out another folder")
    with open_run_folder(folder, "demo", take_over) as opened:
        opened.claim(SETTINGS, record, partial(_refusal, folder))
        yield


def _refusal(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Why a demo cannot go on in a folder."""
    if before.get("version", 1) != now["version"]:
        return f"{folder} holds a demo of another version of realvr: name another --out, or remove the folder"
    weights = before.get("models", {})
    different = differences(before.get("settings", {}), now["settings"])
    different += [f"the weights of {name} differ" for name, hash in now["models"].items() if weights.get(name) != hash]
    if not different:
        return None
    return (
        f"{folder} holds a demo with other settings ({'; '.join(different[:4])}): give the same ones to continue "
        "it, name another --out, or remove the folder"
    )


def read_settings(folder: Path) -> DemoSettings:
    """The settings that a folder was begun with."""
    return DemoSettings.from_json(read_json(folder / SETTINGS)["settings"])


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
