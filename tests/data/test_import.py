"""Boxes of labelling tools become training data: held against the annotation files, read here by other means."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realvr.cli import main
from realvr.data import Report, read
from realvr.data.importing import ImportSettings, import_boxes
from realvr.errors import UserError
from stage_runs import config_file, configure, lines

QUARTERS = {(False, False): "top left", (True, False): "top right", (False, True): "bottom left"}
KINDS = ["WBC", "RBC", "Platelets"]


def voc_xml(name: str, width: int, height: int, objects: list[tuple[str, tuple[int, int, int, int]]]) -> str:
    """As LabelImg writes it."""
    found = "".join(
        f"<object><name>{kind}</name><pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult><bndbox>"
        f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for kind, (x0, y0, x1, y1) in objects
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><folder>JPEGImages</folder><filename>{name}</filename>{size}{found}</annotation>"


@pytest.fixture
def voc_folder(tmp_path: Path, encoded: Callable[..., bytes]) -> Path:
    """Twelve pictures of 64 x 48 in the style of BCCD: one kind often, another once, a third never or seldom."""
    for number in range(12):
        objects = [("RBC", (1 + 4 * i, 1, 8 + 4 * i, 9)) for i in range(1 + number % 5)]
        objects += [("WBC", (40, 30, 60, 46) if number % 2 else (3, 4, 20, 20))] if number % 3 else []
        objects += [("Platelets", (1, 1, 64, 48))] if number == 5 else []
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "images" / f"cell{number}.png").write_bytes(encoded(64, 48, number))
        (tmp_path / "annotations" / f"cell{number}.xml").write_text(voc_xml(f"cell{number}.png", 64, 48, objects))
    return tmp_path


def imported(*args: str | Path) -> list[dict[str, Any]]:
    arguments = [str(arg) for arg in args]
    assert main(["data", "import", *arguments]) == 0
    out = Path(arguments[arguments.index("--out") + 1])
    return [json.loads(line) for line in out.read_text().splitlines()]


def boxes_in(xml: str) -> dict[str, list[list[float]]]:
    """Boxes by name in fractions, read with regular expressions: pixels count from 1, ends included."""
    width, height = (int(re.search(rf"<{key}>(\d+)<", xml)[1]) for key in ("width", "height"))  # type: ignore[index]
    found: dict[str, list[list[float]]] = {}
    for body in re.findall(r"<object>(.*?)</object>", xml, re.DOTALL):
        x0, y0, x1, y1 = (int(re.search(rf"<{key}>(\d+)<", body)[1]) for key in ("xmin", "ymin", "xmax", "ymax"))  # type: ignore[index]
        name = re.search(r"<name>(.*?)<", body)[1]  # type: ignore[index]
        found.setdefault(name, []).append([(x0 - 1) / width, (y0 - 1) / height, x1 / width, y1 / height])
    return found


def judge(rows: list[dict[str, Any]], annotations: Path) -> Counter[str]:
    """Hold every question against the file it came from."""
    seen: Counter[str] = Counter()
    for row in rows:
        stem, template, kind = row["id"].split("/")
        known = boxes_in((annotations / f"{stem}.xml").read_text())
        said = row["choices"]["ABCD".index(row["answer"])]
        boxes = [box["xyxy"] for box in row["boxes"]]
        assert row["tags"] == {"question": "template", "template": template} and kind in row["question"]
        assert boxes == [pytest.approx(box) for box in known.get(kind, [])], row["id"]
        assert len(set(row["choices"])) == len(row["choices"])
        if template == "exists":
            assert said == ("Yes" if kind in known else "No")
        elif template == "count":
            assert int(said) == len(known[kind]) and len(row["choices"]) == 4
        else:
            ((x0, y0, x1, y1),) = known[kind]
            centre = ((x0 + x1) / 2 > 0.5, (y0 + y1) / 2 > 0.5)
            assert said == QUARTERS.get(centre, "bottom right") and len(row["choices"]) == 4
        seen[f"{template} {said if template == 'exists' else ''}".strip()] += 1
    return seen


def accepted(path: Path) -> Report:
    report = Report()
    rows = list(read(path, report=report))
    assert rows and not report.dropped and not report.repaired
    assert main(["data", "check", str(path)]) == 0
    return report


def test_voc_templates(voc_folder: Path) -> None:
    out = voc_folder / "out" / "train.jsonl"
    rows = imported("voc", voc_folder / "annotations", "--out", out, "--per-image", "3")
    seen = judge(rows, voc_folder / "annotations")
    assert seen["exists Yes"] == seen["exists No"] > 5 and seen["count"] == 12 + 8 + 1 and seen["where"] > 5
    accepted(out)
    assert imported("voc", *sorted((voc_folder / "annotations").iterdir()), "--out", out, "--per-image", "3") == rows
    assert imported("voc", voc_folder / "annotations", "--out", out, "--per-image", "3", "--seed", "1") != rows


def test_real_voc_files(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "bccd"
    out = tmp_path / "bccd.jsonl"
    rows = imported("voc", folder / "annotations", "--out", out, "--link", "--per-image", "3")
    seen = judge(rows, folder / "annotations")
    assert seen["exists Yes"] == seen["exists No"] and seen["count"] > 100 and seen["where"] > 10
    accepted(out)


def test_the_draws_for_a_picture_do_not_depend_on_the_others(voc_folder: Path) -> None:
    every = imported("voc", voc_folder / "annotations", "--out", voc_folder / "a.jsonl")
    (voc_folder / "annotations" / "cell0.xml").unlink()
    fewer = imported("voc", voc_folder / "annotations", "--out", voc_folder / "b.jsonl")
    assert fewer == [row for row in every if not row["id"].startswith("cell0/")]


# ---------------------------------------------------------------------- COCO


def coco_file(folder: Path, encoded: Callable[..., bytes]) -> Path:
    (folder / "photos").mkdir(parents=True)
    images = []
    for number in range(6):
        (folder / "photos" / f"{number:03d}.png").write_bytes(encoded(80, 40, number))
        images.append({"id": 100 + number, "file_name": f"{number:03d}.png", "width": 80, "height": 40})
    annotations: list[dict[str, Any]] = []

    def add(image: int, category: int, bbox: Any, **more: Any) -> None:
        annotations.append({"id": len(annotations), "image_id": image, "category_id": category, "bbox": bbox} | more)

    for number in range(6):
        for i in range(1 + number % 3):
            add(100 + number, 7, [8 * i, 10, 8, 20])
    add(100, 9, [60.0, 30.5, 16, 8.5])
    add(101, 9, [0, 0, 80, 40], iscrowd=1)
    add(102, 9, [20, 20, 0, 5])  # no width
    add(103, 9, "everywhere")
    add(999, 7, [0, 0, 1, 1])
    add(104, 1, [0, 0, 1, 1])
    annotations.append({"id": 8000, "image_id": 105, "bbox": [0, 0, 1, 1]})
    categories = [{"id": 7, "name": "traffic_light"}, {"id": 9, "name": "bus"}, {"id": 11, "name": "zebra"}]
    images.append({"id": 200, "file_name": "gone.png", "width": 80, "height": 40})
    (folder / "photos" / "turned.png").write_bytes(encoded(40, 80))
    images.append({"id": 201, "file_name": "turned.png", "width": 80, "height": 40})
    images.append({"id": 202, "file_name": "../../etc/x.png", "width": 80, "height": 40})
    file = folder / "instances.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return file


def test_coco_templates(tmp_path: Path, encoded: Callable[..., bytes], capsys: pytest.CaptureFixture[str]) -> None:
    file = coco_file(tmp_path / "coco", encoded)
    out = tmp_path / "out" / "coco.jsonl"
    rows = imported("coco", file, "--images", file.parent / "photos", "--out", out, "--per-image", "3")
    said = capsys.readouterr().out
    for loss in ("image_missing", "image_path_escapes", "size_mismatch", "box_degenerate", "box_malformed"):
        assert f"left out 1 {loss}" in said
    assert "left out 1 image_unknown" in said and "left out 2 category_unknown" in said
    by_id = {row["id"]: row for row in rows}
    light = by_id["002/count/traffic_light"]
    assert light["question"] == "How many traffic light objects are in the image?"
    assert light["choices"]["ABCD".index(light["answer"])] == "3"
    expected = [[0, 0.25, 0.1, 0.75], [0.1, 0.25, 0.2, 0.75], [0.2, 0.25, 0.3, 0.75]]
    assert [box["xyxy"] for box in light["boxes"]] == [pytest.approx(box) for box in expected]
    bus = by_id["000/where/bus"]
    assert bus["choices"]["ABCD".index(bus["answer"])] == "bottom right"
    assert bus["boxes"][0]["xyxy"] == pytest.approx([0.75, 30.5 / 40, 0.95, 39 / 40])
    # What a crowd or a lost box leaves uncertain is neither counted nor denied.
    for uncertain in ("001", "002", "003"):
        assert f"{uncertain}/count/bus" not in by_id and f"{uncertain}/where/bus" not in by_id
    accepted(out)
    for seed in range(6):  # one draw alone may spare the category by chance
        seeded = ("--templates", "exists", "--seed", str(seed))
        rows = imported("coco", file, "--images", file.parent / "photos", "--out", out, *seeded)
        denied = {row["id"][:3] for row in rows if row["answer"] == "B" and row["category"] == "bus"}
        assert denied.isdisjoint({"001", "002", "003"})


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_questions_joined_by_picture_and_category(
    suffix: str, tmp_path: Path, encoded: Callable[..., bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    file = coco_file(tmp_path / "coco", encoded)
    asked: list[dict[str, Any]] = [
        {"image": "002.png", "category": "Traffic_Light", "question": "What regulates it?", "answer": "lights"},
        {
            "image": "100",
            "category": ["traffic_light", "bus"],
            "question": "Which?",
            "answer": "a bus",
            "choices": ["a tram", "a bus"],
        },
        {"image": "004", "category": "", "question": "Is it day?", "answer": "yes"},
        {"image": "005.png", "category": "zebra", "question": "Any zebra?", "answer": "no"},
        {"image": "004", "category": "dragon", "question": "Any?", "answer": "no"},
        {"image": "nowhere.png", "category": "bus", "question": "Any?", "answer": "no"},
        {"image": "003", "category": "bus", "question": " ", "answer": "no"},
    ]
    questions = tmp_path / f"questions{suffix}"
    if suffix == ".jsonl":
        questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    else:
        names = ("image", "category", "question", "answer", "choices")
        cells = [["|".join(v) if isinstance(v := row.get(name, ""), list) else v for name in names] for row in asked]
        questions.write_text("\n".join(",".join(row) for row in [list(names), *cells]) + "\n")
    out = tmp_path / "out" / "joined.jsonl"
    rows = imported("coco", file, "--images", file.parent / "photos", "--questions", questions, "--out", out)
    said = capsys.readouterr().out
    assert "of the questions file" in said and "question_empty" in said and "no category 'dragon'" in said
    assert "no usable picture is called 'nowhere.png'" in said
    by_question = {row["question"]: row for row in rows}
    assert len(rows) == 4 and all(row["tags"] == {"question": "file"} for row in rows)
    assert len(by_question["What regulates it?"]["boxes"]) == 3
    which = by_question["Which?"]
    assert which["images"] == ["images/000.png"] and which["answer"] == "B" and len(which["boxes"]) == 2
    assert by_question["Is it day?"]["boxes"] == by_question["Any zebra?"]["boxes"] == []
    accepted(out)
    both = imported(
        "coco", file, "--images", file.parent / "photos", "--questions", questions, "--out", out, "--templates", "count"
    )
    assert {row["tags"].get("template") for row in both} == {None, "count"}


def test_a_name_that_two_pictures_share_joins_neither(voc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (voc_folder / "more").mkdir()
    (voc_folder / "more" / "other.xml").write_text((voc_folder / "annotations" / "cell1.xml").read_text())
    questions = voc_folder / "q.csv"
    questions.write_text("image,question,answer\ncell1,Which?,it\ncell2,Which?,it\n")
    rows = imported(
        "voc",
        voc_folder / "annotations",
        voc_folder / "more",
        "--questions",
        questions,
        "--out",
        voc_folder / "out" / "x.jsonl",
    )
    assert [row["images"] for row in rows] == [["images/cell2.png"]]
    assert "several pictures are called 'cell1'" in capsys.readouterr().out


def test_a_whole_name_is_that_picture_alone(tmp_path: Path, encoded: Callable[..., bytes]) -> None:
    """Also where a picture in a folder below has the same last name."""
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(("0.png", "sub/0.png")):
        (tmp_path / name).write_bytes(encoded(80, 40, number))
    images = [{"id": 10 + n, "file_name": name} for n, name in enumerate(("0.png", "sub/0.png"))]
    boxes = [{"image_id": 10 + n, "category_id": 1, "bbox": [8 * n, 0, 8, 8]} for n in range(2)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "bus"}]}
    (tmp_path / "i.json").write_text(json.dumps(content))
    asked = [
        {"image": name, "category": "bus", "question": "Which?", "answer": name} for name in ("0.png", "sub/0.png")
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*asked, asked[0] | {"image": "0"}]))
    rows = imported(
        "coco", tmp_path / "i.json", "--questions", tmp_path / "q.jsonl", "--out", tmp_path / "o" / "x.jsonl"
    )
    assert [(row["answer"], row["boxes"][0]["xyxy"][0]) for row in rows] == [("0.png", 0.0), ("sub/0.png", 0.1)]


def test_an_import_without_rows_keeps_what_was_there(voc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = voc_folder / "out" / "x.jsonl"
    before = imported("voc", voc_folder / "annotations", "--out", out)
    wrong = ["voc", str(voc_folder / "annotations"), "--images", str(voc_folder / "nowhere"), "--out"]
    assert main(["data", "import", *wrong, str(out)]) == 1
    said = capsys.readouterr().out
    assert f"no row to write: {out} is left as it is" in said and "left out 12 image_missing" in said
    assert [json.loads(line) for line in out.read_text().splitlines()] == before
    assert main(["data", "import", *wrong, str(voc_folder / "new.jsonl")]) == 1
    assert not (voc_folder / "new.jsonl").exists()


@pytest.mark.parametrize("size", [("1e-300", "1e300"), ("inf", "inf"), ("0", "0"), ("-3", "x")])
def test_a_size_that_no_image_has_is_read_from_the_image(size: tuple[str, str], voc_folder: Path) -> None:
    folder = voc_folder / "annotations"
    good = imported("voc", folder, "--out", voc_folder / "good" / "x.jsonl")
    for file in folder.glob("*.xml"):
        stated = f"<size><width>{size[0]}</width><height>{size[1]}</height>"
        file.write_text(file.read_text().replace("<size><width>64</width><height>48</height>", stated))
    assert imported("voc", folder, "--out", voc_folder / "bad" / "x.jsonl") == good


def test_inputs_that_are_something_else(voc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = voc_folder / "captions.json"
    other.write_text(json.dumps({"images": [], "annotations": [{"caption": "x"}], "categories": []}))
    out = str(voc_folder / "out" / "x.jsonl")
    for content in ("{}", "[", json.dumps({"images": [], "annotations": [{"caption": "x"}], "categories": []})):
        other.write_text(content)
        assert main(["data", "import", "coco", str(other), "--out", out]) == 2
        assert "captions.json" in capsys.readouterr().err
    assert main(["data", "import", "voc", str(voc_folder / "nowhere"), "--out", out]) == 2
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]><annotation><filename>&a;</filename></annotation>'
    (voc_folder / "annotations" / "bomb.xml").write_text(bomb)
    (voc_folder / "annotations" / "cut.xml").write_text("<annotation><size>")
    imported("voc", voc_folder / "annotations", "--out", out)
    assert "left out 2 file_unreadable" in capsys.readouterr().out
    with pytest.raises(UserError, match="overwrite an input"):
        import_boxes(ImportSettings("coco", [other], other))


def test_a_model_trains_on_what_was_imported(
    voc_folder: Path, build_tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    out = voc_folder / "out" / "train.jsonl"
    imported("voc", voc_folder / "annotations", "--out", out)
    raw = configure("sft", build_tiny("qwen2.5-vl"), out, tmp_path / "run", pack_tokens=1024)
    assert main(["train", "sft", str(config_file(raw, tmp_path / "config.yaml"))]) == 0
    (line,) = lines(tmp_path / "run")
    assert line["data/with_targets"] > 0 and line["data/rejected_per_rank"] == 0
