"""Questions of a benchmark: from the real layouts, nothing lost silently, subsets that keep pairs and cycles whole."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path

import pytest

from eval_cases import make_world
from realvr.benchmarks.questions import load, parse_bench, subset
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError


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
