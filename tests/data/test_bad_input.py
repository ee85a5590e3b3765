"""Every kind of damage has its own reason, costs only its own row, and is counted."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from realvr.data import reasons
from realvr.data.detect import FORMATS
from realvr.data.export import write
from realvr.data.readers.base import Context, ReadOptions
from realvr.data.reading import Report, read
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Sample
from realvr.errors import UserError


def huge_png(side: int = 17_400) -> bytes:
    """A PNG of a few bytes whose header declares about 300 megapixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path: Path, encoded) -> Path:
    """An image folder with one good image and several bad ones."""
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG")
    (tmp_path / "good.png").write_bytes(encoded(100, 50))
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-400])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "huge.png").write_bytes(huge_png())
    (tmp_path / "dir.png").mkdir()
    return tmp_path


def line(**changes: Any) -> dict[str, Any]:
    """A good row of our own format, changed; None removes a field."""
    row = {"id": "bad", "images": ["good.png"], "question": "Q?", "choices": ["u", "v"], "answer": "A", "boxes": []}
    return {key: value for key, value in (row | changes).items() if value is not None}


def box(*xyxy: Any, image: Any = 0) -> dict[str, Any]:
    return {"boxes": [{"image": image, "xyxy": list(xyxy)}]}


DROPPED = [
    (line(images=["gone.png"]), "image_missing"),
    (line(images=["dir.png"]), "image_not_a_file"),
    (line(images=["good.png/x.png"]), "image_not_a_file"),
    (line(images=["cut.jpg"]), "image_broken"),
    (line(images=["text.jpg"]), "image_broken"),
    (line(images=["empty.png"]), "image_broken"),
    (line(images=["huge.png"]), "image_too_large"),
    (line(images=[]), "image_list_empty"),
    (line(images=["../good.png"]), "image_path_escapes"),
    (line(images=["/etc/passwd"]), "image_path_escapes"),
    (line(images=["a/../../x.png"]), "image_path_escapes"),
    (line(images=[3]), "field_type"),
    (line(images=[{"base64": "!!!"}]), "base64_invalid"),
    (line(images=None), "field_missing"),
    (line(question=""), "question_empty"),
    (line(answer=""), "answer_empty"),
    (line(answer="C"), "answer_not_in_choices"),
    (line(choices=["u"]), "choices_malformed"),
    (line(choices=["u", ""]), "choices_malformed"),
    (line(choices="uv"), "field_type"),
    (line(id="first"), "duplicate_id"),
    (line(**box(10, 10, 50, 40)), "box_in_pixels"),
    (line(**box(0.1, 0.1, 0.5)), "box_malformed"),
    (line(**box(0.1, 0.1, "x", 0.5)), "box_malformed"),
    (line(**box(0.1, 0.1, float("nan"), 0.5)), "box_malformed"),
    (line(**box(0.1, 0.1, 0.5, 0.5, image=1)), "box_malformed"),
    (line(**box(0.1, 0.1, 10**400, 0.5)), "box_malformed"),
    (line(id=""), "id_invalid"),
    (line(id=" \u200b"), "id_invalid"),
    (line(id=True), "id_invalid"),
    (line(id=["a"]), "id_invalid"),
    (line(id=1.5), "id_invalid"),
    (line(question=" \u200b\n"), "question_empty"),
    (line(turns=[{"role": "user", "text": "Q?"}, {"role": "user", "text": " "}]), "question_empty"),
    (line(choices=["u", "v", "u"]), "choices_equal"),
    (line(choices=["u", True]), "choice_type"),
    (line(choices=["u", None]), "choice_type"),
    (line(choices=["u", ["v"]]), "choice_type"),
    (line(choices=["u", float("nan")]), "choices_malformed"),
    (line(meta=json.loads("[" * 80 + "]" * 80)), "row_too_deep"),
    (line(pair=["1"]), "field_type"),
    (line(id="half \ud800"), "not_utf8"),
    (line(question="half \udfff?"), "not_utf8"),
    (line(images=["n" * 300 + ".png"]), "image_broken"),
    (line(turns=[{"role": "judge", "text": "Q?"}]), "field_type"),
    (line(meta=[1]), "field_type"),
]


