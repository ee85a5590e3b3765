"""The settings for a user's own data on two processes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_runs import ranks
from forked import Forked
from realvr.training.configuration import load_settings
from realvr.training.packaged import FOLDER
from stage_runs import environment, lines, with_markers, world, write

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((FOLDER / "own").glob("*.yaml"))
LAUNCHED = ("mini-sft", "mini-rl")
"""Started with the line that the docs give; the others as that line starts them."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_batch_divides_over_its_processes(config: Path) -> None:
    """Two processes, and the eight of the files that are for them."""
    settings = load_settings(config.stem.split("-")[-1], config)
    assert (
        settings.optim.batch
        % ((8 if "ddp" in config.stem or "fsdp2" in config.stem else 2) * settings.optim.microbatch)
        == 0
    )


def launcher(kind: str, config: Path) -> list[str]:
    """The documented line, with this interpreter and these names in it."""
    (line,) = re.findall(r"^torchrun .*realvr train rl CONFIG$", (ROOT / "docs/training.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[0] == "torchrun"
    words[words.index("rl")], words[words.index("CONFIG")] = kind, str(config)
    return [sys.executable, "-m", "torch.distributed.run", *words[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_two_processes_train(config: Path, build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    kind, out = config.stem.split("-")[-1], tmp_path / "run"
    data = write(world(32, size=48), tmp_path / "data")
    flags = ["--data.sources.0.path", str(data), "--run.out", str(out), "--optim.steps", "2"]
    if "mini" not in config.stem:  # the same settings on a model that fits here
        model = with_markers(build_tiny("qwen2.5-vl"), tmp_path / "model", latents=8)
        flags += ["--model.path", str(model), "--model.dtype", "float32", "--model.max-tokens", "64"]
        optim = load_settings(kind, config).optim
        few = max(2 * optim.microbatch, optim.batch // 8)  # the batch of one process of eight, or as little as divides
        flags += ["--model.min-tokens", "16", "--optim.batch", str(few)]
    if config.stem in LAUNCHED:
        done = Forked.of([*launcher(kind, config), *flags], environment=environment(), home=tmp_path)
        assert done.wait(600) == 0, done.out.read_text() + done.said
    else:
        ranks([["train", kind, str(config), *flags]] * 2, tmp_path / "ranks")
    assert len(lines(out)) == 2 and (out / "final" / "config.json").is_file()
    assert not (out / ".lock").exists()  # one lock for both, released
    assert sorted(path.name for path in (out / "checkpoints/step-000002").glob("rank-*.json")) == [
        "rank-0.json",
        "rank-1.json",
    ]


@pytest.mark.slow
def test_the_second_run_of_two_processes_is_kept_out(tmp_path: Path) -> None:
    """Rank 0 holds the lock for both; another run of two ends with one line about it."""
    from realvr.runs.lock import hold

    out = tmp_path / "run"
    data = write(world(32, size=48), tmp_path / "data")
    config = FOLDER / "own" / "mini-sft.yaml"
    flags = ["--data.sources.0.path", str(data), "--run.out", str(out), "--optim.steps", "2"]
    with hold(out, "train sft"):
        done = subprocess.run([*launcher("sft", config), *flags], env=environment(), capture_output=True, text=True)
    assert done.returncode != 0 and f"process {os.getpid()} on this machine" in done.stderr
    assert (
        done.stderr.count("realvr: error:") == 1 and "realvr/training" not in done.stderr
    )  # only torchrun's own trace
