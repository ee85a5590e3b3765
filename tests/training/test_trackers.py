"""Weights & Biases and trackio (``log.to``): what the real packages wrote, held against ``metrics.jsonl``."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from optional import need_package
from realvr.errors import UserError
from realvr.training.boards import check_installed
from realvr.training.configuration import load_settings
from realvr.training.sections import LogSettings
from task_processes import command, environment, lines, two_ranks

BLOCK = 32768
Steps = dict[int, dict[str, float]]


def tracked(arguments: list[str], home: Path, code: int = 0, **more: str) -> str:
    """Run in a process with trackers that reach nothing outside ``home``; what it printed on standard error."""
    need_package("wandb")
    need_package("trackio")
    settings = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(home / "trackio"), "HOME": str(home), "WANDB_API_KEY": ""}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment() | settings | more)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout == ""  # what trackers print goes to standard error
    return done.stderr


def transactions(file: Path) -> Iterator[bytes]:
    """Records of a wandb transaction log: blocks of 32 KiB with chunks of (checksum, length, kind), after 7 bytes."""
    data, at, part = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def of_wandb(out: Path) -> tuple[Steps, set[str], dict[str, Any]]:
    """(metrics of each step, ids of runs, settings) in the offline folders of a run."""
    from wandb.proto import wandb_internal_pb2

    steps: Steps = {}
    names: set[str] = set()
    config: dict[str, Any] = {}
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for raw in transactions(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.add(f"{record.run.project}/{record.run.run_id}")
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                step = items.pop("_step")
                assert step not in steps, "a step was sent twice"
                steps[step] = {name: value for name, value in items.items() if not name.startswith("_")}
    return steps, names, config


def of_trackio(home: Path) -> tuple[Steps, set[str]]:
    """(metrics of each step, names of runs) in the database of the project."""
    steps: Steps = {}
    with sqlite3.connect(home / "trackio" / "realvr.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    for _, step, metrics in rows:
        assert step not in steps, "a step was sent twice"
        steps[step] = json.loads(metrics)
    return steps, {name for name, _, _ in rows}


def recorded(out: Path) -> Steps:
    """``metrics.jsonl`` as trackers should hold it: null is left out, as is what only the file has."""
    only = ("step", "seconds", "time")
    return {
        line["step"]: {name: value for name, value in line.items() if name not in only and value is not None}
        for line in lines(out)
    }


@pytest.mark.slow
def test_a_run_and_its_sequel_are_one_run_in_every_tracker(tmp_path: Path) -> None:
    out, log = tmp_path / "run", {"to": ["wandb", "trackio"], "tensorboard": True}
    tracked(command(out=str(out), steps=8, bad={"2": "loss"}, settings={"log": log}), tmp_path)
    first = recorded(out)
    assert "grad_norm" in first[2] and "grad_norm" not in first[3]  # not finite, so left out
    shutil.rmtree(out / "checkpoints" / "step-000008")  # as if killed before it: steps 5 to 8 are made again
    tracked(command(out=str(out), steps=9, bad={"2": "loss"}, settings={"log": log}), tmp_path)
    steps, runs, config = of_wandb(out)
    assert len(runs) == 1 and runs.pop().startswith("realvr/")
    assert config["log"]["to"] == ["tensorboard", "wandb", "trackio"] and config["optim"]["lr"] == 0.02
    assert steps == {step: first.get(step, values) for step, values in recorded(out).items()}
    steps, names = of_trackio(tmp_path)
    assert len(names) == 1 and names.pop().startswith("run-")
    assert steps == {step: first.get(step, values) for step, values in recorded(out).items()}
    assert sorted(steps) == list(range(1, 10)) and list((out / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_tracker_added_to_a_run_gets_what_comes_after(tmp_path: Path) -> None:
    out = tmp_path / "run"
    tracked(command(out=str(out), steps=8), tmp_path)
    assert not (out / "trackers.json").exists() and not (out / "tensorboard").exists()
    shutil.rmtree(out / "checkpoints" / "step-000008")  # steps 5 to 8 are made again, and are new to the tracker
    tracked(command(out=str(out), steps=9, settings={"log": {"to": ["trackio"]}}), tmp_path)
    steps, _ = of_trackio(tmp_path)
    assert steps == {step: values for step, values in recorded(out).items() if step > 4}
    assert not (out / "wandb").exists()


@pytest.mark.slow
def test_only_the_first_rank_logs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    tracked(two_ranks(out=str(out), steps=3, settings={"log": {"to": ["wandb", "trackio"]}}), tmp_path)
    steps, runs, _ = of_wandb(out)
    assert len(runs) == 1 and len(list(out.glob("wandb/offline-run-*"))) == 1 and steps == recorded(out)
    assert of_trackio(tmp_path)[0] == recorded(out)


@pytest.mark.slow
def test_without_a_key_one_line_says_what_to_do(tmp_path: Path) -> None:
    run = command(out=str(tmp_path / "run"), steps=1, settings={"log": {"to": ["wandb"]}})
    text = tracked(run, tmp_path, code=2, WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:1")
    (line,) = [line for line in text.splitlines() if line.startswith("realvr: error:")]
    assert "log.to: wandb does not start" in line and "WANDB_MODE=offline" in line


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python says it of a package that is not there
    with pytest.raises(UserError, match=rf"log.to: {name} needs {name}: pip install 'realvr\[trackers\]'"):
        check_installed(["tensorboard", name])


def test_the_earlier_name_of_the_setting_still_works(tmp_path: Path) -> None:
    assert LogSettings().to == ["tensorboard"]
    assert LogSettings(tensorboard=False).to == [] and LogSettings(tensorboard=True).to == ["tensorboard"]
    assert LogSettings(to=["wandb", "wandb"], tensorboard=True).to == ["tensorboard", "wandb"]
    small = {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "run": {"out": "o"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(small | {"log": {"tensorboard": False}}))
    assert load_settings("sft", file).log.to == []
    assert load_settings("sft", file, ["--log.tensorboard"]).log.to == ["tensorboard"]
    assert load_settings("sft", file, ["--log.to", "wandb", "trackio"]).log.to == ["wandb", "trackio"]
    file.write_text(yaml.safe_dump(small))
    assert load_settings("sft", file, ["--log.no-tensorboard"]).log.to == []
    file.write_text(yaml.safe_dump(small | {"log": {"to": ["mlflow"]}}))
    with pytest.raises(UserError, match=r"log.to.0: Input should be 'tensorboard', 'wandb' or 'trackio'"):
        load_settings("sft", file)
