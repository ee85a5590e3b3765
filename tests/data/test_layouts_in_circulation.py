"""Layouts that public loaders meet beside the documented ones: other headers, other columns, other packings."""

from __future__ import annotations

import base64
import csv
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realvr.data.detect import detect
from realvr.data.readers.base import ReadOptions, parse_boxes, split_options
from realvr.data.readers.conversation import answer_of
from realvr.data.readers.vstar import split_text
from realvr.data.reading import Report, read
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Sample, strip_image_tags

DECODE = ReadOptions(check_images="decode")


def test_mmvp_with_a_small_l_in_its_header(tmp_path: Path, encoded) -> None:
    (tmp_path / "MMVP Images").mkdir()
    for index in (1, 2):
        (tmp_path / "MMVP Images" / f"{index}.jpg").write_bytes(encoded(shade=index, kind="JPEG"))
    rows = ["lndex,Question,Options,Correct Answer"]
    rows += ["1,Are the wings open or closed?,(a) Open (b) Closed,(a)", '2,"Open, or closed?",(a) Open (b) Closed,(b)']
    (tmp_path / "Questions.csv").write_text("\ufeff" + "\r\n".join(rows) + "\r\n")
    for path in (tmp_path, tmp_path / "Questions.csv"):
        one, two = read(path, options=DECODE)
        assert (one.id, one.answer, two.answer, two.question, one.pair, two.pair) == (
            "1", "A", "B", "Open, or closed?", "1", "1",
        )  # fmt: skip


FIVE = ["a bus", "it's 2", 'the "Stop" sign', "a, b", "The image does not feature the object"]
PREFIXED = [f"({letter}) {text}" for letter, text in zip("ABCDE", FIVE, strict=True)]
DOTTED = [f"{letter}. {text}" for letter, text in zip("ABCDE", FIVE, strict=True)]


def mme_rows(image: Any) -> list[dict[str, Any]]:
    """As harnesses pack them: no columns A to E, options in one cell, the image under ``bytes``."""
    cells: list[Any] = [str(PREFIXED), "\n".join(PREFIXED), json.dumps(PREFIXED), str(FIVE), "\n".join(DOTTED)]
    cells.append("[" + " ".join(map(repr, PREFIXED)) + "]")  # numpy prints no commas
    return [
        {"index": k, "bytes": image, "question": f"Q{k}?", "multi-choice options": cell, "answer": "E"}
        | {"category": "Perception/Autonomous_Driving", "l2-category": "motion"}
        for k, cell in enumerate(cells)
    ]


def check_mme(samples: list[Sample], data: bytes, count: int) -> None:
    assert len(samples) == count
    for k, sample in enumerate(samples):
        assert sample.choices == FIVE and (sample.id, sample.question, sample.answer) == (str(k), f"Q{k}?", "E"), k
        assert (sample.task, sample.tags, sample.category) == (
            "Perception", {"subtask": "Autonomous_Driving"}, "motion",
        )  # fmt: skip
        assert sample.images[0].read() == data


