"""``realvr demo --quick`` as a user runs it: to the end without a network, and killed on the way and begun again."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realvr import models
from realvr.answers import equal
from realvr.demo.files import lines, open_demo_folder, set_done
from realvr.demo.plan import ARMS, quick_settings, steps_of
from realvr.demo.tables import tables
from realvr.evaluation.effects import EFFECTS
from realvr.evaluation.scoring import ABLATIONS
from realvr.widgets import DASH

pytestmark = pytest.mark.skipif(
    not all((Path(models.__file__).parent / name / "config.json").is_file() for name in models.NAMES),
    reason="the packaged checkpoints are not in this checkout yet",
)

NO_NETWORK = """\
import os, socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX:
        open(os.environ["REALVR_NETWORK_LOG"], "a").write(f"{address}\\n")
        raise OSError(101, "Network is unreachable")
    return _connect(self, address)
socket.socket.connect = connect
def getaddrinfo(*arguments, **options):
    open(os.environ["REALVR_NETWORK_LOG"], "a").write(f"{arguments}\\n")
    raise socket.gaierror(-3, "Temporary failure in name resolution")
socket.getaddrinfo = getaddrinfo
"""


def start(out: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "realvr", "demo", "--quick", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str, Path]:
    """A demo that ran to its end on a machine without a network: folder, both outputs, log of attempts to connect."""
    root = tmp_path_factory.mktemp("demo")
    (root / "site").mkdir()
    (root / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join([str(root / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = start(root / "out", PYTHONPATH=path, REALVR_NETWORK_LOG=str(root / "network.log"))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return root / "out", stdout, stderr, root / "network.log"


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def test_the_promised_files_are_there_and_hold_numbers(finished: tuple[Path, str, str, Path]) -> None:
    out, stdout, stderr, network = finished
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["arms"]) == ["Direct", "Stage 1", "Stage 1 short", "LVR-RL", "ReaLVR"]
    found = list(numbers(summary))
    assert len(found) > 150 and all(math.isfinite(number) for number in found)
    for arm in ARMS:
        metrics = summary["arms"][arm.name]
        assert 0 <= metrics["five_task_mean"]["mean"] <= 100 and len(metrics["benches"]) == 6
        assert all((metrics[effect] is not None) == arm.ablation for effect in EFFECTS)
        assert set(metrics["benches"]["mini-trails"]["conditions"]) == (set(ABLATIONS) if arm.ablation else set())
        assert (metrics["donor_lift"] is not None) == ("exchange" in arm.diagnostics)
    assert {"Stage 1 - Direct", "ReaLVR - LVR-RL, trails of 5 to 7 arrows"} <= set(summary["differences"])
    page = Path(stdout.strip().splitlines()[-1])
    assert page == out / "report" / "index.html" and "<html" in page.read_text()
    assert all(name in stdout for name in summary["arms"]) and "mean nothing" in stdout
    assert f"step {len(steps_of(quick_settings()))} of" in stderr
    assert not network.exists(), network.read_text()


def test_the_diagnostics_of_a_model_are_there_with_figures_and_a_verdict(
    finished: tuple[Path, str, str, Path],
) -> None:
    folder = finished[0] / "diagnostics"
    tests = json.loads((folder / "diagnose.json").read_text())["tests"]
    assert len(tests) >= 5 and {one["status"] for one in tests.values()} == {"measured"}
    for name in tests:
        assert all(math.isfinite(number) for number in numbers(json.loads((folder / f"{name}.json").read_text())))
        for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
            drawn = sorted(folder.glob(f"{name}{ending}")) or sorted(folder.glob(f"{name}-*{ending}"))
            assert drawn and all(file.read_bytes().startswith(start) for file in drawn), name
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["sentence"].startswith(verdict["label"]) and verdict["used"]["n"] and verdict["grounded"]["n"]


def test_it_begins_with_what_was_found(finished: tuple[Path, str, str, Path]) -> None:
    """On the terminal, in summary.json and in the list for the report; every number of the lines was measured."""
    out, stdout, _, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    lines = summary["leading"]
    assert len(lines) == 4 and stdout.splitlines()[:4] == lines
    assert json.loads((out / "demo.json").read_text())["leading"] == lines
    assert all(value for places in summary["findings"].values() for value in places.values())
    assert not any(DASH in line or "{" in line for line in lines)
    own, direct = (summary["findings"]["trails"][name] for name in ("own", "direct"))
    assert f"{own['headline']:.0f} %" in lines[0] and f"{direct['headline']:.0f} %" in lines[0]


def test_the_tables_fit_into_a_hundred_columns(finished: tuple[Path, str, str, Path]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    for width in (100, 150):
        console = Console(width=width, file=io.StringIO(), record=True)
        for table in tables(summary, width):
            console.print(table)
        shown = console.export_text()
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown and all(arm.name in shown for arm in ARMS)  # nothing is cut off


def test_the_means_are_those_of_the_saved_answers(finished: tuple[Path, str, str, Path]) -> None:
    """MMVP, MME-RealWorld and trails are plain shares: counted again from the predictions."""
    out = finished[0]
    summary = json.loads((out / "summary.json").read_text())
    for arm in ARMS:
        benches = summary["arms"][arm.name]["benches"]
        rows = [json.loads(line) for line in (out / arm.folder / "eval" / "predictions.jsonl").open()]
        for bench in ("mini-mmvp", "mini-mme-realworld", "mini-trails"):
            own = [r for r in rows if r["bench"] == bench and r["condition"] == "own" and r["latents"] == arm.latents]
            share = 100 * sum(r["correct"] for r in own) / len(own)
            assert benches[bench]["headline"] == pytest.approx(share)
        # `own` now holds the trails; their numbers of arrows are those of the pictures that were drawn.
        drawn = map(json.loads, (out / "world" / "trails" / "samples.jsonl").open())
        arrows = {sample["id"]: int(sample["tags"]["arrows"]) for sample in drawn}
        long = [r["correct"] for r in own if 5 <= arrows[r["question"]] <= 7]
        part = benches["mini-trails"]["parts"]["5-7"]
        assert part["n"] == len(long) and part["headline"] == pytest.approx(100 * sum(long) / len(long))


def test_the_leading_numbers_are_those_of_the_records(finished: tuple[Path, str, str, Path]) -> None:
    """Walk and steering, counted again from the journals of their diagnostics."""
    found = json.loads((finished[0] / "summary.json").read_text())["findings"]
    home = finished[0] / "stage-1"
    walks = [json.loads(line)["inside"] for line in (home / "walk" / "walk.jsonl").open()]
    shares = [sum(inside) / len(inside) for inside in walks]
    assert found["walk"]["inside"]["mean"] == pytest.approx(sum(shares) / len(shares))
    moves = [row for line in (home / "steer" / "steer.jsonl").open() if (row := json.loads(line))["step"] == 4]
    moved = [row for row in moves if row["skipped"] is None]
    for name, condition, truth in (
        ("at_4", "moved", "new_truth"),
        ("keeps_at_4", "moved", "old_truth"),
        ("sham_at_4", "own_place", "new_truth"),
    ):
        given = [bool(equal(row["extracted"][condition], row[truth], row["choices"])) for row in moved]
        assert found["steer"][name]["rate"] == pytest.approx(sum(given) / len(given))
        assert found["steer"][name]["n"] == len(moved)


def test_the_index_names_folders_that_exist_and_steps_count_right(finished: tuple[Path, str, str, Path]) -> None:
    out = finished[0]
    index = json.loads((out / "demo.json").read_text())
    assert index["notes"] and [arm["name"] for arm in index["arms"]] == [arm.name for arm in ARMS]
    for arm in index["arms"]:
        assert all((out / path).is_dir() for key, path in arm.items() if key != "name" and path)
    for step in steps_of(quick_settings()):
        assert (out / "done" / f"{step.name}.json").is_file()
        if step.units and not step.rough:  # how many pairs change their answer is only known roughly
            assert sum(lines(out / journal) for journal in step.journals) == step.units, step.name


def test_both_methods_saw_the_same_prompts(finished: tuple[Path, str, str, Path]) -> None:
    out = finished[0]
    first, second = (
        json.loads((out / arm / "train" / "completions.jsonl").open().readline()) for arm in ("lvr-rl", "realvr")
    )
    assert (first["sample"], first["completion"]) == (second["sample"], second["completion"])


def test_a_finished_demo_is_not_done_again(finished: tuple[Path, str, str, Path]) -> None:
    out = finished[0]
    before = (out / "summary.json").read_bytes()
    begun = time.monotonic()
    process = start(out)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    count = len(steps_of(quick_settings()))
    assert time.monotonic() - begun < 15 and f"{count} of {count} steps were done before" in stderr
    assert (out / "summary.json").read_bytes() == before and stdout.strip().endswith("index.html")


@pytest.mark.slow
def test_a_step_that_fails_is_one_line_that_names_it(tmp_path: Path) -> None:
    """The pictures are marked as drawn and are not there."""
    with open_demo_folder(tmp_path / "demo", quick_settings()):
        pass
    for step in [step for step in steps_of(quick_settings()) if step.kind == "draw"]:
        set_done(tmp_path / "demo", step, {"seconds": 0, "cpu_seconds": 0})
    process = start(tmp_path / "demo")
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "Traceback" not in stderr
    last = stderr.strip().splitlines()[-1]
    # Several steps need pictures; which of them fails first depends on the machine.
    assert last.startswith("realvr: error: ") and "world/" in last and "The same command goes on" in last


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_and_begun_again_gives_the_same_numbers(finished: tuple[Path, str, str, Path], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    training = out / "realvr" / "train" / "metrics.jsonl"
    process = start(out)
    wait_for(lambda: lines(training) >= 2, process)
    process.kill()  # no chance to save anything
    process.communicate()
    assert not (out / "summary.json").exists()

    process = start(out)  # its processes must be gone: the lock is free again, or this one says so
    answers = out / "lvr-rl" / "eval" / "predictions.jsonl"
    wait_for(lambda: lines(answers) >= 1, process)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "the same command goes on" in stderr

    process = start(out)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "steps were done before" in stderr
    assert (out / "summary.json").read_bytes() == (finished[0] / "summary.json").read_bytes()
