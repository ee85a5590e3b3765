"""A rank that dies or hangs ends the run with one line within a stated time, and the same command goes on.

The ranks end themselves (`toys/dying_method.py`), in the middle of a step, of a collective, of a checkpoint or of the
export. What comes after is bit for bit what an uninterrupted run computes.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine_runs import (
    DYING,
    TIMEOUT,
    assert_rewarded,
    checkpoints,
    command,
    config_file,
    engine_file,
    environment,
    error_line,
    finish,
    reference,
    torchrun,
    train,
)
from forked import Forked
from realvr.runs.launching import ENDING, HUNG
from stage_runs import column, configure, lines, numbers

PLUGIN = DYING
SLACK = 5.0
"""Seconds for a machine that does much else."""
WAIT = 20
"""Timeout of an engine that shall notice a hang. It counts at the start too, where one rank may have imported torch
seconds before another."""
TORCHRUN = 30.0
"""Seconds after which torchrun kills what it has sent SIGTERM."""
SMALL: dict[str, dict[str, Any]] = {
    "sft": {"pack_tokens": 256},
    "rl": {"max_new": 12, "updates_per_rollout": 3},
}


def settings(kind: str, model: Path, data: Path, out: Path) -> dict[str, Any]:
    """Five steps, a checkpoint after the second and the fourth, on the method that can die."""
    changes = {"optim": {"steps": 5, "microbatch": 1}, "checkpoint": {"every": 2}, **SMALL[kind]}
    return configure(kind, model, data, out, method={"type": f"dying-{kind}"}, **changes)


KILLS = {"in a checkpoint": ("save 2 0", 0), "in a collective": ("gather 3 1", 2), "in the export": ("export 5 0", 5)}
"""Place, step and rank of a kill; the step of the checkpoint from which the next start goes on."""
IN_A_STEP = {"in a step": ("terms 4 1", 2)}
"""Between two updates on the same rollouts."""


@pytest.fixture(scope="module")
def starts(untrained: Path, dense: Path) -> dict[str, Path]:
    """The models that the stages start from: Stage 2 from one that answers, some of it rightly."""
    return {"sft": untrained, "rl": dense}


@pytest.fixture(scope="module")
def whole(starts: dict[str, Path], eight: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uninterrupted runs of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in SMALL:
        reference(kind, settings(kind, starts[kind], eight, folder / kind), "--plugin", str(PLUGIN))
    assert_rewarded(folder / "rl")
    return {kind: folder / kind for kind in SMALL}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "launcher", "kills"),
    [
        ("sft", "realvr", KILLS),
        ("rl", "realvr", IN_A_STEP),
        ("sft", "torchrun", {"in a collective": KILLS["in a collective"]}),
    ],
    ids=["sft", "rl", "torchrun"],
)
def test_a_killed_run_reaches_the_same_numbers(
    kind: str,
    launcher: str,
    kills: dict[str, tuple[str, int]],
    whole: dict[str, Path],
    starts: dict[str, Path],
    eight: Path,
    tmp_path: Path,
) -> None:
    """Killed at one place, started again, killed at the next; then left alone."""
    out = tmp_path / "run"
    raw = settings(kind, starts[kind], eight, out)
    for where, step in kills.values():
        done = train(kind, raw, "--plugin", str(PLUGIN), code=1, launcher=launcher, REALVR_DIE=f"kill {where}")
        took = time.time() - (tmp_path / "run.died").stat().st_mtime
        assert took < (TORCHRUN if launcher == "torchrun" else ENDING) + SLACK
        assert checkpoints(out)[-1:] == ([f"step-{step:06d}"] if step else [])
        line = error_line(done.stderr)
        assert (
            "lost another rank" if launcher == "torchrun" else f"rank {where[-1]} of 2 was ended by SIGKILL"
        ) in line
        assert (f"goes on from {out}/checkpoints/step-{step:06d}" if step else "no checkpoint yet") in line
        if "gather" in where and launcher == "realvr":
            assert "Traceback" not in done.stderr and len(lines(out)) == 2
            assert not list((out / "checkpoints").glob(".*"))
    train(kind, raw, "--plugin", str(PLUGIN))
    assert column(lines(out), "step") == [1, 2, 3, 4, 5]
    assert numbers(lines(out)) == numbers(lines(whole[kind]))
    assert (out / "final/model.safetensors").read_bytes() == (whole[kind] / "final/model.safetensors").read_bytes()
    assert not list((out / "checkpoints").glob(".*")) and not list(out.glob(".*partial"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_ranks_with_a_checkpoint(
    number: signal.Signals, whole: dict[str, Path], untrained: Path, eight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    raw = settings("sft", untrained, eight, out)
    arguments = command("sft", config_file(raw, tmp_path / "config.yaml"), "--plugin", str(PLUGIN))
    process = Forked(arguments[3:], tmp_path / "said", environment=environment(REALVR_DIE="sleep3 collect 3 1"))
    process.until((out / "checkpoints/step-000002").exists, TIMEOUT)
    process.signal(number)
    assert process.wait() == 130, process.said
    text = process.said
    done = len(lines(out))
    assert checkpoints(out)[-1] == f"step-{done:06d}" and done in (2, 3)
    assert "stopping after this step" in text and f"stopped after step {done}" in " ".join(text.split())
    train("sft", raw, "--plugin", str(PLUGIN))
    assert numbers(lines(out)) == numbers(lines(whole["sft"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        ("hang terms 3 0", ""),
        ("stop gather 3 0", ""),
        ("hang collect 3 1", "torchrun"),
    ],
)
def test_a_hang_ends_with_stacks(how: str, launcher: str, untrained: Path, eight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = config_file(settings("sft", untrained, eight, out), tmp_path / "config.yaml")
    engine = engine_file(tmp_path, type="ddp", timeout=WAIT)
    arguments = command("sft", config, "--plugin", str(PLUGIN), engine=engine)
    done = finish(torchrun(arguments) if launcher else arguments, REALVR_DIE=how)
    stuck = int(how[-1])
    line = error_line(done.stderr)
    assert done.returncode == (1 if launcher else HUNG)
    assert f"rank {1 - stuck} of 2 waited {WAIT} s for another rank, step 3" in line
    assert f"goes on from {out}/checkpoints/step-000002" in line
    told = re.findall(r"rank (\d) of 2, step 3, [a-z ]+: stacks of all threads", done.stderr)
    assert sorted(told) == (["0", "1"] if how.startswith("hang") else [str(1 - stuck)])
    assert ("in endless" in done.stderr) == how.startswith("hang")
    assert "gather_objects" in done.stderr or "all_reduce" in done.stderr or "backward" in done.stderr


@pytest.mark.slow
def test_ranks_of_unequal_length_raise_no_alarm(untrained: Path, eight: Path, tmp_path: Path) -> None:
    """Work may take longer than the timeout where no rank waits for it, and the export where all wait for rank 0."""
    raw = settings("sft", untrained, eight, tmp_path / "run")
    engine, how = engine_file(tmp_path, type="ddp", timeout=WAIT), f"sleep{WAIT + 5} export 5 0"
    done = train("sft", raw, "--plugin", str(PLUGIN), engine=engine, launcher="realvr", REALVR_DIE=how)
    assert "stacks" not in done.stderr and len(lines(tmp_path / "run")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2"])
def test_a_hang_inside_the_model_ends_with_stacks(engine: str, untrained: Path, eight: Path, tmp_path: Path) -> None:
    raw = settings("sft", untrained, eight, tmp_path / "run")
    file = engine_file(tmp_path, type=engine, timeout=WAIT)
    how = {"code": HUNG, "launcher": "realvr", "REALVR_DIE": "hang terms 3 1"}
    done = train("sft", raw, "--plugin", str(PLUGIN), engine=file, **how)  # type: ignore[arg-type]
    assert f"rank 0 of 2 waited {WAIT} s for another rank, step 3, forward and backward" in error_line(done.stderr)
    assert "in endless" in done.stderr and done.stderr.count("stacks of all threads") == 2
