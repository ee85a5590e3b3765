"""Every layout: what a writer writes, the reader of that layout reads back; and what is particular to each format."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realvr.data.detect import detect
from realvr.data.export import square_frame, write
from realvr.data.readers import cells
from realvr.data.readers.base import ReadOptions, join_options, parse_boxes, split_options
from realvr.data.readers.mmvp import parse_options
from realvr.data.readers.virl39k import unbox
from realvr.data.readers.visual_cot import BOX_REQUEST
from realvr.data.reading import Report, read
from realvr.data.reasons import FileError
from realvr.data.sample import Box, ImageRef, Message, Sample, strip_image_tags
from realvr.errors import UserError
from realvr.imaging import reference as image_reference
from realvr.imaging.cache import ImageCache

LAYOUTS = [
    ("jsonl", "x.jsonl"),
    ("visual-cot", "x.json"),
    ("lvr", "x.json"),
    ("virl39k", "x.parquet"),
    ("mmvp", "folder"),
    ("blink", "folder"),
    ("hr-bench", "x.tsv"),
    ("hr-bench", "x.parquet"),
    ("mme-realworld", "x.json"),
    ("mme-realworld", "x.tsv"),
    ("mme-realworld", "x.parquet"),
    ("vstar", "x.jsonl"),
    ("vstar", "x.parquet"),
]


def fitted(sample: Sample, layout: str) -> Sample:
    """The sample with what the layout can hold."""
    if layout == "hr-bench":
        answer = "A" if sample.answer == "E" else sample.answer
        sample = replace(sample, choices=sample.choices[:4], answer=answer, category="single")
    return sample if layout in ("jsonl", "visual-cot", "lvr") else replace(sample, boxes=[])


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_round_trip(layout: str, name: str, five_options: list[Sample], tmp_path: Path) -> None:
    wanted = [fitted(sample, layout) for sample in five_options]
    written = write(wanted, layout, tmp_path / name)
    assert written.rows == len(wanted)
    assert detect(tmp_path / name).name == layout
    report = Report()
    back = list(read(tmp_path / name, options=ReadOptions(check_images="decode"), report=report))
    assert (report.rows, report.ok, report.dropped, report.repaired) == (6, 6, {}, {})
    assert [sample.content() for sample in back] == [sample.content() for sample in wanted]
    assert all(sample.source is not None and sample.source.row == i + 1 for i, sample in enumerate(back))


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_same_input_same_bytes(layout: str, name: str, five_options: list[Sample], tmp_path: Path) -> None:
    samples = [fitted(sample, layout) for sample in five_options]
    trees = []
    for run in ("a", "b"):
        write(samples, layout, tmp_path / run / name)
        files = sorted(path for path in (tmp_path / run).rglob("*") if path.is_file())
        trees.append([(str(path.relative_to(tmp_path / run)), path.read_bytes()) for path in files])
    assert trees[0] == trees[1]


def test_our_lines_keep_everything(five_options: list[Sample], tmp_path: Path) -> None:
    sample = replace(
        five_options[0],
        images=five_options[0].images * 2,
        turns=[Message("user", "First?", (0,)), Message("assistant", "Yes."), Message("user", "And now?", (1,))],
        response="Because. <answer>A</answer>",
        meta={"evidence_px": 12},
    )
    write([sample], "jsonl", tmp_path / "x.jsonl")
    (back,) = read(tmp_path / "x.jsonl")
    for name in (
        "id",
        "turns",
        "choices",
        "answer",
        "boxes",
        "response",
        "task",
        "category",
        "tags",
        "pair",
        "cycle",
        "meta",
    ):
        assert getattr(back, name) == getattr(sample, name), name
    assert back.question == "And now?" and back.answer_text == "a vase"


def test_visual_cot_several_boxes_and_frame(tmp_path: Path, encoded) -> None:
    (tmp_path / "cot").mkdir()
    (tmp_path / "cot/1.jpg").write_bytes(encoded(200, 100, kind="JPEG"))
    row = {
        "dataset": "gqa",
        "split": "train",
        "question_id": 7,
        "image": ["cot/1.jpg", "cot/1.jpg###[20, 10, 60, 50]", "cot/1.jpg###[[100, 0, 200, 100], [20, 10, 60, 50]]"],
        "conversations": [
            {"from": "human", "value": f"<image>\nWhat? {BOX_REQUEST}"},
            {"from": "gpt", "value": "[0.100, 0.300, 0.300, 0.500]"},
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": "a cat"},
        ],
    }
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (sample,) = read(tmp_path / "rows.json")
    # Turn 1 lies in the padded square: read as fractions of the image it would start at y = 0.3, not 0.1.
    assert [box.xyxy for box in sample.boxes] == [(0.1, 0.1, 0.3, 0.5), (0.5, 0.0, 1.0, 1.0)]
    assert (sample.question, sample.answer, len(sample.images)) == ("What?", "a cat", 1)
    assert square_frame((20, 10, 60, 50), (200, 100)) == [0.1, 0.3, 0.3, 0.5]


def test_visual_cot_rule_on_real_rows(shared: Path) -> None:
    """The pixel box behind ### and the box of turn 1, put in the padded-square frame, are the same box."""
    file = shared / "data" / "viscot_rows.json"
    rows = json.loads(file.read_text())
    report = Report()
    samples = list(read(file, options=ReadOptions(check_images="none"), report=report))
    assert report.rows == len(rows) and sum(report.dropped.values()) == 0
    agree = 0
    for row, sample in zip(rows, samples, strict=True):
        size = (row["width"], row["height"])
        (written,) = parse_boxes(row["conversations"][1]["value"])
        (box,) = sample.boxes
        pixels = tuple(round(value * side) for value, side in zip(box.xyxy, size * 2, strict=True))
        framed = square_frame(pixels, size)
        agree += all(abs(a - b) <= 0.002 for a, b in zip(framed, written, strict=True))
    assert agree >= 0.99 * len(rows), f"{agree} of {len(rows)}"
    assert len({sample.id for sample in samples}) == len(rows)


