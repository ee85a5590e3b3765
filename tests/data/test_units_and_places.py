"""Boxes in pixels, absolute image paths, and what a meta file may open."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from realvr.cli import main
from realvr.data import Report, read, write
from realvr.data.readers.base import ReadOptions
from realvr.data.sample import Sample
from realvr.errors import UserError


def sideways(width: int, height: int) -> bytes:
    """A JPEG stored as ``width`` x ``height`` that asks to be turned by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (90, 160, 30)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def write_rows(path: Path, boxes: list[Any], image: str = "a.png", **more: Any) -> Path:
    rows = [
        {"id": str(i), "images": [image], "question": "Which?", "answer": "it", "boxes": [{"image": 0, "xyxy": box}]}
        for i, box in enumerate(boxes)
    ]
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    return path


def boxes_of(path: Path, **options: Any) -> tuple[list[Any], Report]:
    report = Report()
    found = list(read(path, options=ReadOptions(**options), report=report))
    return [tuple(round(v, 6) for v in box.xyxy) for sample in found for box in sample.boxes], report


def test_pixels_are_of_the_upright_original_image(tmp_path: Path) -> None:
    (tmp_path / "turned.jpg").write_bytes(sideways(400, 100))  # upright: 100 wide, 400 high
    file = write_rows(tmp_path / "x.jsonl", [[10, 40, 60, 200]], image="turned.jpg")
    found, report = boxes_of(file)
    assert (
        found == [] and report.dropped == {"box_in_pixels": 1} and "--boxes pixels" in report.examples["box_in_pixels"]
    )
    assert boxes_of(file, boxes="pixels")[0] == [(0.1, 0.1, 0.6, 0.5)]


def test_units_are_decided_row_by_row_and_reported(tmp_path: Path, encoded) -> None:
    (tmp_path / "a.png").write_bytes(encoded(40, 20))
    file = write_rows(tmp_path / "x.jsonl", [[0.25, 0.5, 0.5, 1.0], [10, 10, 20, 20], [0.5, 0.5, 0.75, 1.2]])
    found, report = boxes_of(file, boxes="auto")
    assert found == [(0.25, 0.5, 0.5, 1.0), (0.25, 0.5, 0.5, 1.0), (0.5, 0.5, 0.75, 1.0)]  # an overhang is no pixel
    assert report.boxes == {"fractions": 2, "pixels": 1} and report.repaired == {"box_outside": 1}
    found, report = boxes_of(file, boxes="fractions")
    assert len(found) == 2 and report.dropped == {"box_in_pixels": 1}
    assert boxes_of(file)[1].dropped == report.dropped, "fractions are the rule of our lines"


def test_the_switch_holds_for_other_formats(tmp_path: Path, encoded, five_options: list[Sample]) -> None:
    (tmp_path / "a.png").write_bytes(encoded(40, 20))
    talk = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "<answer> it </answer>"}]
    rows = [
        {"id": str(i), "image": "a.png", "conversations": talk, "bboxes": [box]}
        for i, box in enumerate([[10, 10, 20, 20], [0.1, 0.1, 0.9, 0.9], [1, 1, 2, 2]])
    ]
    file = tmp_path / "lvr.json"
    file.write_text(json.dumps(rows))
    found, report = boxes_of(file)
    assert report.boxes == {"pixels": 2, "fractions": 1} and found[2] == (0.025, 0.05, 0.05, 0.1)
    assert boxes_of(file, boxes="fractions")[1].dropped == {"box_in_pixels": 1}
    assert boxes_of(file, boxes="pixels")[0][1] == (0.0025, 0.005, 0.0225, 0.045)
    write(five_options, "visual-cot", tmp_path / "v" / "v.json")
    assert boxes_of(tmp_path / "v" / "v.json")[1].boxes == {"pixels": 6}
    with pytest.raises(UserError, match="in pixels by definition"):
        boxes_of(tmp_path / "v" / "v.json", boxes="fractions")


