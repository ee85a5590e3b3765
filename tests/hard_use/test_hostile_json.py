"""Files of a finished run that were cut, damaged or written by somebody else: going on is refused or works."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from forked import Forked, forked
from hostile import spoil
from verbs import Place

NAMES = ("sft", "rl", "eval", "counterfactual", "exchange")


@pytest.fixture(scope="module")
def finished(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of every verb."""
    root = tmp_path_factory.mktemp("finished")
    for name in NAMES:
        done = forked(place.verbs[name].args(root / name), root / "logs")
        assert done.code == 0, done.said
    return root


def attempt(name: str, seed: int, place: Place, finished: Path, tmp_path: Path) -> None:
    """Spoil one file of the run, go on with it, and make a report of it."""
    rng, out = random.Random(f"{name} {seed}"), tmp_path / f"run-{seed}"
    shutil.copytree(finished / name, out)
    files = sorted(path for path in out.rglob("*") if path.suffix in (".json", ".jsonl") and "final" not in path.parts)
    target = rng.choice(files)
    how = f"{target.relative_to(out)}: {spoil(target, rng)}"
    more = ["--optim.steps", "5"] if name in ("sft", "rl") else []
    commands = [[*place.verbs[name].args(out), *more], ["report", out, "--out", tmp_path / "report"]]
    if name == "eval":
        commands += [["score", out], ["compare", out, finished / name]]
    for args in commands:
        process = Forked(args, tmp_path / "logs")
        code = process.wait(100)
        assert code in (0, 2) and "Traceback" not in process.said, f"seed {seed}, {how}\n{process.said}"


@pytest.mark.parametrize("name", NAMES)
def test_a_spoilt_file(name: str, place: Place, finished: Path, tmp_path: Path) -> None:
    for seed in range(2):
        attempt(name, seed, place, finished, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_spoilt_files(name: str, place: Place, finished: Path, tmp_path: Path) -> None:
    for seed in range(100, 125):
        attempt(name, seed, place, finished, tmp_path)
        shutil.rmtree(tmp_path / f"run-{seed}")


@pytest.mark.parametrize(
    "line", [b'{"step": "x"}', b'{"step": null}', b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"loss": 1}', b'{"step": 1.5}']
)
def test_metrics_that_are_no_metrics(line: bytes, place: Place, finished: Path, tmp_path: Path) -> None:
    """Dropped with a note; the lines around them stay."""
    out = tmp_path / "run"
    shutil.copytree(finished / "sft", out)
    whole = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join([*whole[:2], line + b"\n", *whole[2:]]))
    done = forked(place.verbs["sft"].args(out), tmp_path)
    assert done.code == 0 and "dropped 1 lines that are no records of a step" in done.said, done.said
    assert (out / "metrics.jsonl").read_bytes() == b"".join(whole)
