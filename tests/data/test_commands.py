"""The three commands, as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from realvr.data.commands import check, export, show
from realvr.data.export import write
from realvr.data.sample import Sample
from realvr.errors import UserError


@pytest.fixture
def file(tmp_path: Path, five_options: list[Sample]) -> Path:
    write(five_options, "jsonl", tmp_path / "in" / "x.jsonl")
    return tmp_path / "in" / "x.jsonl"


def test_check_counts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_text().splitlines()
    lines[1] = lines[1].replace("scene1.png", "gone.png")
    lines[2] = lines[2].replace('"answer": "C"', '"answer": "Z"')
    file.write_text("\n".join(lines) + "\n")
    assert check([file], json=True, quarantine=file.parent / "bad.jsonl") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["ok"], result["usable"]) == (6, 4, True)
    assert result["dropped"] == {"image_missing": 1, "answer_not_in_choices": 1}
    assert result["images"] == {"referenced": 4, "missing": 1}
    assert result["boxes"]["boxes"] == 8 and 0 < result["boxes"]["area"]["median"] < 1
    assert result["answers"]["multiple_choice"] == {"A": 2, "D": 1, "E": 1}
    assert "row 2" in result["examples"]["image_missing"]
    assert len((file.parent / "bad.jsonl").read_text().splitlines()) == 2
    assert check([file]) == 0
    out = capsys.readouterr().out
    assert "image_missing" in out and "answers, multiple choice: A 2 (50%)" in out


def test_check_exit_codes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([tmp_path / "nothing.json"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert check([file, tmp_path]) == 2, "one unreadable input is enough, the others are still read"
    captured = capsys.readouterr()
    assert "folder" in captured.err and "x.jsonl" in captured.out
    assert check([file], images=tmp_path) == 1, "nothing usable: no image is there"
    (file.parent / "images" / "scene3.png").unlink()
    assert check([file], policy="strict") == 2
    assert "row 4: image_missing" in capsys.readouterr().err
    assert check([file]) == 0


def test_show(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], five_options: list[Sample]) -> None:
    for family in ("qwen2.5-vl", "internvl3"):
        assert show(file, limit=2, json=True, save=tmp_path / family, family=family) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(rows) == 2
        assert {"id", "images", "question", "choices", "answer", "boxes"} <= set(rows[0])
        assert rows[0]["images"] == ["images/scene0.png"]
        assert rows[0]["boxes"][0] == {"image": 0, "xyxy": list(five_options[0].boxes[0].xyxy)}
        assert sorted(path.name for path in (tmp_path / family).iterdir()) == ["0001_0.png", "0002_0.png"]
        assert max(Image.open(tmp_path / family / "0001_0.png").size) == 448
    assert show(file, limit=1) == 0
    assert "answer: A" in capsys.readouterr().out
    assert show(tmp_path / "nothing") == 2
    (file.parent / "images" / "scene0.png").unlink()
    assert show(file, limit=1) == 0 and show(file, limit=1, save=tmp_path / "no") == 2
    file.write_text("{}\n")
    assert show(file, format="jsonl") == 1


@pytest.mark.parametrize(("layout", "name"), [("visual-cot", "v.json"), ("lvr", "l.json"), ("virl39k", "v.parquet")])
def test_export_there_and_back(
    layout: str, name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(file, tmp_path / "there" / name, layout) == 0
    assert "wrote 6 rows" in capsys.readouterr().out
    assert export(tmp_path / "there" / name, tmp_path / "back" / "x.jsonl", "jsonl") == 0
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (file, tmp_path / "back/x.jsonl")]
    for before, after in zip(*rows, strict=True):
        assert [after[key] for key in ("question", "choices", "answer")] == [
            before[key] for key in ("question", "choices", "answer")
        ]
        assert layout == "virl39k" or len(after["boxes"]) == len(before["boxes"])


def test_export_errors(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(file, file, "jsonl") == 2 and "overwrite" in capsys.readouterr().err
    assert export(file, tmp_path / "x", "coco") == 2 and "choose one of" in capsys.readouterr().err
    assert export(file, tmp_path, "lvr") == 2 and "folder" in capsys.readouterr().err
    assert export(file, tmp_path / "x.tsv", "hr-bench") == 1 and "left out 6" in capsys.readouterr().out
    assert export(file, tmp_path / "x.tsv", "hr-bench", policy="strict") == 2


def test_torch_and_pyarrow_stay_unimported(file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from realvr.data.commands import check, show; "
        f"assert check([Path({str(file)!r})]) == 0; assert show(Path({str(file)!r}), limit=1) == 0; "
        "print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_no_input_is_overwritten(
    tmp_path: Path, five_options: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "MMVP"
    two = [replace(s, choices=s.choices[:2], answer="A") for s in five_options]
    write(two, "mmvp", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert export(folder / "Questions.csv", folder, "mmvp") == 2 and "not empty" in capsys.readouterr().err
    for name in ("Questions.csv", "link.csv"):
        if name == "link.csv":
            (folder / name).symlink_to("Questions.csv")
        with pytest.raises(UserError, match="would overwrite an input"):
            check([folder / "Questions.csv"], quarantine=folder / name)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def test_places_that_cannot_be_written_are_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(file, file / "x.jsonl", "jsonl") == 2 and "cannot be written" in capsys.readouterr().err
    assert show(file, save=file / "pictures") == 2 and "cannot be written" in capsys.readouterr().err
    file.write_text(file.read_text() + "{}\n")
    assert check([file], quarantine=file.parent) == 2 and "quarantine file" in capsys.readouterr().err