def test_commands_take_the_switch(tmp_path: Path, encoded, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(encoded(40, 20))
    file = write_rows(tmp_path / "x.jsonl", [[10, 10, 20, 20]])
    assert main(["data", "check", str(file)]) == 1
    assert "--boxes pixels" in capsys.readouterr().err
    assert main(["data", "check", str(file), "--boxes", "pixels"]) == 0
    assert "read as pixels in 1 rows" in capsys.readouterr().out
    assert main(["data", "show", str(file), "--boxes", "auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["boxes"][0]["xyxy"] == [0.25, 0.5, 0.5, 1.0]
    assert (
        main(["data", "export", str(file), str(tmp_path / "out" / "y.jsonl"), "--to", "jsonl", "--boxes", "pixels"])
        == 0
    )
    assert boxes_of(tmp_path / "out" / "y.jsonl")[0] == [(0.25, 0.5, 0.5, 1.0)]


def test_absolute_paths_need_the_root_as_image_folder(
    tmp_path: Path, encoded, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(encoded())
    (tmp_path / "rows").mkdir()
    file = write_rows(tmp_path / "rows" / "x.jsonl", [[0, 0, 1, 1]], image=str(tmp_path / "photos" / "a.png"))
    assert main(["data", "check", str(file)]) == 1
    captured = capsys.readouterr()
    assert "--images / allows absolute paths" in captured.out and "--images /" in captured.err
    assert main(["data", "check", str(file), "--images", "/"]) == 0


def test_a_path_that_climbs_out_names_its_own_way_out(
    tmp_path: Path, encoded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of absolute paths, which does not help here."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "a.png").write_bytes(encoded())
    file = write_rows(tmp_path / "rows" / "x.jsonl", [[0, 0, 1, 1]], image="../a.png")
    assert main(["data", "check", str(file)]) == 1
    assert "write it without .., relative to a folder above all images" in capsys.readouterr().out
    file = write_rows(tmp_path / "rows" / "x.jsonl", [[0, 0, 1, 1]], image="a.png")
    assert main(["data", "check", str(file), "--images", str(tmp_path)]) == 0


# ---------------------------------------------------------------------- meta files


@pytest.fixture
def tree(tmp_path: Path, five_options: list[Sample]) -> Path:
    """Data inside and outside of the folder that holds the meta file."""
    write(five_options, "lvr", tmp_path / "theirs" / "in" / "a.json")
    write(five_options, "lvr", tmp_path / "elsewhere" / "b.json")
    return tmp_path


def listed(tree: Path, entries: list[tuple[str, str]], **options: Any) -> tuple[int, Report]:
    file = tree / "theirs" / "meta.json"
    rows = [{"ds_name": f"d{i}", "data_path": data, "image_folder": images} for i, (data, images) in enumerate(entries)]
    file.write_text(json.dumps(rows))
    report = Report()
    return len(list(read(file, options=ReadOptions(**options), report=report))), report


@pytest.mark.parametrize(
    "entry", [("../elsewhere/b.json", "in"), ("ABS/b.json", "in"), ("in/a.json", "../elsewhere"), ("in/a.json", "ABS")]
)
def test_a_meta_file_stays_in_its_folder(entry: tuple[str, str], tree: Path) -> None:
    data, images = (name.replace("ABS", str(tree / "elsewhere")) for name in entry)
    count, report = listed(tree, [("in/a.json", "in"), (data, images)])
    assert count == 6 and report.dropped == {"listed_path_escapes": 1}
    assert "--images" in report.examples["listed_path_escapes"]
    with pytest.raises(UserError, match="listed_path_escapes"):
        listed(tree, [(data, images)], policy="strict")


def test_images_widens_what_a_meta_file_may_open(tree: Path) -> None:
    entries = [("in/a.json", "in"), ("../elsewhere/b.json", "../elsewhere")]
    for wider in ("/", tree):
        assert listed(tree, entries, images=wider)[0] == 12, "each with the image folder that the file names"
    count, report = listed(tree, [("in/a.json", "nowhere")], images=tree / "theirs" / "in")
    assert count == 6 and not report.dropped, "an image folder elsewhere is replaced"
    near = str(tree / "theirs") + "-not"
    assert listed(tree, [("in/a.json", near)])[1].dropped == {"listed_path_escapes": 1}


def test_training_does_not_lose_a_listed_file(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts as one row, far below any limit, and stops the run all the same."""
    listed(tree, [("in/a.json", "in")] * 1 + [("../elsewhere/b.json", "../elsewhere")])
    config = tree / "config.yaml"
    meta = tree / "theirs" / "meta.json"
    config.write_text(
        f"model: {{path: mini-base, dtype: float32}}\ndata: {{sources: [{{path: {meta}}}]}}\nrun: {{out: {tree}/run}}\n"
    )
    assert main(["train", "sft", str(config), "--optim.steps", "1", "--optim.batch", "1"]) == 2
    said = capsys.readouterr().err
    assert "listed_path_escapes" in said and "--data.sources.0.images /" in said
    assert main(["data", "check", str(meta)]) == 1, "as training does"
    assert "a listed file is lost with all its rows" in capsys.readouterr().err
    assert main(["data", "check", str(meta), "--max-dropped", "1"]) == 0
