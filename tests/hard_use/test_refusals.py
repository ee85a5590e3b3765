"""What the machine or a user's file refuses: one line and exit code 2, in real processes, and the run goes on after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked import assert_one_line, forked
from realvr.errors import explained, out_of_memory
from verbs import Place


def some(names: Iterable[str], *fast: str) -> list[Any]:
    """All of them in the slow suite, these in the fast one too."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


# ---------------------------------------------------------------------- a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def mount(size: int) -> Path:
        nonlocal mounted
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
            mounted = False
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if os.getuid() or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system is not permitted here")
        mounted = True
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


SIZES = {
    "sft": (4, 8, 16, 24, 900, 2600, 4200),
    "rl": (4, 8, 16, 1300, 4400),
    "base": (4, 8, 16, 1300),
    "eval": (4, 8, 32, 48, 64),
    "counterfactual": (4, 8, 24, 32, 64),
    "exchange": (4, 8, 64, 96, 128),
}
"""KB at which a run meets the end of the disk at another moment: settings, records, checkpoints, tables, the model."""


@pytest.mark.parametrize("name", some(SIZES, "sft", "eval"))
def test_a_full_disk_at_any_moment(name: str, place: Place, disk: Callable[[int], Path], tmp_path: Path) -> None:
    moments = set()
    for size in SIZES[name]:
        out = disk(size) / "run"
        line = assert_one_line(forked(place.verbs[name].args(out), tmp_path), str(out), "No space left on device")
        moments.add(line)
        left = [path.name for path in out.rglob("*") if path.suffix in (".tmp", ".partial") or path.name == ".lock"]
        assert not left, f"{size} KB: {left}"
    assert len(moments) >= 3


def test_a_run_goes_on_when_there_is_room_again(place: Place, disk: Callable[[int], Path], tmp_path: Path) -> None:
    verb, out = place.verbs["sft"], disk(2600) / "run"
    assert_one_line(forked(verb.args(out), tmp_path), "step-000002 is intact")
    subprocess.run(["mount", "-o", "remount,size=20m", str(out.parent)], check=True)
    assert forked(verb.args(out), tmp_path).code == 0
    assert [row["step"] for row in verb.records(out)] == [1, 2, 3, 4]


def test_a_read_only_disk(place: Place, disk: Callable[[int], Path], tmp_path: Path) -> None:
    folder = disk(100)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for name in ("sft", "eval", "exchange"):
        assert_one_line(forked(place.verbs[name].args(folder / "run"), tmp_path), "Read-only file system", str(folder))
    made = ["world", "make", folder / "w", "--split", "mmvp", "--count", "2", "--workers", "1"]
    assert_one_line(forked(made, tmp_path), "Read-only file system", str(folder))
    assert_one_line(forked(["new", "--family", "qwen2.5-vl", folder / "m"], tmp_path), "Read-only file system")


@pytest.mark.parametrize("name", ["sft", "eval", "counterfactual"])
def test_files_that_may_not_grow(name: str, place: Place, tmp_path: Path) -> None:
    """The limit of a shell on the size of a file (ulimit -f): needs no mount."""
    for most in (1200, 5000):  # the process must be able to say so
        out = tmp_path / f"run-{most}"
        done = forked(place.verbs[name].args(out), tmp_path, out=os.devnull, file_bytes=most)
        assert_one_line(done, str(out), "File too large")


def test_standard_output_on_a_full_disk(tmp_path: Path) -> None:
    for args in (["--help"], ["benchmarks"], ["env"]):
        assert_one_line(forked(args, tmp_path, out="/dev/full"), "standard output", "No space left on device")


# ---------------------------------------------------------------------- a place that cannot be