def test_lvr_boxes_fractions_or_pixels_and_conversation(tmp_path: Path, encoded) -> None:
    (tmp_path / "a.png").write_bytes(encoded(100, 50))
    (tmp_path / "b.png").write_bytes(encoded(100, 50, 3))
    turns = [
        {"from": "human", "value": "<image>\nWhat?\nA. one\nB. two"},
        {"from": "gpt", "value": "<lvr>\nI look closer.\n<answer> B </answer>"},
    ]
    two = [
        {"from": "human", "value": "<image>\nIs <image> like it?"},
        {"from": "gpt", "value": "No."},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "<answer>colour</answer>"},
    ]
    rows = [
        {"id": "f", "image": "a.png", "conversations": turns, "bboxes": [[0.1, 0.2, 0.5, 1.0]]},
        {"id": "p", "image": ["a.png"], "conversations": turns, "bboxes": [[10, 10, 50, 50]]},
        {"image": ["a.png", "b.png"], "conversations": two},
    ]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    fractions, pixels, talk = read(tmp_path / "x.json")
    assert fractions.boxes == pixels.boxes == [Box(0, (0.1, 0.2, 0.5, 1.0))]
    assert (fractions.question, fractions.choices, fractions.answer) == ("What?", ["one", "two"], "B")
    assert fractions.response == "I look closer.\n<answer> B </answer>" and not talk.response
    assert talk.turns[0] == Message("user", "Is image 2 like it?", (0, 1))
    assert (talk.id, talk.question, talk.answer) == ("x/3", "Why?", "colour")


def test_lvr_meta_file(tmp_path: Path, five_options: list[Sample]) -> None:
    write(five_options, "lvr", tmp_path / "one" / "a.json")
    write(five_options, "visual-cot", tmp_path / "two" / "b.json")
    meta = [
        {"ds_name": "first", "data_path": "one/a.json", "image_folder": "one"},
        {"ds_name": "second", "data_path": "two/b.json", "image_folder": str(tmp_path / "two")},
        {"ds_name": "gone", "data_path": "three/c.json", "image_folder": "three"},
        {"ds_name": "incomplete"},
    ]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    report = Report()
    back = list(read(tmp_path / "meta.json", report=report))
    assert [s.content() for s in back] == [s.content() for s in five_options * 2]
    assert back[0].id == "first/0" and back[6].id == "second/Perception/train/0"
    assert report.dropped == {"file_missing": 1, "field_missing": 1} and report.rows == 14
    assert back[0].source is not None and back[0].source.file.endswith("one/a.json")


