"""The stage of ``training_task.py`` in processes of its own, one or two."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from stage_runs import own_port

SCRIPT = Path(__file__).parent / "training_task.py"


def command(*launcher: str, **options: Any) -> list[str]:
    return [sys.executable, *launcher, str(SCRIPT), json.dumps(options)]


def two_ranks(**options: Any) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")
    return command(*launcher, own_port(), **options)


def environment() -> dict[str, str]:
    source = str(SCRIPT.parents[1] / "src")
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
