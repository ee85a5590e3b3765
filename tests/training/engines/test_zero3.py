"""DeepSpeed ZeRO-3: what an engine file may say, and when DeepSpeed is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_runs import engine_file, environment
from realvr.cli import main
from realvr.training.engine.settings import ENGINE_FOLDER, ZeRO3Settings, read_engine
from stage_runs import config_file, configure

# ---------------------------------------------------------------------- engine files


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], **content: Any) -> str:
    """The one line that refuses an engine file, before model and data are looked for."""
    config = config_file(configure("sft", tmp_path / "model", tmp_path / "data", tmp_path / "run"), tmp_path / "c.yaml")
    assert main(["train", "sft", str(config), "--engine", str(engine_file(tmp_path, type="zero3", **content))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("realvr: error: ") and not (tmp_path / "run").exists()
    return line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"optimizer": {"type": "Adam"}}, "optimizer is not set here: the settings of the training have it (optim)"),
        (
            {"gradient_clipping": 1.0},
            "gradient_clipping is not set here: the settings of the training have it (optim.c",
        ),
        ({"bf16": {"enabled": True}}, "bf16 is not set here: weights have the type that the model is loaded with"),
        (
            {"train_batch_size": 8},
            "train_batch_size is not set here: the settings of the training have it (optim.batch",
        ),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization: stage is not set here: this engine is stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "weights and optimizer stay on the GPUs"),
        ({"zero_optimization": {"leaf_module": {}}}, "leaf modules cannot pass several times before a backward pass"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size: write a number"),
        ({"reshard_after_forward": True}, "it is a setting of engine fsdp2"),
    ],
)
def test_settings_that_are_ours_are_refused_with_their_place(
    content: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(tmp_path, capsys, **content)
    assert str(tmp_path / "zero3.yaml") in line and said in line


def test_without_deepspeed_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    missing = lambda name, package=None: None if name == "deepspeed" else found(name, package)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert "engine zero3 needs deepspeed: pip install 'realvr[deepspeed]'" in refused(tmp_path, capsys)


def test_the_papers_file_has_the_papers_values() -> None:
    """tab:hp-dist; numbers, where YAML would read 1e9 as a text."""
    found = read_engine("zero3-paper", {"zero3": ZeRO3Settings})
    assert found.zero_optimization == {"overlap_comm": True, "stage3_max_live_parameters": 10**9}
    assert (ENGINE_FOLDER / "zero3.yaml").is_file()


def test_deepspeed_is_imported_by_its_engine_alone(tmp_path: Path) -> None:
    """Importing it takes a second, and without a GPU it warns on standard output."""
    code = "import sys, realvr.training.engine.zero3, realvr.training.run, peft; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stdout == "False\n" and not done.stderr