@pytest.mark.parametrize("folder", ["MMVP Images", "MMVP_Images"])
def test_mmvp_folder_spellings_pairs_and_correction(folder: str, tmp_path: Path, encoded) -> None:
    (tmp_path / folder).mkdir()
    with (tmp_path / "Questions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Index", "Question", "Options", "Correct Answer"])
        for index in (1, 2, 99, 100, 279, 280):
            (tmp_path / folder / f"{index}.jpg").write_bytes(encoded(shade=index, kind="JPEG"))
            answer = "(a)" if index % 2 else "(b)"
            writer.writerow([index, "Are the wings open, or closed?", "(a) Open (b) Closed", answer])
    plain = list(read(tmp_path))
    assert [s.answer for s in plain] == ["A", "B"] * 3
    assert [s.pair for s in plain] == ["1", "1", "50", "50", "140", "140"]
    assert plain[0].choices == ["Open", "Closed"] and plain[0].images[0].id == f"{folder}/1.jpg"
    corrected = list(read(tmp_path / "Questions.csv", options=ReadOptions(mmvp_corrected=True)))
    assert [s.answer for s in corrected] == ["A", "B", "B", "A", "B", "A"]


def test_blink_images_and_splits(tmp_path: Path, encoded) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    names = ("idx", "question", "prompt", "answer", "sub_task")
    schema = pa.schema([*((name, pa.string()) for name in names), ("choices", pa.list_(pa.string()))]
                       + [(f"image_{k}", image) for k in (1, 2, 3, 4)])  # fmt: skip
    for split, answer in (("val", "(B)"), ("test", "hidden")):
        row = {"idx": f"{split}_Jigsaw_1", "question": "Which?", "prompt": "Which? (A) 1 (B) 2", "answer": answer}
        row |= {"sub_task": "Jigsaw", "choices": ["the second image", "the third image"]}
        row |= {f"image_{k}": {"bytes": encoded(shade=k), "path": None} for k in (1, 2, 3)}
        (tmp_path / "Jigsaw").mkdir(exist_ok=True)
        file = tmp_path / "Jigsaw" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist([row], schema=schema), file)
    (sample,) = read(tmp_path)
    assert (len(sample.images), sample.answer, sample.task) == (3, "B", "Jigsaw")
    assert sample.meta["prompt"].startswith("Which?") and sample.images[2].id == "val_Jigsaw_1/image_3"
    report = Report()
    assert not list(read(tmp_path, options=ReadOptions(split="test"), report=report))
    assert report.dropped == {"answer_hidden": 1}


def test_table_image_may_refer_to_an_earlier_row(tmp_path: Path, five_options: list[Sample]) -> None:
    samples = [fitted(sample, "hr-bench") for sample in five_options]
    write(samples, "hr-bench", tmp_path / "x.tsv")
    lines = (tmp_path / "x.tsv").read_text().splitlines()
    lines[2] = lines[2].rsplit("\t", 1)[0] + "\t0"
    (tmp_path / "x.tsv").write_text("\n".join(lines) + "\n")
    back = list(read(tmp_path / "x.tsv"))
    assert back[1].images[0].content_hash() == samples[0].images[0].content_hash()
    assert back[0].images[0].data is None, "an image of a TSV stays in its file"


def test_mme_key_spellings(tmp_path: Path, encoded) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    options = ["(A) one", "(B) two", "(C) three", "(D) four", "(E) The feature does not exist"]
    rows = [
        {"Question_id": "q1", "Image": "a.png", "Text": "T?", "Question Type": "Multiple Choice",
         "Answer choices": options, "Ground truth": "E", "Category": "Vehicle", "Subtask": "Monitoring",
         "Task": "Perception"},
        {"question id": "q2", "image": "a.png", "text": "T?", "Answer Choices": options, "Ground Truth": "(c)",
         "category": "Vehicle", "subtask": "Monitoring", "task": "Perception"},
    ]  # fmt: skip
    (tmp_path / "MME_RealWorld_Lite.json").write_text(json.dumps(rows))
    first, second = read(tmp_path / "MME_RealWorld_Lite.json")
    assert (first.answer, second.answer, first.choices) == ("E", "C", second.choices)
    assert first.choices[0] == "one" and first.tags == {"subtask": "Monitoring"} and second.task == "Perception"


