"""Real processes: two ranks, kill -9 at the worst moments, Ctrl-C, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from task_processes import command, environment, lines, two_ranks


def start(arguments: list[str], code: int = 0, **limits: int) -> str:
    """Run to the end; standard error."""
    done = Forked.of(arguments, environment=environment(), **limits)
    assert done.wait() == code, done.out.read_text() + done.said
    return done.said


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of twelve steps with noise from the generators."""
    out = tmp_path_factory.mktemp("whole") / "run"
    start(command(out=str(out), noise=True))
    return out


def facts(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("facts-*.json"))]


# ---------------------------------------------------------------------- two ranks


@pytest.mark.slow
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    log = {"parts_every": 4}
    start(command(out=str(tmp_path / "one"), bad={"5": "loss"}, settings={"log": log}))
    start(two_ranks(out=str(tmp_path / "two"), bad={"5": "loss"}, settings={"log": log}))
    (one,), two = facts(tmp_path / "one"), facts(tmp_path / "two")
    assert [fact["world"] for fact in two] == [2, 2]
    assert [fact["rank"] for fact in two] == [0, 1]
    assert {fact["wrapped"] for fact in two} == {"DistributedDataParallel"} and one["wrapped"] == "Module"
    assert two[0]["weights"] == two[1]["weights"]
    flat = [[value for row in fact["weights"] for value in row] for fact in (one, two[0])]
    assert flat[1] == pytest.approx(flat[0], abs=1e-10)
    first, second = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(first) == len(second) == 12
    for name in ("loss", "error", "reward", "tokens", "grad_norm", "lr", "skipped"):
        wanted, got = [line[name] for line in first], [line[name] for line in second]
        assert [value is None for value in got] == [value is None for value in wanted]
        assert [v for v in got if v is not None] == pytest.approx([v for v in wanted if v is not None], abs=1e-9)
    assert first[5]["loss"] is None and second[5]["skipped"] == 1  # NaN on rank 1 only: both skip
    for name in ("grad_norm/fit", "grad_norm/size"):
        assert second[3][name] == pytest.approx(first[3][name], rel=1e-9)


@pytest.mark.slow
def test_two_ranks_killed_while_writing_resume(tmp_path: Path) -> None:
    start(two_ranks(out=str(tmp_path / "whole"), noise=True))
    options: dict[str, Any] = {"out": str(tmp_path / "run"), "noise": True}
    start(two_ranks(**options, kill="save", kill_step=8), code=1)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-000004"]
    start(two_ranks(**options))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert facts(tmp_path / "run") == facts(tmp_path / "whole")


# ---------------------------------------------------------------------- kill -9


@pytest.mark.parametrize(
    ("where", "step", "left"),
    [
        pytest.param("forward", 6, 4, marks=pytest.mark.slow),
        pytest.param("prepare", 8, 8, marks=pytest.mark.slow),
        pytest.param("prepare", 2, 0, marks=pytest.mark.slow),
        pytest.param("save", 8, 4, marks=pytest.mark.slow),
        pytest.param("save", 4, 0, marks=pytest.mark.slow),
    ],
    ids=["in a step", "between steps", "before any checkpoint", "while writing", "while writing the first"],
)
def test_killed_runs_reach_the_same_losses(where: str, step: int, left: int, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    start(command(out=str(out), noise=True, kill=where, kill_step=step), code=-signal.SIGKILL)
    assert max([int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")], default=0) == left
    assert bool(list((out / "checkpoints").glob(".step-*.partial"))) == (where == "save")
    lost = len(lines(out))
    assert lost >= left
    start(command(out=str(out), noise=True))
    assert losses(out) == losses(whole)
    assert [line["step"] for line in lines(out)] == list(range(1, 13))
    assert facts(out) == facts(whole)
    assert not list((out / "checkpoints").glob(".*"))


# ---------------------------------------------------------------------- Ctrl-C


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_continues(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options: dict[str, Any] = {"out": str(out), "noise": True}
    process = Forked.of(command(**options, slow=0.3), environment=environment())
    process.until(lambda: (out / "metrics.jsonl").exists() and len(lines(out)) >= 2)
    process.signal(number)
    code, text = process.wait(60), process.said
    assert code == 130, text
    assert "stopping after this step" in text and "Traceback" not in text
    done = lines(out)[-1]["step"]
    assert done < 12 and f"stopped after step {done}" in " ".join(text.split())
    assert (out / f"checkpoints/step-{done:06d}").is_dir()
    start(command(**options))
    assert losses(out) == losses(whole)


# ---------------------------------------------------------------------- a full disk


@pytest.mark.slow
def test_a_write_that_fails_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options: dict[str, Any] = {"out": str(out), "width": 2000, "settings": {"optim": {"schedule": "constant"}}}
    start(command(**options, steps=4))
    assert_one_line(start(command(**options, steps=8), code=2, file_bytes=60_000), out)
    start(command(**options, steps=8))
    start(command(**{**options, "out": str(tmp_path / "whole")}, steps=8))
    assert losses(out) == losses(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    mounted = mount and os.getuid() == 0 and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)], capture_output=True
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(small_disk: Path) -> None:
    out = small_disk / "run"
    options: dict[str, Any] = {"out": str(out), "width": 2000, "settings": {"optim": {"schedule": "constant"}}}
    start(command(**options, steps=4))
    (small_disk / "filler").write_bytes(b"0" * 300_000)
    assert_one_line(start(command(**options, steps=8), code=2), out)
    assert not list((out / "checkpoints").glob(".*"))
    (small_disk / "filler").unlink()
    start(command(**options, steps=8))
    assert len(lines(out)) == 8


def assert_one_line(text: str, out: Path) -> None:
    assert "Traceback" not in text
    error = [line for line in text.splitlines() if line.startswith("realvr: error:")]
    assert len(error) == 1 and "checkpoint step-000008 could not be written" in error[0], text
    assert "step-000004 is intact" in error[0]
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-000004"]