@pytest.mark.parametrize(("row", "reason"), DROPPED, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(DROPPED)])
def test_bad_row_is_dropped_with_its_reason(row: dict[str, Any], reason: str, folder: Path) -> None:
    file = folder / "x.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (line(id="first"), row, line(id="last"))) + "\n")
    report = Report(quarantine=folder / "bad.jsonl")
    with report:
        samples = list(read(file, options=ReadOptions(check_images="decode"), report=report))
    assert [sample.id for sample in samples] == ["first", "last"]
    assert report.dropped == {reason: 1} and report.rows == 3 and not report.repaired
    assert reason in reasons.DROP_REASONS
    (entry,) = map(json.loads, (folder / "bad.jsonl").read_text().splitlines())
    assert (entry["row"], entry["reason"], entry["dropped"], entry["file"]) == (2, reason, True, str(file))
    with pytest.raises(UserError, match=r"x\.jsonl, row 2: " + reason):
        list(read(file, options=ReadOptions(policy="strict", check_images="decode")))


REPAIRED = [
    (box(0.5, 0.5, 0.1, 0.2), "box_inverted", [(0.1, 0.2, 0.5, 0.5)]),
    (box(-0.2, 0.5, 0.1, 1.2), "box_outside", [(0.0, 0.5, 0.1, 1.0)]),
    (box(1.2, 0.5, 1.4, 0.9), "box_degenerate", []),
    (box(0.3, 0.3, 0.3, 0.9), "box_degenerate", []),
]


@pytest.mark.parametrize(("change", "reason", "boxes"), REPAIRED)
def test_bad_box_is_repaired_and_counted(change: Any, reason: str, boxes: list, folder: Path) -> None:
    file = folder / "x.jsonl"
    file.write_text(json.dumps(line(**change)))
    report = Report()
    (sample,) = read(file, report=report)
    assert [b.xyxy for b in sample.boxes] == boxes
    assert report.repaired == {reason: 1} and report.ok == 1 and reason in reasons.REPAIR_REASONS


def test_duplicates_may_be_kept_under_new_names(folder: Path) -> None:
    file = folder / "x.jsonl"
    file.write_text("\n".join([json.dumps(line())] * 3))
    report = Report()
    samples = list(read(file, options=ReadOptions(duplicates="rename"), report=report))
    assert [s.id for s in samples] == ["bad", "bad#2", "bad#3"] and report.repaired == {"duplicate_id": 2}


def test_damaged_lines(folder: Path) -> None:
    good = json.dumps(line(id="1")).encode()
    lines = [good, b'{"id": ', b"[1]", good.replace(b"Q?", b"\xff?"), b"", json.dumps(line(id="2")).encode(), good[:30]]
    (folder / "x.jsonl").write_bytes(b"\n".join(lines))
    report = Report()
    assert [s.id for s in read(folder / "x.jsonl", report=report)] == ["1", "2"]
    assert report.dropped == {"json_invalid": 1, "row_malformed": 1, "not_utf8": 1, "row_truncated": 1}
    assert report.rows == 6


def test_damaged_array(folder: Path) -> None:
    good = [json.dumps(line(id=str(i))).encode() for i in range(3)]
    bad = [b'{"id": nope, "x": [1, {"a": "]}"}]}', b"17", good[1].replace(b"Q?", b"\xff?")]
    text = b"[" + b",".join([good[0], bad[0], good[1], bad[1], bad[2], good[2]])
    for ending, last in ((b"]", {}), (b", " + good[0][:40], {"row_truncated": 1}), (b"", {"row_truncated": 1})):
        (folder / "x.json").write_bytes(text + ending)
        report = Report()
        assert [s.id for s in read(folder / "x.json", report=report)] == ["0", "1", "2"]
        assert report.dropped == {"json_invalid": 1, "row_malformed": 1, "not_utf8": 1} | last


def four(samples: list[Sample]) -> list[Sample]:
    return [replace(s, choices=s.choices[:4], answer="B", category="cross", boxes=[]) for s in samples]