@pytest.mark.parametrize("name", ["base", "sft", "rl", "eval", "counterfactual", "exchange"])
def test_a_place_that_cannot_be_written(name: str, place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    impossible = [tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("x" * 300)]
    for out in impossible:
        assert_one_line(forked(place.verbs[name].args(out), tmp_path / "logs"), str(out))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("inside", ["settings.yaml", "metrics.jsonl", "checkpoints", "final", "tensorboard"])
def test_something_else_where_a_file_should_be(inside: str, place: Place, tmp_path: Path) -> None:
    out = tmp_path / "run"
    if inside in ("settings.yaml", "metrics.jsonl"):
        (out / inside / "x").mkdir(parents=True)
    else:
        out.mkdir()
        (out / inside).write_text("mine")
    done = forked(place.verbs["sft"].args(out), tmp_path)
    assert_one_line(done, str(out / inside))
    assert (out / inside).is_dir() or (out / inside).read_text() == "mine"


def test_a_folder_that_no_run_wrote_is_not_replaced(place: Place, tmp_path: Path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "thesis.tex").write_text("mine")
    line = assert_one_line(forked(place.verbs["sft"].args(tmp_path / "run"), tmp_path), "move it away")
    assert str(tmp_path / "run" / "final") in line and (tmp_path / "run" / "final" / "thesis.tex").exists()


# ---------------------------------------------------------------------- memory


def test_too_little_memory(place: Place, tmp_path: Path) -> None:
    """Room for everything but the batch: a tensor of its size cannot be had, small things can."""
    args = place.verbs["sft"].args(tmp_path / "run")
    large = ["--optim.batch", "256", "--optim.microbatch", "256"]
    done = forked([*args, *large], tmp_path, more_memory=120 * 2**20)
    assert_one_line(done, "step 1 ran out of memory: lower optim.microbatch")


def test_what_counts_as_too_little_memory() -> None:
    import torch

    with pytest.raises(RuntimeError) as found:
        torch.empty(2**55, dtype=torch.uint8)
    assert out_of_memory(found.value) and "not enough memory" in str(explained(found.value))
    with pytest.raises(MemoryError) as python:
        bytearray(2**60)
    assert out_of_memory(python.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for bug in (
        RuntimeError("shapes differ"),
        KeyError("x"),
        FileNotFoundError(2, "No such file", "x"),
        OSError("odd"),
    ):
        assert explained(bug) is None  # a mistake of ours keeps its traceback


# ---------------------------------------------------------------------- rewards


REWARDS = {
    "raises": ("return 1 / 0", "ZeroDivisionError: division by zero"),
    "none": ("return None", "it returned None"),
    "text": ("return '0.5'", "it returned '0.5'"),
    "list": ("return [1.0, 2.0]", "TypeError"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
}


def reward_run(place: Place, tmp_path: Path, body: str, **changes: Any) -> list[str]:
    (tmp_path / "mine.py").write_text(f"def mine(text, sample):\n    {body}\n")
    config = yaml.safe_load(Path(place.verbs["rl"].args(tmp_path)[2]).read_text())
    config |= {"rewards": {f"{tmp_path}/mine.py:mine": 1.0}, **changes}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    return ["train", "rl", str(tmp_path / "rl.yaml"), "--run.out", str(tmp_path / "run")]


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_gives_no_number(name: str, place: Place, tmp_path: Path) -> None:
    body, why = REWARDS[name]
    ids = [json.loads(line)["id"] for line in place.data.read_text().splitlines()]
    line = assert_one_line(forked(reward_run(place, tmp_path, body), tmp_path), "mine.py:mine", why)
    assert any(f"'{sample}'" in line for sample in ids)


@pytest.mark.parametrize("value", some(("nan", "inf", "1e300"), "nan", "inf"))
def test_rewards_that_are_not_finite_skip_their_step(value: str, place: Place, tmp_path: Path) -> None:
    """Also in the table of completions. A run of nothing else has trained nothing: no model, and not "done"."""
    log = {"console": True, "tensorboard": True, "table_every": 1, "parts_every": 0}
    args = reward_run(place, tmp_path, f"return float('{value}')", log=log)
    done = forked([*args, "--optim.steps", "2"], tmp_path)
    assert_one_line(done, "every one of the 2 steps was skipped", "nothing was trained")
    assert "done" not in done.said and done.said.count("not finite; skipped (examples ") == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert rows and all(row["reward"] is None for row in rows)
    assert not (tmp_path / "run" / "final").exists()
    again = forked([*args, "--optim.steps", "2"], tmp_path)  # resumed at its end: still nothing trained
    assert_one_line(again, "every one of the 2 steps was skipped")


def test_a_run_that_trained_some_steps_is_done(place: Place, tmp_path: Path) -> None:
    body = "import pathlib; p = pathlib.Path(__file__ + '.count'); n = len(p.read_text()) if p.exists() else 0"
    body += "; p.write_text('x' * (n + 1)); return float('nan') if n < 16 else float(n % 3)"
    done = forked(reward_run(place, tmp_path, body, log={"console": True, "tensorboard": False}), tmp_path)
    assert done.code == 0 and "done: " in done.said, done.said
    assert (tmp_path / "run" / "final").is_dir() and "skipped (examples" in done.said


# ---------------------------------------------------------------------- other input


def test_a_group_of_one(place: Place, tmp_path: Path) -> None:
    args = [*place.verbs["rl"].args(tmp_path / "run"), "--group", "1"]
    assert_one_line(forked(args, tmp_path), "group is 1", "at least 2")


def test_an_empty_question(place: Place, tmp_path: Path) -> None:
    for question in ("", "  \n"):
        assert_one_line(forked(["ask", place.model, question], tmp_path), "the question is empty")


def test_more_positions_than_the_span_has(place: Place, tmp_path: Path) -> None:
    args = place.verbs["exchange"].args(tmp_path / "run")
    assert_one_line(forked([*args, "--k", "1,4"], tmp_path), "--k asks for 4 positions", "K = 3 slots")


@pytest.mark.slow
def test_two_processes_of_an_evaluation_print_notes(
    place: Place, build_tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Such as that a limit on visual tokens means nothing to a family: once, as a note, without the source line."""
    model = build_tiny("gemma3")
    args = ["eval", model, "--bench", f"mine={place.data}", "--out", tmp_path / "run", "--latents", "0", "--limit", "2"]
    done = forked([*args, "--max-tokens", "64", "--processes", "2", "--device", "cpu", "--max-new", "2"], tmp_path)
    assert done.code == 0, done.said
    notes = [line for line in done.said.splitlines() if line.strip()]
    assert all(line.startswith("realvr: note: ") for line in notes), done.said
    assert sum("max_tokens" in line or "visual tokens" in line for line in notes) == 1, done.said
