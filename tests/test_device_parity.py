"""`scripts/device_parity.py` on the CPU: every path within tolerance, and a wrong one is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realvr.families import FAMILIES

ROOT = Path(__file__).parents[1]


def parity(*options: str, broken: str = "") -> tuple[int, str]:
    """Exit code and output; ``broken`` is run before the script, in its process."""
    start = f"import runpy, sys; {broken or 'pass'}; sys.argv = ['device_parity.py', *{list(options)!r}]; "
    start += f"runpy.run_path({str(ROOT / 'scripts' / 'device_parity.py')!r}, run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", start], env=environment, text=True, capture_output=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_fast_path_is_within_tolerance_on_the_cpu(family: str) -> None:
    code, printed = parity("--device", "cpu", "--families", family, "--paths", "fast")
    assert code == 0, printed
    checks = set(re.findall(r"^\S+ +(?:float32|bfloat16) +(.*?) {2,}", printed, re.MULTILINE))
    assert {
        "static decode: texts",
        "static decode: after an update",
        "static decode with adapters: log-probs",
        "static decode with adapters: after an update",
        "static decode with adapters, as by default: texts",
        "static decode, rows move: texts",
        "deferred gradients, checkpointed",
        "thin adapters: gradients",
        "adapters as one node: gradients",
        "packed rows: gradients",
        "fast vision: tokens",
        "fused layers: latents, decoded fast",
        "fused layers: texts, decoded fast",
        "fused layers: log-probs, decoded fast",
        "fused layers: gradients, checkpointed",
        "split replay of padded prompts: readouts",
        "split replay of one prompt: gradients, checkpointed",
        "recorded span: gradients, undetached",
        "recorded span: gradients after an update",
        "recorded span, split: gradients, undetached",
        "recorded span with adapters: gradients after an update",
        "split steps of padded prompts: latents",
        "split steps of one prompt: gradients, checkpointed",
    } <= checks
    together = {
        "packed rows, as by default: gradients",
        "recorded span, as by default: gradients, undetached",
        "recorded span with adapters, as by default: gradients, undetached",
    }
    assert together & checks == (set() if family == "qwen3-vl-moe" else together)
    assert not any(check.startswith("graph") for check in checks)  # no GPU here
    assert re.search(r"^(\d+) of \1 within tolerance$", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_wrong_path_is_found() -> None:
    """Deferred gradients that lose the last of the latent steps, those of a recorded span included; the rest passes."""
    broken = (
        "from realvr.training.gradients import _Contributions as C; keep = C._multiply_kept; "
        "C._multiply_kept = lambda self, found: (found.kept and found.kept.pop(), keep(self, found))[1]"
    )
    code, printed = parity(
        "--device", "cpu", "--families", "qwen2.5-vl", "--paths", "fast", "--dtypes", "float32", broken=broken
    )
    assert code == 1, printed
    failed = re.findall(r"float32 +(.*?) {2,}.*FAIL$", printed, re.MULTILINE)
    assert {check.split(":")[0].split(",")[0] for check in failed} == {"deferred gradients", "recorded span"}


@pytest.mark.slow
def test_paths_that_do_not_run_are_no_proof() -> None:
    """A recording that breaks off: the plain path runs, and everything agrees."""
    broken = (
        "import sys; sys.path.append('tests'); import op_tape; "
        "op_tape.Tape.__enter__ = lambda self: (_ for _ in ()).throw(RuntimeError())"
    )
    code, printed = parity(
        "--device", "cpu", "--families", "qwen2.5-vl", "--paths", "fast", "--dtypes", "float32", broken=broken
    )
    assert code == 1 and re.search(r"^(\d+) of \1 within tolerance$", printed, re.MULTILINE), printed
    assert set(re.findall(r"^  qwen2.5-vl, float32: (.*): 4 plain$", printed, re.MULTILINE)) == {
        "recorded span",
        "recorded span, split",
        "recorded span, as by default",
        "recorded span with adapters",
        "recorded span with adapters, as by default",
    }
