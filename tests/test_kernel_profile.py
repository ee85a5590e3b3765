"""Profiles of passes: time that a device is busy, and the script on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from kernel_profile import busy_microseconds

ROOT = Path(__file__).parents[1]


def kernel(start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end))


def test_kernels_side_by_side_count_once_and_pauses_do_not() -> None:
    later, outer, inner, across = kernel(20, 25), kernel(0, 10), kernel(2, 5), kernel(8, 12)
    assert busy_microseconds([later, outer, inner, across]) == 12 + 5
    assert busy_microseconds([]) == 0


def test_the_script_lists_host_operations_of_every_pass_without_a_gpu() -> None:
    """Evidence needs more operations than LVR-RL, and adapters more than full parameters."""
    call = [sys.executable, str(ROOT / "benchmarks" / "pass_profile.py"), "--device", "cpu", "--preset", "tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "REALVR_COMMIT": "abc"}
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "tiny:qwen2.5-vl, commit abc, options fast" in done.stdout
    counts = [
        int(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines() if "operations on the host" in line
    ]
    plain, evidence, adapted, both = counts
    assert plain < evidence and plain < adapted < both
    assert " x " in done.stdout and "aten::mm" in done.stdout
