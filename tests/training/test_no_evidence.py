"""Stage 1 with latents needs evidence boxes: none is refused before the model is read, few are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realvr.cli import main
from stage_runs import config_file, configure, lines, world, write


def rows(folder: Path, boxed: int, bare: int) -> Path:
    found = [
        replace(sample, boxes=sample.boxes if number < boxed else [])
        for number, sample in enumerate(world(boxed + bare))
    ]
    assert all(sample.boxes for sample in found[:boxed])
    return write(found, folder)


def test_no_box_at_all_is_refused_before_step_one(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "data", 0, 4)
    config = config_file(configure("sft", plain, data, tmp_path / "run"), tmp_path / "mine.yaml")
    assert main(["train", "sft", str(config)]) == 2
    told = capsys.readouterr().err
    assert f"none of the 4 rows of {data} has an evidence box" in told and "--allow-no-evidence" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "final").exists()
    assert main(["train", "sft", str(config), "--allow-no-evidence"]) == 0
    assert "0 of 4 rows (0.0%) have evidence boxes" in capsys.readouterr().err
    assert lines(tmp_path / "run")[0]["data/with_targets"] == 0


def test_the_control_without_latents_needs_none(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "data", 0, 4)
    config = config_file(configure("sft", plain, data, tmp_path / "run", model={"latents": 0}), tmp_path / "mine.yaml")
    assert main(["train", "sft", str(config)]) == 0
    assert "evidence boxes:" not in capsys.readouterr().err


@pytest.mark.parametrize(("boxed", "bare", "noted"), [(1, 11, True), (1, 9, False), (2, 10, False)])
def test_few_boxes_are_reported(
    boxed: int, bare: int, noted: bool, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "data", boxed, bare)
    config = config_file(configure("sft", plain, data, tmp_path / "run"), tmp_path / "mine.yaml")
    assert main(["train", "sft", str(config), "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert (f"{boxed} of {boxed + bare} rows" in told and "learn from these alone" in told) == noted


def test_a_source_that_is_left_out_does_not_count(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = configure("sft", plain, rows(tmp_path / "bare", 0, 4), tmp_path / "run")
    raw["data"]["sources"].append({"path": str(rows(tmp_path / "boxed", 4, 0)), "weight": 0})
    assert main(["train", "sft", str(config_file(raw, tmp_path / "mine.yaml"))]) == 2
    assert "none of the 4 rows" in capsys.readouterr().err
