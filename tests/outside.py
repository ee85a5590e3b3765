"""Verbs in a process of their own, with a file of the user's as ``--plugin``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import realvr
from forked import Forked

SOURCE = Path(realvr.__file__).parent.parent


def start(*args: object, plugin: Path | None) -> Forked:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    named = ["--plugin", str(plugin)] if plugin else []
    return Forked([*args, *named], environment=environment | {"COLUMNS": "200"})


def run(*args: object, plugin: Path | None, code: int = 0, seconds: float = 120) -> str:
    """What a verb prints, on both streams."""
    process = start(*args, plugin=plugin)
    ended, said = process.wait(seconds), process.out.read_text() + process.said
    assert ended == code, said
    return said


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that a run leaves, without times."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {
        str(file.relative_to(folder)): re.sub(rb'"seconds": [0-9.]+', b"", file.read_bytes()).replace(
            str(folder).encode(), b"OUT"
        )
        for file in sorted(files)
    }


def records(folder: Path) -> int:
    """How many examples have been measured, by any process."""
    return sum(file.read_bytes().count(b"\n") for file in folder.rglob("*.jsonl"))
