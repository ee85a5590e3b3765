"""Questions of a benchmark: from the real layouts, nothing lost silently, subsets that keep pairs and cycles whole."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from eval_cases import Oracle, lines, make_world
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.questions import load, parse_bench, subset
from realvr.evaluation.runner import EvalSettings, evaluate


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_world(tmp_path_factory.mktemp("world"))


def test_every_layout_is_read_whole_and_nothing_is_decoded(
    world: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageRef, "open", lambda self: pytest.fail("an image was decoded"))
    sizes = {name: len(load(name, path)) for name, path in world.items()}
    assert sizes == {"mmvp": 6, "blink": 10, "hrbench-4k": 12, "mme-realworld": 5}
    assert len(load("hrbench-4k", world["hrbench-4k"].parent)) == 12  # its folder stands for it
    own = load("mine", world["mmvp"].parent / "samples.jsonl")
    assert own.format == "jsonl" and len(own) == 6


def sample(name: str, **fields: object) -> Sample:
    return Sample.ask(name, [ImageRef.from_bytes(f"{name}.png", name.encode())], f"{name}?", "A", **fields)


def test_a_subset_keeps_pairs_and_cycles_and_covers_subtasks() -> None:
    pairs = [sample(f"{k}{side}", pair=str(k)) for k in range(50) for side in "ab"]
    for limit in (1, 2, 3, 10, 31, 99):
        found = subset(pairs, limit)
        assert all(count == 2 for count in Counter(item.pair for item in found).values())
        assert len(found) == max(2, limit // 2 * 2)
    # 7 : 2 : 1 questions; eight of them: everyone has one before anyone has two, then by size
    tasks = [sample(f"{task}{k}", task=task) for task, count in (("x", 70), ("y", 20), ("z", 10)) for k in range(count)]
    assert Counter(item.task for item in subset(tasks, 3)) == {"x": 1, "y": 1, "z": 1}
    assert Counter(item.task for item in subset(tasks, 50)) == {"x": 35, "y": 10, "z": 5}
    places = [tasks.index(item) for item in subset(tasks, 10) if item.task == "x"]
    gaps = [b - a for a, b in zip(places, places[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1  # evenly spread
    assert subset(tasks, 10) == subset(tasks, 10) and subset(tasks, 100) == tasks


def test_option_cycles_stand_together_and_a_limit_keeps_all_four(world: dict[str, Path], tmp_path: Path) -> None:
    # The published file may list all first cycles before all second ones.
    header, *rows = world["hrbench-4k"].read_text().splitlines()
    cycle = header.split("\t").index("cycle_category")
    rows.sort(key=lambda row: row.split("\t")[cycle])
    shuffled = tmp_path / "hr_bench_4k.tsv"
    shuffled.write_text("\n".join([header, *rows]) + "\n")
    found = load("hrbench-4k", shuffled)
    assert [row.cycle for row in found.samples] == ["0", "1", "2", "3"] * 3
    questions = [row.question for row in found.samples]
    assert all(len(set(questions[k : k + 4])) == 1 for k in (0, 4, 8))
    few = load("hrbench-4k", shuffled, limit=9)
    assert len(few) == 8 and Counter(row.cycle for row in few.samples) == dict.fromkeys("0123", 2)


def test_a_limit_spreads_over_blink_subtasks_and_tasks_can_be_chosen(world: dict[str, Path], tmp_path: Path) -> None:
    assert len({row.task for row in load("blink", world["blink"], limit=5).samples}) == 5
    only = load("blink", world["blink"], tasks=["Jigsaw"])
    assert {row.task for row in only.samples} == {"Jigsaw"} and len(only.samples[0].images) == 3
    part = tmp_path / "BLINK"
    shutil.copytree(world["blink"] / "Counting", part / "Counting")
    assert load("blink", part).missing_tasks == ("IQ_Test", "Jigsaw", "Relative_Reflectance", "Spatial_Relation")
    with pytest.raises(UserError, match="has no questions of Jigsaw"):
        load("blink", part, tasks=["Counting", "Jigsaw"])


def test_an_unreadable_image_stays_a_question_and_a_bad_row_is_counted(world: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "MMVP"
    shutil.copytree(world["mmvp"], folder)
    (folder / "MMVP Images" / "2.png").write_bytes(b"no image")
    (folder / "MMVP Images" / "3.png").unlink()
    with (folder / "Questions.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    rows[5][3] = "(z)"  # an answer that is no option
    with (folder / "Questions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    found = load("mmvp", folder)
    assert [row.id for row in found.samples] == ["1", "2", "3", "4", "6"]
    assert found.rows == 6 and found.dropped == {"answer_not_in_choices": 1}
    assert "row 5" in found.examples["answer_not_in_choices"]
    with pytest.raises(UserError, match="row 5: answer_not_in_choices"):
        load("mmvp", folder, strict=True)


def damaged_copies(world: dict[str, Path], folder: Path) -> dict[str, tuple[Path, int, str]]:
    """Benchmarks with images that are broken where they stand in the data: (path, questions, what the errors say)."""
    blink = folder / "BLINK"
    shutil.copytree(world["blink"], blink)
    file = blink / "Counting" / "val-00000-of-00001.parquet"
    table = parquet.read_table(file)
    cells = table.to_pydict()
    cells["image_1"][0] = None  # no image in the whole row
    cells["image_1"][1] = {"bytes": b"", "path": None}
    parquet.write_table(pyarrow.Table.from_pydict(cells, schema=table.schema), file)

    header, *rows = world["hrbench-4k"].read_text().splitlines()
    place = header.split("\t").index("image")
    empty, bad = rows[0].split("\t"), rows[5].split("\t")
    empty[place], bad[place] = "", "!no base64!"
    rows[0], rows[5] = "\t".join(empty), "\t".join(bad)
    (folder / "hr_bench_4k.tsv").write_text("\n".join([header, *rows]) + "\n")

    shutil.copytree(world["mme-realworld"].parent, folder / "mme")
    entries = json.loads(world["mme-realworld"].read_text())
    entries[0]["Image"], entries[1]["Image"] = "", "../outside.png"
    (folder / "mme" / "MME_RealWorld.json").write_text(json.dumps(entries))

    asked = {"question": "Which?", "choices": ["x", "y"], "answer": "A"}
    inline = [{"id": "1", "images": [{"base64": "%%%"}], **asked}, {"id": "2", "images": ["gone.png"], **asked}]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inline))
    return {
        "blink": (blink, 10, "all empty|holds no image"),
        "hrbench-4k": (folder / "hr_bench_4k.tsv", 12, "is empty|invalid base64"),
        "mme-realworld": (folder / "mme", 5, "'Image' is empty|not inside"),
        "own": (folder / "own.jsonl", 2, "invalid base64|no such image"),
    }


def test_an_image_broken_in_the_data_itself_stays_in_the_denominator(world: dict[str, Path], tmp_path: Path) -> None:
    for name, (path, count, said) in damaged_copies(world, tmp_path).items():
        questions = load(name, path)
        assert len(questions) == count and not questions.dropped
        summary = evaluate(Oracle(), [questions], tmp_path / "out" / name, EvalSettings(ablation=False))
        found = [row for row in lines(tmp_path / "out" / name) if row["error"]]
        assert len(found) == 2 and not any(row["correct"] for row in found)
        assert {part for part in said.split("|") for row in found if part in row["error"]} == set(said.split("|"))
        entry = summary["benches"][name if name == "own" else f"mini-{name}"]
        assert (entry["n"], entry["errors"]) == (count, 2)
        assert entry["metrics"].get("micro", entry["headline"]) == pytest.approx(100 * (count - 2) / count)
        with pytest.raises(UserError, match="policy is strict" if name != "own" else "base64"):
            load(name, path, strict=True)


def test_wrong_input_says_what_is_expected_where(world: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope does not exist; MMVP is expected as a folder with Questions.csv"):
        load("mmvp", tmp_path / "nope")
    with pytest.raises(UserError, match=r"without Questions.csv .*; MMVP is expected as a folder with Questions.csv"):
        load("mmvp", tmp_path)
    with pytest.raises(UserError, match=r"is in the format mmvp; BLINK is expected as a folder of <SubTask>"):
        load("blink", world["mmvp"])
    with pytest.raises(UserError, match="also needs answer, category"):
        (tmp_path / "hr_bench_8k.tsv").write_text("index\tquestion\n1\tWhat?\n")
        load("hrbench-8k", tmp_path)
    with pytest.raises(UserError, match="--limit is 0"):
        load("mmvp", world["mmvp"], limit=0)
    for text in ("mmvp", "=x", "a/b=x", "mmvp="):
        with pytest.raises(UserError, match="write NAME=PATH"):
            parse_bench(text)


def test_the_record_changes_with_what_is_asked(world: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "MMVP"
    shutil.copytree(world["mmvp"], folder)
    before = load("mmvp", folder).describe()
    assert before == load("mmvp", world["mmvp"]).describe() | {"path": str(folder)}
    text = (folder / "Questions.csv").read_text()
    (folder / "Questions.csv").write_text(text.replace("(a),", "(a) ,").replace("?", "??", 1))
    assert load("mmvp", folder).describe()["sha256"] != before["sha256"]