def test_named_format_overrides_detection(tmp_path: Path, five_options: list[Sample]) -> None:
    write([replace(sample, boxes=[]) for sample in five_options], "lvr", tmp_path / "x.json")
    assert len(list(read(tmp_path / "x.json", "visual_cot"))) == 6
    with pytest.raises(UserError, match="choose one of"):
        read(tmp_path / "x.json", "coco")


def test_layouts_refuse_what_they_cannot_hold(tmp_path: Path, five_options: list[Sample]) -> None:
    with pytest.raises(UserError, match="needs 4 options"):
        write(five_options, "hr-bench", tmp_path / "x.tsv")
    written = write(five_options, "hr-bench", tmp_path / "x.tsv", strict=False)
    assert written.rows == 0 and sum(written.skipped.values()) == 6
    assert write(five_options, "virl39k", tmp_path / "y.parquet").lost["boxes"] == 6
    broken = replace(five_options[0], choices=[], answer="}{")
    with pytest.raises(UserError, match="unbalanced"):
        write([broken], "virl39k", tmp_path / "z.parquet")


def test_different_images_of_one_name_are_both_kept(tmp_path: Path, encoded) -> None:
    images = [ImageRef.from_bytes("same.png", encoded(shade=shade)) for shade in (1, 2)]
    samples = [Sample.ask(str(i), [image], "Q?", "yes") for i, image in enumerate(images)]
    write(samples, "jsonl", tmp_path / "x.jsonl")
    assert [s.content() for s in read(tmp_path / "x.jsonl")] == [s.content() for s in samples]