def test_damaged_table(tmp_path: Path, five_options: list[Sample]) -> None:
    file = tmp_path / "hr.tsv"
    write(four(five_options), "hr-bench", file)
    lines = file.read_bytes().splitlines()
    cells = [row.split(b"\t") for row in lines]
    lines[1] = lines[1][: len(lines[1]) // 3]  # cut inside a quoted question
    lines[2] = lines[2] + b"\textra"
    lines[3] = lines[3].rsplit(b"\t", 1)[0] + b"\t" + b"?" * 100
    lines[4] = lines[4].replace("ünï".encode(), b"\xfc\xfc")
    lines[5] = lines[5].rsplit(b"\t", 1)[0] + b"\t"
    file.write_bytes(b"\n".join(lines) + b"\n")
    report = Report()
    assert [s.id for s in read(file, options=ReadOptions(check_images="decode"), report=report)] == ["5"]
    expected = ("row_truncated", "row_malformed", "base64_invalid", "not_utf8", "image_list_empty")
    assert report.dropped == dict.fromkeys(expected, 1) and len(cells) == 7
    file.write_bytes(file.read_bytes()[:-200])  # the last row loses the end of its image
    report = Report()
    assert not list(read(file, options=ReadOptions(check_images="decode"), report=report))
    assert sum(report.dropped.values()) == report.rows == 6


def test_broken_jpeg_inside_a_table(tmp_path: Path, five_options: list[Sample]) -> None:
    samples = four(five_options)
    write(samples, "hr-bench", tmp_path / "hr.tsv")
    text = (tmp_path / "hr.tsv").read_text()
    good = base64.b64encode(samples[2].images[0].read()).decode()
    broken = base64.b64encode(samples[2].images[0].read()[:60] + b"\0" * 40).decode()
    (tmp_path / "hr.tsv").write_text(text.replace(good, broken))
    report = Report()
    assert len(list(read(tmp_path / "hr.tsv", options=ReadOptions(check_images="decode"), report=report))) == 5
    assert report.dropped == {"image_broken": 1}


def virl(folder: Path, **changes: Any) -> Report:
    row = {"question": "<image>Q?", "answer": "\\boxed{7}", "qid": "1", "image": ["good.png"]} | changes
    schema = pa.schema([("question", pa.string()), ("answer", pa.string()), ("qid", pa.string())])
    schema = schema.append(pa.field("image", pa.list_(pa.string())))
    pq.write_table(pa.Table.from_pylist([row], schema=schema), folder / "v.parquet")
    report = Report()
    list(read(folder / "v.parquet", report=report))
    return report


def test_virl39k_rows(folder: Path) -> None:
    assert virl(folder).ok == 1
    assert virl(folder, answer="\\boxed{\\frac{1}{2}").dropped == {"boxed_unbalanced": 1}
    assert virl(folder, image=[]).dropped == {"image_list_empty": 1}
    assert virl(folder, image=None).dropped == {"image_list_empty": 1}
    assert virl(folder, answer="\\boxed{}").dropped == {"answer_empty": 1}
    assert virl(folder, question="<image>").dropped == {"question_empty": 1}
    assert virl(folder, image=["good.png", "good.png"]).repaired == {"image_count_mismatch": 1}


def test_visual_cot_boxes_outside_the_image(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nQ?"}, {"from": "gpt", "value": "[0, 0, 1, 1]"}]
    turns += [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "yes"}]
    marks = ["[10, 10, 120, 40]", "[200, 10, 300, 40]", "[50, 40, 10, 10]", "nothing"]
    rows = [
        {"question_id": i, "image": ["good.png", f"good.png###{mark}"], "conversations": turns}
        for i, mark in enumerate(marks)
    ]
    (folder / "v.json").write_text(json.dumps(rows))
    report = Report()
    samples = list(read(folder / "v.json", report=report))
    assert [[b.xyxy for b in s.boxes] for s in samples] == [[(0.1, 0.2, 1.0, 0.8)], [], [(0.1, 0.2, 0.5, 0.8)]]
    assert report.repaired == {"box_outside": 1, "box_degenerate": 1, "box_inverted": 1}
    assert report.dropped == {"box_malformed": 1}


def test_damaged_parquet_counts_every_lost_row(tmp_path: Path, five_options: list[Sample]) -> None:
    file = tmp_path / "hr.parquet"
    write(four(five_options), "hr-bench", file)
    data = bytearray(file.read_bytes())
    data[len(data) // 8 : len(data) // 3] = bytes(len(data) // 3 - len(data) // 8)
    file.write_bytes(bytes(data))
    report = Report()
    kept = list(read(file, options=ReadOptions(check_images="decode"), report=report))
    assert report.rows == 6 and len(kept) + sum(report.dropped.values()) == 6 and report.dropped
    file.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(FileError) as caught:
        read(file)
    assert caught.value.reason == "file_unreadable"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.jsonl", None, "file_missing"),
        ("x.jsonl", b"", "file_empty"),
        ("x.xlsx", b"abc", "format_unknown"),
        ("x.json", b'[{"foo": 1}]', "format_unknown"),
        ("x.json", '[{"id": "ü"}]'.encode("utf-16"), "not_utf8"),
        ("x.json", b"[]", "file_unreadable"),
        ("x.tsv", b"index\tquestion\tanswer\n1\ta\tb\n", "wrong_columns"),
        ("x.tsv", b"\xff\xfe\t\xff\n", "not_utf8"),
        ("x.csv", b"Index,Frage\n1,2\n", "wrong_columns"),
        ("x.csv", b"\xef\xbb\xbf", "wrong_columns"),
        ("x.parquet", b"PAR1 nothing", "file_unreadable"),
    ],
)
def test_unreadable_files(name: str, content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError) as caught:
        list(read(tmp_path / name))
    assert caught.value.reason == reason in reasons.FILE_REASONS and str(tmp_path) in str(caught.value)


