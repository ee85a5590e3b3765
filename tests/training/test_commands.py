"""``realvr train``: the command line around the loop, with a small task put in place of the paper's methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from realvr.cli import main
from training_task import Options, RegressionTask


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "realvr.training.method.build",
        lambda settings, engine, dry: RegressionTask(Options(out="", microbatch=4), engine),
    )
    path = tmp_path / "config.yaml"
    settings = {
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d"}]},
        "run": {"out": str(tmp_path / "run")},
        "optim": {"steps": 3, "batch": 8, "microbatch": 4},
        "log": {"tensorboard": False, "console": False},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_train_dry_run_and_overrides(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "base", str(config), "--dry-run", "--optim.lr", "0.5"]) == 0
    assert "lr: 0.5" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert main(["train", "base", str(config), "--optim.steps", "2"]) == 0
    assert yaml.safe_load((tmp_path / "run/settings.yaml").read_text())["optim"]["steps"] == 2
    assert main(["train", "base", str(config), "--resume", "never"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "base", str(config), "--resume=auto"]) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        ([], "give a settings file or its name first"),
        (["--optim.lr", "1"], "give a settings file or its name first"),
        (
            ["absent.yaml"],
            "absent.yaml: the settings cannot be read (No such file or directory); `realvr train rl --help` lists",
        ),
    ):
        assert main(["train", "rl", *args]) == 2
        text = capsys.readouterr().err
        assert message in text and text.count("\n") == 1