def test_mme_tsv_with_one_options_column_and_bytes(tmp_path: Path, encoded) -> None:
    rows = mme_rows(base64.b64encode(encoded()).decode())
    with (tmp_path / "MME.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    assert detect(tmp_path / "MME.tsv").name == "mme-realworld"
    samples = list(read(tmp_path / "MME.tsv", options=DECODE))
    check_mme(samples, encoded(), 6)
    assert samples[0].images[0].data is None, "an image of a TSV stays in its file"


@pytest.mark.parametrize("packed", ["base64", "binary", "struct"])
def test_mme_parquet_with_a_list_of_options_and_bytes(packed: str, tmp_path: Path, encoded) -> None:
    data = encoded()
    image = {"base64": base64.b64encode(data).decode(), "binary": data, "struct": {"bytes": data, "path": None}}[packed]
    rows = [
        row | {"multi-choice options": options} for row, options in zip(mme_rows(image), [PREFIXED, FIVE], strict=False)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "MME.parquet")
    assert detect(tmp_path / "MME.parquet").name == "mme-realworld"
    check_mme(list(read(tmp_path / "MME.parquet", options=DECODE)), data, 2)


@pytest.mark.parametrize(
    "cell", ["", "[]", "[1, 2]", "['a', 'b'", "['(B) x', '(A) y']", "no letters", "(A) only one", 7, None, {"a": 1}]
)
def test_options_that_are_none_are_refused_by_name(cell: Any, tmp_path: Path, encoded) -> None:
    rows = [row | {"multi-choice options": cell} for row in mme_rows(encoded())[:2]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "MME.parquet")
    report = Report()
    assert not list(read(tmp_path / "MME.parquet", report=report))
    assert report.dropped == {"field_missing" if cell is None else "choices_malformed": 2}


def test_letters_are_taken_off_options_only_where_they_are_letters(tmp_path: Path, encoded) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    options = ["U.S. flag", "B. Franklin", "X: a mark", "d) small", "None"]
    row = {"Question_id": "q", "Image": "a.png", "Text": "T?", "Answer choices": options, "Ground truth": "A"}
    (tmp_path / "m.json").write_text(json.dumps([row]))
    (sample,) = read(tmp_path / "m.json")
    assert sample.choices == ["U.S. flag", "Franklin", "X: a mark", "d) small", "None"]


def metadata_row(**changes: Any) -> dict[str, Any]:
    row = {"question": "What is on the left?", "answer": "a cat", "possible_answers": ["cat"], "image": "7.jpg"}
    row |= {"width": 200, "height": 100, "bboxs": [[20, 10, 60, 50], [100, 0, 200, 100]], "dataset": "gqa"}
    return row | {"split": "train"} | changes


@pytest.mark.parametrize("folder", ["", "cot/gqa", "gqa"])
def test_visual_cot_metadata(folder: str, tmp_path: Path, encoded) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "7.jpg").write_bytes(encoded(200, 100, kind="JPEG"))
    (tmp_path / "metadata").mkdir()
    file = tmp_path / "metadata" / "gqa_cot_train.jsonl"
    rows = [metadata_row(), metadata_row(bboxs=[20, 10, 60, 50]), metadata_row(width=None), metadata_row(bboxs=[])]
    rows += [
        metadata_row(bboxs="x"),
        metadata_row(bboxs=[[1, 2]]),
        metadata_row(answer=" "),
        metadata_row(image="8.jpg"),
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert detect(file).name == "visual-cot"
    report = Report()
    samples = list(read(file, options=ReadOptions(images=tmp_path, check_images="decode"), report=report))
    assert [[box.xyxy for box in sample.boxes] for sample in samples] == [
        [(0.1, 0.1, 0.3, 0.5), (0.5, 0.0, 1.0, 1.0)],
        [(0.1, 0.1, 0.3, 0.5)],
        [(0.1, 0.1, 0.3, 0.5), (0.5, 0.0, 1.0, 1.0)],
        [],
    ]
    first = samples[0]
    assert (first.question, first.answer, first.task, first.id) == (
        "What is on the left?",
        "a cat",
        "gqa",
        "gqa/train/1",
    )
    assert report.dropped == {"box_malformed": 2, "answer_empty": 1, "image_missing": 1}


INSTRUCTION = "Answer with the option's letter from the given choices directly."


def test_vstar_lines(tmp_path: Path, encoded) -> None:
    (tmp_path / "direct_attributes").mkdir()
    (tmp_path / "direct_attributes/sa_4690.jpg").write_bytes(encoded(kind="JPEG"))
    text = f"What is the material of the glove?\n(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather\n{INSTRUCTION}"
    row = {"image": "direct_attributes/sa_4690.jpg", "text": text, "category": "direct_attributes", "label": "A"}
    side = f"Is the dog on the left or right side of the car?\n(A) right\n(B) left\n{INSTRUCTION}"
    rows = [
        row | {"question_id": 0},
        row | {"question_id": 1, "text": side, "category": "relative_position", "label": "B"},
    ]
    rows += [row | {"question_id": 2, "label": "E"}, row | {"question_id": 3, "text": "No options?"}]
    (tmp_path / "test_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert detect(tmp_path / "test_questions.jsonl").name == "vstar"
    report = Report()
    one, two = read(tmp_path / "test_questions.jsonl", options=DECODE, report=report)
    assert (one.id, one.question, one.answer, one.category) == (
        "0", "What is the material of the glove?", "A", "direct_attributes",
    )  # fmt: skip
    assert one.choices == ["rubber", "cotton", "kevlar", "leather"] and two.choices == ["right", "left"]
    assert (two.answer, two.category, two.meta) == ("B", "relative_position", {"prompt": side})
    assert report.dropped == {"answer_not_in_choices": 1, "choices_malformed": 1}


@pytest.mark.parametrize("packed", ["struct", "binary", "base64"])
def test_vstar_parquet(packed: str, tmp_path: Path, encoded) -> None:
    data = encoded()
    image = {"base64": base64.b64encode(data).decode(), "binary": data, "struct": {"bytes": data, "path": None}}[packed]
    text = "Which colour? (A) red (B) dark (ish) blue"
    row = {"image": image, "text": text, "category": "direct_attributes", "label": "B", "question_id": "7"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "test-00000-of-00001.parquet")
    for path in (tmp_path, tmp_path / "test-00000-of-00001.parquet"):
        assert detect(path).name == "vstar"
        (sample,) = read(path, options=DECODE)
        assert (sample.question, sample.choices, sample.answer) == ("Which colour?", ["red", "dark (ish) blue"], "B")
        assert sample.images[0].read() == data


def test_vstar_text() -> None:
    assert split_text("Q?\nA. x\nB. y") == ("Q?", ["x", "y"])
    assert split_text("Is (A) or (B)?\n(A) x\n(B) y (C)\n\nAnswer now.") == ("Is (A) or (B)?", ["x", "y (C)"])
    with pytest.raises(BadRow):
        split_text("Which of (B) and (A)?")


def parquet(folder: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return folder / "x.parquet"


def test_parquet_cells_that_cannot_be_converted_cost_their_row(tmp_path: Path, encoded) -> None:
    columns = {"question": ["Q?"] * 3, "answer": ["7"] * 3, "image": [["a.png"]] * 3}
    columns["qid"] = pa.array([0, 2**62, None], pa.timestamp("ns"))
    report = Report()
    assert not list(read(parquet(tmp_path, columns), "virl39k", ReadOptions(check_images="none"), report))
    assert report.rows == 3 == sum(report.dropped.values())
    assert report.dropped["field_missing"] == 1 and set(report.dropped) <= {
        "cell_unreadable",
        "id_invalid",
        "field_missing",
    }
    columns["qid"] = pa.array([2**62] * 3, pa.timestamp("ms"))  # the year 146 million
    report = Report()
    assert not list(read(parquet(tmp_path, columns), "virl39k", report=report))
    assert report.dropped == {"cell_unreadable": 3}


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    names = ["question", "answer", "qid", "image", "answer"]
    table = pa.Table.from_arrays([pa.array(["x"])] * 5, names)
    pq.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.tsv").write_text("index\tquestion\tindex\n1\t2\t3\n")
    for name, column in (("x.parquet", "answer"), ("x.tsv", "index")):
        with pytest.raises(FileError, match=f"column '{column}' occurs twice"):
            read(tmp_path / name)


def test_mmvp_options_without_letters(tmp_path: Path) -> None:
    lines = ["Index,Question,Options,Correct Answer", "1,Q?,Open or Closed,(a)", "2,Q?,(a) x (b) x,(a)"]
    (tmp_path / "Questions.csv").write_text("\n".join([*lines, "3,Q?,(a) x (b) y,(a)", " ,Q?,(a) x (b) y,(a)"]))
    report = Report()
    (sample,) = read(tmp_path / "Questions.csv", "mmvp", ReadOptions(check_images="none"), report)
    assert sample.id == "3"
    assert report.dropped == {"choices_malformed": 1, "choices_equal": 1, "field_type": 1}


def test_long_runs_of_anything_take_linear_time() -> None:
    """Each of these took minutes where a pattern tried every beginning and every end."""
    began, size = time.perf_counter(), 200_000
    assert strip_image_tags("<image>a" + " " * size + "b <image>\n<image>")[1] == 3
    assert parse_boxes("[" + "1" * size) == []
    assert split_options("Q?\n(A) x" + " " * size + "y\n(B) z", "B")[1][1] == "z"
    assert answer_of("<answer>a</answer>" + "<answer>" * size)[0] == "a"
    assert time.perf_counter() - began < 10