def test_small_parsers() -> None:
    assert (
        unbox("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
        and unbox(" 7 ") == "7"
        and unbox("\\boxed{\\{1\\}}") == "\\{1\\}"
    )
    assert parse_options("(a) Open (b) Half (open) (c) Shut") == ["Open", "Half (open)", "Shut"]
    assert parse_boxes("x [1, 2,3 , 4.5] [1,2] [-1, .5, 2e1, 3]") == [[1, 2, 3, 4.5], [-1, 0.5, 20, 3]]
    assert split_options("Q?\nOptions:\nA. x\nB. y", "B") == ("Q?", ["x", "y"])
    assert split_options("Q?\nA. x\nB. y", "seven") == ("Q?\nA. x\nB. y", [])
    assert split_options("A. x\nB. y", "A") == ("A. x\nB. y", [])
    assert split_options(join_options("Q?", ["x", "y", "z"]), "C") == ("Q?", ["x", "y", "z"])
    assert strip_image_tags("<image>\n<image> Is <image> red?\n<image>") == ("Is image 3 red?", 4)


def cycles(samples: list[Sample]) -> list[Sample]:
    """Two questions in four cycles each, as HR-Bench has them."""
    return [
        replace(samples[k // 4], id=str(k), choices=samples[0].choices[:4], answer="B", cycle=str(k % 4))
        for k in range(8)
    ]


@pytest.mark.parametrize("name", ["hr_bench_4k.tsv", "hr_bench_4k.parquet"])
def test_four_cycles_share_an_image_that_is_read_and_decoded_once(
    name: str, tmp_path: Path, five_options: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cycles(five_options), "hr-bench", tmp_path / name)
    decoded: list[str] = []
    real = image_reference.decode_base64
    counted = lambda text, what: decoded.append(what) or real(text, what)  # noqa: E731
    for module in (image_reference, cells):
        monkeypatch.setattr(module, "decode_base64", counted)
    found = list(read(tmp_path / name, options=ReadOptions(check_images="decode")))
    assert len(found) == 8 and len({id(sample.images[0]) for sample in found}) == 2
    # The TSV leaves images in the file: one reading for the hash, one for the check.
    assert len(decoded) == (4 if name.endswith(".tsv") else 2)
    images = ImageCache()
    assert len({images.open(sample.images[0]).size for sample in found}) == 2 and images.decoded == 2


def test_writing_four_cycles_reads_each_image_once(tmp_path: Path, five_options: list[Sample]) -> None:
    opened: list[str] = []

    class Counted(ImageRef):
        def read(self) -> bytes:
            opened.append(self.id)
            return super().read()

    refs = [Counted(s.images[0].id, data=s.images[0].data) for s in five_options[:2]]
    samples = [replace(s, images=[refs[k // 4]]) for k, s in enumerate(cycles(five_options))]
    write(samples, "hr-bench", tmp_path / "hr.tsv")
    assert opened == ["scene0.png", "scene1.png"]
    lines = (tmp_path / "hr.tsv").read_text().splitlines()
    assert len({line.rsplit("\t", 1)[1] for line in lines[1:5]}) == 1  # the real layout: the image in every row


def test_reference_to_no_earlier_row(tmp_path: Path, five_options: list[Sample]) -> None:
    write(cycles(five_options), "hr-bench", tmp_path / "hr.tsv")
    lines = (tmp_path / "hr.tsv").read_text().splitlines()
    lines[1] = lines[1].replace("\tB\t", "\tZ\t", 1)  # dropped for its answer, but its image can be referred to
    lines[2] = lines[2].rsplit("\t", 1)[0] + "\t0"
    lines[3] = lines[3].rsplit("\t", 1)[0] + "\t7"
    (tmp_path / "hr.tsv").write_text("\n".join(lines))
    report = Report()
    found = list(read(tmp_path / "hr.tsv", options=ReadOptions(check_images="none"), report=report))
    assert report.dropped == {"answer_not_in_choices": 1, "image_missing": 1} and found[0].id == "1"
    assert found[0].images[0].content_hash() == five_options[0].images[0].content_hash()


def test_a_folder_with_both_hr_bench_files_keeps_both(tmp_path: Path, five_options: list[Sample]) -> None:
    for name in ("hr_bench_4k", "hr_bench_8k"):
        write(cycles(five_options), "hr-bench", tmp_path / f"{name}.parquet")
    report = Report()
    ids = [sample.id for sample in read(tmp_path, report=report)]
    assert report.ok == 16 and not report.dropped and ids[0] == "hr_bench_4k/0" and ids[-1] == "hr_bench_8k/7"


def test_a_split_that_is_not_there_is_refused(tmp_path: Path, five_options: list[Sample]) -> None:
    write([replace(s, task="Counting") for s in five_options], "blink", tmp_path)
    assert len(list(read(tmp_path, options=ReadOptions(split="val")))) == 6
    with pytest.raises(FileError, match="no files of split 'test'; there are val"):
        list(read(tmp_path, options=ReadOptions(split="test")))


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, five_options: list[Sample]) -> None:
    for layout, name in (
        ("jsonl", "x.jsonl"),
        ("visual-cot", "x.json"),
        ("virl39k", "x.parquet"),
        ("hr-bench", "x.tsv"),
    ):
        (tmp_path / name).write_text("precious")

        def broken() -> Iterator[Sample]:
            yield five_options[0]
            raise UserError("the input ends here")

        with pytest.raises(UserError):
            write(broken(), layout, tmp_path / name)
        assert (tmp_path / name).read_text() == "precious"
        assert not [file for file in tmp_path.iterdir() if ".part" in file.name]


def test_mmvp_images_of_an_earlier_export_are_not_taken_for_the_new_ones(tmp_path: Path, encoded) -> None:
    def pair(kind: str) -> list[Sample]:
        pictures = [ImageRef.from_bytes(f"{k}", encoded(40, 30, k, kind)) for k in range(2)]
        return [Sample.ask(str(k), [p], "Q?", "A", choices=["x", "y"], pair="1") for k, p in enumerate(pictures)]

    for kind in ("JPEG", "PNG"):
        write(pair(kind), "mmvp", tmp_path)
        assert [s.images[0].read() for s in read(tmp_path)] == [s.images[0].read() for s in pair(kind)]
