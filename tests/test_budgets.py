"""The numbers that data, world and diagnostics promise, measured by the benchmark scripts that users can run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import realvr

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def measured(script: str, *options: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(realvr.__file__).parents[1]), "COLUMNS": "160"}
    command = [sys.executable, str(SCRIPTS / script), *options]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_checking_500_mb_takes_under_400_mb_of_memory_and_no_torch(tmp_path: Path) -> None:
    result = json.loads(measured("data_memory.py", "--folder", str(tmp_path)))
    assert (
        result["file_mb"] > 500 and result["peak_mb"] < 400 and not result["torch"] and result["ok"] == result["rows"]
    )


@pytest.mark.slow
def test_ten_thousand_scenes_are_drawn_within_a_minute_on_two_cores() -> None:
    (seconds,) = re.findall(r"128x128 drawn, 2 processes +│ 10,000 +│ ([\d.]+) ", measured("world_speed.py"))
    assert float(seconds) < 60


@pytest.mark.slow
def test_the_rank_of_400_mb_of_vectors_takes_under_250_mb_more(tmp_path: Path) -> None:
    result = json.loads(measured("rank_memory.py", "--rows", "200000", "--width", "512", "--folder", str(tmp_path)))
    assert result["files_gb"] > 0.4 and result["rows"] == 200_000 and not list(tmp_path.glob("rank-states/*"))
    assert result["peak_gib"] - result["gib_before"] < 0.25 and result["rank90"] > 400
