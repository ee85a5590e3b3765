"""Datasets of the hub by name (``hf:OWNER/NAME#SPLIT``), read through a hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from PIL import Image

from hub_standin import Hub, client
from outside import SOURCE
from realvr.cli import main
from realvr.data import ReadOptions, Report, Sample, read
from realvr.errors import UserError
from realvr.evaluation.questions import load, parse_bench
from realvr.hub import datasets
from realvr.training.engine import start_engine
from realvr.training.held_out import held_out_questions
from realvr.training.sections import ValidationSettings
from realvr.training.settings import SftSettings
from realvr.training.sources import training_data

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(number: int, side: int = 12) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side + number), (number, 90, 200)).save(file, "png")
    return file.getvalue()


def table(columns: dict[str, Any], **types: pa.DataType) -> bytes:
    file = io.BytesIO()
    arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), file)
    return file.getvalue()


def cells(*numbers: int) -> list[dict[str, Any]]:
    return [{"bytes": picture(number), "path": f"{number}.png"} for number in numbers]


def ours(*numbers: int) -> bytes:
    """Our fields as columns, with images inside and boxes."""
    boxes = [[{"image": 0, "xyxy": [0.1, 0.2, 0.4, 0.5 + number / 100]}] for number in numbers]
    return table(
        {
            "id": [f"q{number}" for number in numbers],
            "images": [cells(number) for number in numbers],
            "question": [f"Which one is {number}?" for number in numbers],
            "choices": [["a vase", "a cup"]] * len(numbers),
            "answer": ["B", "a vase", "A", "(B)"][: len(numbers)],
            "boxes": boxes,
        },
        images=pa.list_(IMAGE),
    )


def vstar(*numbers: int) -> bytes:
    text = "What colour is it?\n(A) red\n(B) blue\nAnswer with the option's letter from the given choices directly."
    labels = {"label": ["B"] * len(numbers), "category": ["direct_attributes"] * len(numbers)}
    return table({"text": [text] * len(numbers), "image": cells(*numbers), **labels}, image=IMAGE)


def lines(*numbers: int) -> bytes:
    rows = [{"id": f"l{n}", "images": [f"images/{n}.png"], "question": f"How many? {n}", "answer": n} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def blink(task: str, *numbers: int) -> bytes:
    count = len(numbers)
    columns = {"idx": [f"val_{task}_{n}" for n in numbers], "question": ["Which?"] * count, "answer": ["(A)"] * count}
    more = {"choices": [["left", "right"]] * count, "image_1": cells(*numbers), "sub_task": [task] * count}
    return table(columns | more, image_1=IMAGE)


def tsv(*numbers: int) -> bytes:
    """HR-Bench, with images as base64."""
    head = ["index", "question", "answer", "category", "A", "B", "C", "D", "cycle_category", "image"]
    row = "{n}|Where? {n}|C|single|up|down|left|right|0|{image}".replace("|", "\t")
    rows = [row.format(n=n, image=base64.b64encode(picture(n)).decode()) for n in numbers]
    return "\n".join(["\t".join(head), *rows, ""]).encode()


LAYOUTS: dict[str, dict[str, bytes]] = {
    "ours": {"data/train-00000-of-00001.parquet": ours(1, 2, 3, 4)},
    "vstar": {"data/train-00000-of-00001.parquet": vstar(5, 6)},
    "lines": {"train.jsonl": lines(7, 8)} | {f"images/{n}.png": picture(n) for n in (7, 8, 9)},
    "tsv": {"train.tsv": tsv(1, 2, 3)},
    "blink": {"Depth/train-00000-of-00001.parquet": blink("Depth", 1, 2)},
}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    """The files on this disk; the first of them."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / next(iter(files))


