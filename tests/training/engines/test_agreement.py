"""Ranks that would train different things end before the first step, with one line that names the difference."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_runs import config_file, ranks
from forked import assert_one_line
from realvr.training.agreement import data_facts, difference, model_files
from stage_runs import configure, world, write


def start(folder: Path, raws: Sequence[dict[str, Any]], homes: Sequence[Path] = ()) -> str:
    """Two ranks, each with settings or files of its own, as on two machines; the one line that they print."""
    commands = []
    for rank, raw in enumerate(raws):
        commands.append(["train", "sft", str(config_file(raw, folder / f"config-{rank}.yaml"))])
    first, second = ranks(commands, folder / "ranks", homes, code=2)
    assert "realvr: error:" not in second.said and "Traceback" not in first.said + second.said
    return assert_one_line(first)


def test_other_settings_are_named(untrained: Path, eight: Path, tmp_path: Path) -> None:
    raw = configure("sft", untrained, eight, tmp_path / "run", optim={"microbatch": 1})
    other = raw | {"optim": raw["optim"] | {"lr": 2e-3}, "log": raw["log"] | {"parts_every": 1}}
    line = start(tmp_path, (raw, other))
    assert "optim.lr is 0.001 on rank 0 and 0.002 on rank 1" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rows", "images", "model"])
def test_other_files_are_named(what: str, untrained: Path, tmp_path: Path) -> None:
    """The same paths on two machines, with other contents: here each rank works in a folder of its own."""
    for rank in range(2):
        folder = tmp_path / f"machine-{rank}"
        write(world(8), folder)
        shutil.copytree(untrained, folder / "model")
    other = tmp_path / "machine-1"
    if what == "rows":
        text = (other / "data.jsonl").read_text().splitlines()
        (other / "data.jsonl").write_text("\n".join(text[:-1]) + "\n")
    elif what == "images":
        picture = next(path for path in other.rglob("*.png"))
        picture.write_bytes(picture.read_bytes() + b"\0")
    else:
        weights = other / "model/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    raw = configure("sft", Path("model"), Path("data.jsonl"), tmp_path / "run", optim={"microbatch": 1})
    found = start(tmp_path, (raw, raw), [tmp_path / f"machine-{rank}" for rank in range(2)])
    named = {"rows": "rows of data.jsonl is 8 with hash", "images": "images of data.jsonl is 8 with", "model": "model/"}
    assert named[what] in found and "on rank 0 and" in found and "on rank 1" in found


def test_the_first_difference_is_named() -> None:
    same = {"a": 1, "b": 2, "images of x": "8"}
    assert difference([same, dict(same), {"a": 1, "b": 2}]) is None  # one rank of a machine looks at images
    assert "b is 2 on rank 0 and 3 on rank 2" in str(difference([same, same, same | {"b": 3}]))
    assert "c is missing on rank 0 and 4 on rank 1" in str(difference([same, same | {"c": 4}]))
    assert "images of x is 8 on rank 0 and 9 on rank 2" in str(
        difference([same, {"a": 1, "b": 2}, same | {"images of x": "9"}])
    )


def test_what_is_compared_changes_with_the_files(tmp_path: Path) -> None:
    samples = world(3)
    before = data_facts({"x": samples})
    assert before == data_facts({"x": world(3)}) and before != data_facts({"x": samples[::-1]})
    (tmp_path / "config.json").write_text("{}")
    first = model_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert list(first) == ["config.json"] and first != model_files(tmp_path)
    assert model_files(Path("some/name-on-the-hub")) == {}
