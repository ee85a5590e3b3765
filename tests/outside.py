"""Verbs in a process of their own, with a file of the user's as ``--plugin``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import realvr

SOURCE = Path(realvr.__file__).parent.parent


def start(*args: object, plugin: Path | None) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    named = ["--plugin", str(plugin)] if plugin else []
    return subprocess.Popen(
        [sys.executable, "-m", "realvr", *map(str, args), *named],
        env=environment | {"COLUMNS": "200"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*args: object, plugin: Path | None, code: int = 0) -> str:
    """What a verb prints, on both streams."""
    process = start(*args, plugin=plugin)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    return out + err