def facts(samples: list[Sample]) -> list[Any]:
    """All of the samples but where they lie."""
    plain = [replace(sample, source=None, images=[], meta={}) for sample in samples]
    return [(sample, full.content(), [i.id for i in full.images]) for sample, full in zip(plain, samples, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_equal_those_of_the_local_file(layout: str, hub: Hub, tmp_path: Path) -> None:
    local = put(tmp_path / "local", LAYOUTS[layout])
    hub.add("dataset", "tester/set", {"README.md": b"# A set\n", **LAYOUTS[layout]})
    report = Report()
    found = list(read("hf:tester/set#train", options=ReadOptions(check_images="decode"), report=report))
    assert facts(found) == facts(list(read(local))) and len(found) == report.ok == report.rows > 1
    assert all(file.is_relative_to(tmp_path / "cache") for file in report.files)


def test_rows_come_before_the_next_file_is_fetched_and_files_are_fetched_once(hub: Hub) -> None:
    shards = [f"data/train-0000{n}-of-00002.parquet" for n in range(2)]
    hub.add("dataset", "tester/set", {shards[0]: ours(1, 2), shards[1]: vstar(1)})
    rows = read("hf:tester/set#train", options=ReadOptions(check_images="none"))
    assert next(rows).id == "q1"
    assert [hub.served(shard) for shard in shards] == [1, 0]
    hub.add("dataset", "tester/set", {shards[0]: ours(3), shards[1]: vstar(1)})  # a commit in between is not mixed in
    with pytest.raises(UserError, match=r"train-00001-of-00002.parquet: no column .*question"):
        list(rows)
    assert [hub.served(shard) for shard in shards] == [1, 1]
    assert len(list(islice(read("hf:tester/set#train"), 2))) == 2
    assert [hub.served(shard) for shard in shards] == [1, 1]


def test_splits_by_name_by_card_and_by_revision(hub: Hub) -> None:
    both = [(task, split) for task in ("A", "B") for split in ("val", "test")]
    files = {f"{task}/{split}-00000-of-00001.parquet": blink(task, 1) for task, split in both}
    hub.add("dataset", "tester/tree", files)

    def ids(name: str) -> list[str]:
        datasets.find.cache_clear()
        return [sample.id for sample in read(name)]

    assert ids("hf:tester/tree#val") == ["val_A_1", "val_B_1"] and ids("hf:tester/tree#B/val") == ["val_B_1"]
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: held_out\n    path: rows/part-*\n---\n# Set\n"
    files = {"README.md": card.encode(), "rows/part-1.jsonl": lines(1), "train.jsonl": lines(2)}
    hub.add("dataset", "tester/card", files)
    hub.add("dataset", "tester/card", {"train.jsonl": lines(3)}, branch="old")
    options = {"match": "hf:tester/card#train: there is no split 'train'; there are #held_out"}
    with pytest.raises(UserError, **options):
        ids("hf:tester/card#train")
    assert datasets.find("hf:tester/card").files == ("rows/part-1.jsonl",)  # the only split there is
    assert datasets.find("hf:tester/card@old#train").files == ("train.jsonl",)
    with pytest.raises(UserError, match=r"hf:tester/tree: name a split; there are #test, #val; .* of A, B"):
        ids("hf:tester/tree")


def test_columns_with_other_names(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"problem": ["How many?", "Which colour?"], "solution": ["3", "red"], "picture": cells(1, 2)}
    hub.add("dataset", "tester/other", {"data/train-00000-of-00001.parquet": table(rows, picture=IMAGE)})
    columns = {"question": "problem", "answer": "solution", "images": "picture"}
    found = list(read("hf:tester/other#train", options=ReadOptions(columns=columns)))
    assert [(s.question, s.answer, s.images[0].size) for s in found] == [
        ("How many?", "3", (12, 13)),
        ("Which colour?", "red", (12, 14)),
    ]
    assert found[1].id == "train-00000-of-00001/2"
    words = [f"{name}={column}" for name, column in columns.items()]
    assert main(["data", "check", "hf:tester/other#train", "--columns", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] == 2
    assert main(["data", "show", "hf:tester/other#train", "--columns", *words, "--json", "--limit", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["question"] == "How many?"
    out = tmp_path / "out" / "train.jsonl"
    assert main(["data", "export", "hf:tester/other#train", str(out), "--to", "jsonl", "--columns", *words]) == 0
    assert [sample.content() for sample in read(out)] == [sample.content() for sample in found]
    capsys.readouterr()
    assert main(["data", "check", "hf:tester/other#train", "--columns", "question=problm", *words[1:]]) == 2
    assert "no column 'problm' (columns: question=problm); there are problem, solution, picture" in one_line(capsys)
    assert main(["data", "check", "hf:tester/other#train", "--columns", "quest=problem"]) == 2
    assert "columns: no field is called 'quest'; choose one of id, images, question" in one_line(capsys)
    assert main(["data", "check", "hf:tester/other#train"]) == 2
    line = one_line(capsys)
    assert "columns problem, solution, picture fit no format" in line and "--columns question=" in line
    other = put(tmp_path, {"rows.jsonl": b'{"q": "Which?", "answer": "1", "images": ["a.png"]}\n'})
    assert main(["data", "check", str(other), "--columns", "question=questions"]) == 2
    assert "rows.jsonl: no column 'questions'" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("realvr: error:")]
    return line


def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "way", "says"),
    [
        ("tester/private#train", no_token, "does not exist on the hub, or it is private: then run `hf auth login`"),
        ("tester/gated#train", no_token, "is gated: accept its terms on http"),
        ("tester/absent#train", as_it_is, "does not exist on the hub, or your token may not read it"),
        ("tester/private@v2#train", as_it_is, "there is no such revision"),
        ("tester/private#dev", as_it_is, "there is no split 'dev'; there are #train"),
        ("tester/private#train", unreachable, "the hub cannot be reached"),
        ("private", as_it_is, "write hf:OWNER/NAME#SPLIT"),
        ("tester/empty", as_it_is, "the dataset has no data files"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str,
    way: Callable[[pytest.MonkeyPatch], None],
    says: str,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.add("dataset", "tester/private", {"train.jsonl": lines(1), "images/1.png": picture(1)}, private=True)
    hub.add("dataset", "tester/gated", {"train.jsonl": lines(1), "images/1.png": picture(1)}, gated=True)
    hub.add("dataset", "tester/empty", {"README.md": b"nothing\n"})
    way(monkeypatch)
    assert main(["data", "check", f"hf:{name}"]) == 2
    line = one_line(capsys)
    assert f"hf:{name}" in line and says in line


def test_a_private_dataset_is_read_with_a_token(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("dataset", "tester/private", {"train.jsonl": lines(1), "images/1.png": picture(1)}, private=True)
    assert main(["data", "check", "hf:tester/private#train", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] == 1 and result["files"][0]["path"] == "hf:tester/private#train"


def test_training_counts_and_fingerprints_what_it_read(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also that a resumed run notices a new commit of the dataset."""
    engine = start_engine(cpu=True)
    hub.add("dataset", "tester/set", {"train.parquet": ours(1, 2, 3)})
    source = {"path": "hf:tester/set#train"}
    settings = SftSettings.model_validate(
        {"model": {"path": "mini"}, "data": {"sources": [source]}, "run": {"out": str(tmp_path / "run")}}
    )
    first = training_data(settings, engine)
    assert [s.id for s in first.samples["hf:tester/set#train"]] == ["q1", "q2", "q3"]
    assert "data: hf:tester/set#train: 3 of 3 rows usable, 3 with evidence boxes" in capsys.readouterr().err
    (file,) = first.fingerprint.files
    digest = hashlib.sha256((hub.blobs / hub.store(ours(1, 2, 3))).read_bytes()).hexdigest()
    assert first.fingerprint.files[file]["sha256"] == digest
    datasets.find.cache_clear()
    assert training_data(settings, engine).fingerprint.changes(first.fingerprint.files, first.fingerprint.stats) == []
    datasets.find.cache_clear()
    hub.add("dataset", "tester/set", {"train.parquet": ours(1, 2)})
    again = training_data(settings, engine)
    changes = again.fingerprint.changes(first.fingerprint.files, first.fingerprint.stats)
    assert len(again.samples["hf:tester/set#train"]) == 2 and f"{file} is no longer read" in changes
    settings.data.sources[0].columns = {"question": "problem"}
    with pytest.raises(UserError, match=r"train.parquet: no column 'problem'"):
        training_data(settings, engine)


def test_held_out_questions_and_benchmarks_of_ones_own(hub: Hub) -> None:
    hub.add("dataset", "tester/set", {"train.parquet": ours(1), "test.parquet": ours(2, 3)})
    held_out = held_out_questions(ValidationSettings(path="hf:tester/set#test"))
    assert held_out is not None and [sample.id for sample in held_out.samples] == ["q2", "q3"]
    name, path = parse_bench("mine=hf:tester/set#test")
    assert [sample.id for sample in load(name, path).samples] == ["q2", "q3"]


class TwoRanks:
    """Two ranks of which the other looked a little later."""

    rank = 0

    def __init__(self, later: str) -> None:
        self.later = later

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, [self.later]]


def test_ranks_that_see_different_commits_do_not_train(hub: Hub, tmp_path: Path) -> None:
    hub.add("dataset", "tester/set", {"train.parquet": ours(1)})
    settings = SftSettings.model_validate(
        {
            "model": {"path": "mini"},
            "data": {"sources": [{"path": "hf:tester/set#train"}]},
            "run": {"out": str(tmp_path)},
        }
    )
    with pytest.raises(UserError, match="hf:tester/set#train was changed while the run was starting"):
        training_data(settings, TwoRanks("0" * 40))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_trains_on_a_dataset_of_the_hub_and_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.add("dataset", "tester/set", {"data/train-00000-of-00001.parquet": ours(1, 2, 3, 4)})
    flags = ["--data.sources.0.path", "hf:tester/set#train", "--run.out", str(tmp_path / "run"), "--optim.batch", "2"]
    flags += ["--optim.microbatch", "1", "--model.dtype", "float32", "--log.no-tensorboard", "--checkpoint.every", "1"]

    def train(steps: int, code: int = 0) -> str:
        command = [sys.executable, "-m", "realvr", "train", "sft", "own/mini-sft", *flags, "--optim.steps", str(steps)]
        known = os.environ | client(hub, tmp_path / "home") | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(command, env=known, text=True, capture_output=True, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stderr

    assert "data: hf:tester/set#train: 4 of 4 rows usable, 4 with evidence boxes" in train(1)
    assert "resumed after step 1" in train(2)
    assert hub.served("data/train-00000-of-00001.parquet") == 1
    hub.add("dataset", "tester/set", {"data/train-00000-of-00001.parquet": ours(1, 2, 3)})
    assert "is no longer read" in train(3, code=2)
    flags.extend(["--checkpoint.changed-data", "accept"])
    assert "resumed after step 2" in train(3)