def test_folder_where_a_file_is_expected(tmp_path: Path) -> None:
    for name in (None, "jsonl", "hr-bench", "lvr"):
        with pytest.raises(FileError) as caught:
            list(read(tmp_path, name))
        assert caught.value.reason == "not_a_file"


def test_named_format_with_wrong_columns(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("index\tquestion\n1\t2\n")
    with pytest.raises(FileError, match="cycle_category"):
        list(read(tmp_path / "x.tsv", "hr-bench"))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    "id",
    "images",
    "question",
    "choices",
    "answer",
    "boxes",
    "turns",
    "response",
    "task",
    "tags",
    "meta",
    "image",
    "conversations",
    "bboxes",
    "bbox_images",
    "width",
    "height",
    "Question_id",
    "Image",
    "Text",
    "E",
    "l2-category",
    "index",
    "category",
    "A",
    "B",
    "C",
    "D",
    "cycle_category",
    "qid",
    "idx",
    "image_1",
    "Index",
    "Options",
] + ["Answer choices", "Ground truth", "Correct Answer", "Question"]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "lvr-meta"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=12))
def test_no_row_crashes_a_reader(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    ctx = Context(tmp_path / "f", tmp_path, 1, ReadOptions(), {})
    with contextlib.suppress(BadRow, UserError):
        FORMATS[name].parse(row, ctx)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_one_field_crashes_a_reader(data: st.DataObject, folder: Path) -> None:
    key = data.draw(st.sampled_from(["id", "images", "question", "choices", "answer", "boxes", "turns", "tags"]))
    row = line() | {key: data.draw(json_values)}
    (folder / "x.jsonl").write_text(json.dumps(row))
    report = Report()
    list(read(folder / "x.jsonl", "jsonl", ReadOptions(check_images="decode"), report))
    assert report.ok + sum(report.dropped.values()) == report.rows == 1


def test_a_long_name_or_half_a_character_does_not_crash_quick_reading(folder: Path) -> None:
    rows = [line(id="1", images=["n" * 300 + ".png"]), line(id="half \ud800"), line(id="2")]
    for name, text in (("x.jsonl", "\n".join(map(json.dumps, rows))), ("x.json", json.dumps(rows))):
        (folder / name).write_text(text)
        report = Report()
        assert [s.id for s in read(folder / name, options=ReadOptions(check_images="exists"), report=report)] == ["2"]
        assert report.dropped == {"image_broken": 1, "not_utf8": 1}
    emoji = json.dumps(line(id="3", question="\N{GRINNING FACE}?"))  # a whole pair of escapes is fine
    assert "\\ud83d" in emoji
    (folder / "x.jsonl").write_text(emoji)
    assert [s.question for s in read(folder / "x.jsonl")] == ["\N{GRINNING FACE}?"]


def test_sizes_and_numbers_beyond_reason(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nQ?"}, {"from": "gpt", "value": "[0, 0, 1, 1]"}]
    turns += [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "yes"}]
    row = {"image": ["good.png", "good.png###[10, 10, 50, 40]"], "conversations": turns, "width": 10**400, "height": 9}
    (folder / "v.json").write_text(json.dumps([row]))
    (sample,) = read(folder / "v.json")
    assert sample.boxes[0].xyxy == (0.1, 0.2, 0.5, 0.8)  # by the image's own size
    (folder / "Questions.csv").write_text(f"Index,Question,Options,Correct Answer\n{'9' * 5000},Q?,(a) x (b) y,(a)\n")
    report = Report()
    assert not list(read(folder, "mmvp", report=report)) and report.dropped == {"field_type": 1}
    entry = {"ds_name": "a", "data_path": "\0", "image_folder": "."}
    (folder / "meta.json").write_text(json.dumps([entry]))
    report = Report()
    assert not list(read(folder / "meta.json", report=report)) and report.dropped == {"file_unreadable": 1}
