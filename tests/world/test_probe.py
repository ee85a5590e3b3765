"""A small network learns to see the easy world within minutes on a CPU (the whole probe needs a GPU)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import realvr

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "world_probe.py"


@pytest.mark.slow
def test_the_easy_world_can_be_seen_by_a_small_network():
    environment = os.environ | {"PYTHONPATH": str(Path(realvr.__file__).parents[1]), "COLUMNS": "160"}
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--workers", "1"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    seen = [float(number) for number in re.findall(r"^│ easy .* ([\d.]+) +│$", done.stdout, re.M)]
    assert len(seen) == 2 and min(seen) > 60, done.stdout
