"""The three commands, as a user meets them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from realvr.cli import data as verbs
from realvr.cli.dispatch import main
from realvr.data.export import write
from realvr.data.overlay import draw
from realvr.data.sample import Box, ImageRef, Sample
from realvr.errors import UserError
from realvr.families import FAMILIES
from realvr.imaging.types import Grid
from realvr.runs.guard import guarded


def check(paths: list[Path], **options: Any) -> int:
    """``realvr data check``."""
    return verbs.check(verbs.CheckCommand(paths, **options))


def show(path: Path, **options: Any) -> int:
    """``realvr data show``; its exit code."""
    return guarded(lambda: verbs.show(verbs.ShowCommand(path, **options)))


def export(path: Path, out: Path, to: str, **options: Any) -> int:
    """``realvr data export``; its exit code."""
    return guarded(lambda: verbs.export(verbs.ExportCommand(path, out, to, **options)))


@pytest.fixture
def file(tmp_path: Path, five_options: list[Sample]) -> Path:
    write(five_options, "jsonl", tmp_path / "in" / "x.jsonl")
    return tmp_path / "in" / "x.jsonl"


def test_check_counts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_text().splitlines()
    lines[1] = lines[1].replace("scene1.png", "gone.png")
    lines[2] = lines[2].replace('"answer": "C"', '"answer": "Z"')
    file.write_text("\n".join(lines) + "\n")
    assert check([file], json=True, quarantine=file.parent / "bad.jsonl", max_dropped=0.34) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["ok"], result["usable"]) == (6, 4, True)
    assert result["dropped"] == {"image_missing": 1, "answer_not_in_choices": 1}
    assert result["images"] == {"referenced": 4, "missing": 1}
    assert result["boxes"]["boxes"] == 8 and 0 < result["boxes"]["area"]["median"] < 1
    assert result["answers"]["multiple_choice"] == {"A": 2, "D": 1, "E": 1}
    assert "row 2" in result["examples"]["image_missing"]
    assert len((file.parent / "bad.jsonl").read_text().splitlines()) == 2
    assert check([file], max_dropped=0.34) == 0
    out = capsys.readouterr().out
    assert "image_missing" in out and "answers, multiple choice: A 2 (50%)" in out


def test_check_exit_codes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for paths, words in (
        ([tmp_path / "nothing.json"], "no such file"),
        ([empty], "empty.jsonl"),
        ([], "no file named"),
    ):
        assert check(paths) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith("realvr: error: ") and words in line and captured.out == ""
    assert check([file, tmp_path / "nothing.json"]) == 2
    captured = capsys.readouterr()
    assert "nothing.json" in captured.err and "nothing.json" not in captured.out and "x.jsonl" in captured.out
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
        assert Image.open(tmp_path / family / "0001_0.png").width == 448
    assert show(file, limit=1) == 0
    assert "answer: A" in capsys.readouterr().out
    assert show(tmp_path / "nothing") == 2
    for none in (0, -1):
        assert main(["data", "show", str(file), "--limit", str(none)]) == 2
        assert f"--limit is {none}: show at least 1 sample" in capsys.readouterr().err
    (file.parent / "images" / "scene0.png").unlink()
    assert show(file, limit=1) == 0 and show(file, limit=1, save=tmp_path / "no") == 2
    file.write_text("{}\n")
    assert show(file, format="jsonl") == 1


def test_check_fails_above_max_dropped(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = file.with_name("good.jsonl")
    good.write_bytes(file.read_bytes())
    text = file.read_text()
    file.write_text(text.replace("[0.25, 0.1", "[10, 3", 1).replace("scene1.png", "gone.png"))
    assert check([good, file], json=True) == 1, "two of the six rows of one input are lost"
    captured = capsys.readouterr()
    assert json.loads(captured.out)["usable"] is False
    assert "x.jsonl: 33.3% of its rows dropped, --max-dropped allows 20.0%" in captured.err
    assert "--boxes pixels" in captured.err and "--images FOLDER" in captured.err and "good" not in captured.err
    assert check([good, file], max_dropped=0.34) == 0 and check([good]) == 0
    with pytest.raises(UserError, match="between 0 and 1"):
        check([good], max_dropped=20)


def test_a_quarantine_file_is_of_the_last_check(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quarantine, text = file.parent / "bad.jsonl", file.read_text()
    file.write_text(text + "{}\n")
    assert check([file], quarantine=quarantine) == 0 and len(quarantine.read_text().splitlines()) == 1
    file.write_text(text)
    assert check([file], quarantine=quarantine) == 0 and not quarantine.exists()
    other = file.with_name("mine.jsonl")
    other.write_text(text)
    with pytest.raises(UserError, match="not a quarantine file; choose another name"):
        check([file], quarantine=other)  # a file of the user's own is neither removed nor replaced
    assert other.read_text() == text
    file.write_text(text + "{}\n")
    capsys.readouterr()
    assert check([file], quarantine=Path("/dev/stderr")) == 0 and Path("/dev/stderr").exists()
    assert sorted(path.name for path in file.parent.iterdir()) == ["images", "mine.jsonl", "x.jsonl"]


def test_the_question_stands_under_the_picture(file: Path, tmp_path: Path) -> None:
    """Drawn below the picture, which itself is as without it; more text takes more room."""
    assert show(file, limit=1, save=tmp_path / "short") == 0
    row = json.loads(file.read_text().splitlines()[0])
    row["question"] = "What, " * 80
    file.write_text(json.dumps(row) + "\n")
    assert show(file, limit=1, save=tmp_path / "long") == 0
    short, long = (Image.open(tmp_path / name / "0001_0.png").convert("RGB") for name in ("short", "long"))
    height = round(30 / 40 * 448)  # of the picture alone
    assert short.width == long.width == 448 and height < short.height < long.height
    top = (0, 0, 448, height)
    assert short.crop(top).tobytes() == long.crop(top).tobytes()
    below = short.crop((0, height, 448, short.height)).convert("L")
    dark = sum(below.histogram()[:100])
    assert 200 < dark < 0.3 * below.width * below.height, "text, and more paper than ink"


@pytest.mark.parametrize("family", ["qwen2.5-vl", "internvl3"])
def test_the_grid_of_a_checkpoint_is_drawn(
    family: str, build_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held against the stock image processor of the checkpoint."""
    picture = Image.radial_gradient("L").convert("RGB").resize((300, 200))
    sample = Sample.ask(
        "1", [ImageRef.from_image("a.png", picture)], "Where?", "here", boxes=[Box(0, (0.2, 0, 0.5, 1))]
    )
    write([sample], "jsonl", tmp_path / "x.jsonl")
    model = build_tiny(family)
    assert show(tmp_path / "x.jsonl", save=tmp_path / "with", model=str(model)) == 0
    module, name = FAMILIES[family].image_processor.split(":")  # the Auto class needs torchvision in some releases
    stock = getattr(importlib.import_module(module), name).from_pretrained(model)
    out = stock(images=[picture], return_tensors="pt", **({"crop_to_patches": True} if family == "internvl3" else {}))
    if family == "qwen2.5-vl":
        _, rows, cols = out["image_grid_thw"][0].tolist()
        grid = Grid(rows // stock.merge_size, cols // stock.merge_size, merge=stock.merge_size)
    else:
        per_tile = json.loads((model / "config.json").read_text())["image_seq_length"]
        side = round(per_tile**0.5)
        tiles = out["pixel_values"].shape[0]
        assert tiles == 7, "2 x 3 tiles and the thumbnail, the nearest shape to 300 x 200"
        grid = Grid(side, side, 2, 3, thumbnail=True, merge=2)
    expected = draw(picture, [(0.2, 0, 0.5, 1)], grid)
    drawn = Image.open(tmp_path / "with" / "0001_0.png").crop((0, 0, *expected.size))
    assert drawn.tobytes() == expected.tobytes()
    assert show(tmp_path / "x.jsonl", save=tmp_path / "without") == 0
    assert Image.open(tmp_path / "without" / "0001_0.png").crop((0, 0, *expected.size)).tobytes() != drawn.tobytes()
    assert show(tmp_path / "x.jsonl", save=tmp_path / "no", model=str(model), family="gemma3") == 2
    assert "leave out one" in capsys.readouterr().err


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


@pytest.mark.parametrize("layout", ["jsonl", "visual-cot", "lvr"])
def test_export_may_link_images(
    layout: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "there" / "x.json"
    assert export(file, out, layout, link=True) == 0 and "linked 6 images" in capsys.readouterr().out
    for picture in (file.parent / "images").iterdir():
        assert (out.parent / "images" / picture.name).samefile(picture)
    assert check([out], format=layout) == 0
    assert export(file, out, layout, link=True) == 0, "again, over its own links"

    def no_links(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    assert export(file, tmp_path / "far" / "x.json", layout, link=True) == 0
    assert (tmp_path / "far" / "images" / "scene0.png").is_symlink() and check([tmp_path / "far" / "x.json"]) == 0
    assert export(file, tmp_path / "x.tsv", "mme-realworld", link=True) == 2 and "--link" in capsys.readouterr().err


def test_linking_overwrites_no_other_picture(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / "x.jsonl"
    (out.parent / "images").mkdir(parents=True)
    (out.parent / "images" / "scene0.png").write_bytes(b"somebody's own")
    assert export(file, out, "jsonl", link=True) == 0 and check([out]) == 0
    assert (out.parent / "images" / "scene0.png").read_bytes() == b"somebody's own"


def test_export_errors(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(file, file, "jsonl") == 2 and "overwrite" in capsys.readouterr().err
    assert export(file, tmp_path / "x", "coco") == 2 and "choose one of" in capsys.readouterr().err
    assert export(file, tmp_path, "lvr") == 2 and "folder" in capsys.readouterr().err
    assert export(file, tmp_path / "x.tsv", "hr-bench") == 1 and "left out 6" in capsys.readouterr().out
    assert export(file, tmp_path / "x.tsv", "hr-bench", policy="strict") == 2


def test_torch_and_pyarrow_stay_unimported(file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from realvr.cli.data import CheckCommand, ShowCommand, check, show; "
        f"file = Path({str(file)!r}); "
        "assert check(CheckCommand([file])) == 0; assert show(ShowCommand(file, limit=1)) == 0; "
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
