"""Which name questions go by, and when a published number may stand beside their score."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval_cases import Constant, make_world
from realvr.cli import main
from realvr.errors import UserError
from realvr.evaluation.identity import differs
from realvr.evaluation.published import benchmark_row
from realvr.evaluation.questions import load
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.evaluation.tasks.blink import PAPER, ROWS


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_world(tmp_path_factory.mktemp("world"))


def copied(path: Path, folder: Path) -> Path:
    """The files alone, without the recipe beside them."""
    folder.mkdir(parents=True)
    if path.is_dir():
        return shutil.copytree(path, folder / path.name)
    for file in path.parent.iterdir():
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
    return Path(shutil.copy(path, folder / path.name))


@pytest.mark.parametrize("name", ["mmvp", "blink", "hrbench-4k", "mme-realworld"])
def test_the_worlds_benchmarks_are_called_mini(world: dict[str, Path], tmp_path: Path, name: str) -> None:
    asked = [
        load(name, world[name]),
        load(f"mini-{name}", world[name]),
        load(name, copied(world[name], tmp_path / "x")),
    ]
    assert [questions.bench for questions in asked] == [f"mini-{name}"] * 3
    own = load(name, world[name].parent / "samples.jsonl")
    assert own.bench == f"mini-{name}"  # the same questions in our own format
    assert load("mine", world[name]).bench == "mine"  # a name of one's own stays


def test_pictures_drawn_before_they_carried_a_mark_are_known_by_the_recipe(
    world: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mmvp"
    shutil.copytree(world["mmvp"].parent, folder)
    for file in (folder / "MMVP" / "MMVP Images").iterdir():
        Image.open(file).convert("RGB").save(file)
    assert load("mmvp", folder / "MMVP").bench == "mini-mmvp"
    (folder / "recipe.json").unlink()
    assert load("mmvp", folder / "MMVP").bench == "mmvp"


def test_a_question_file_of_ones_own_has_its_own_name(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = published_mmvp(tmp_path / "MMVP", 4)
    for name in ("any.jsonl", "mmvp.jsonl"):
        assert main(["data", "export", str(real), str(tmp_path / name), "--to", "jsonl"]) == 0
        questions = load("mmvp", tmp_path / name)
        assert questions.bench == name and len(questions) == 4
        evaluate(Constant("<answer>A</answer>"), [questions], tmp_path / f"run-{name}")
        capsys.readouterr()
        assert main(["score", str(tmp_path / f"run-{name}"), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
        files = [file.read_text() for file in (tmp_path / f"run-{name}").glob("summary.*")]
        assert len(files) == 3
        for text in (capsys.readouterr().out, *files):
            assert "MMVP" not in text and name in text and "72.0" not in text


def published_mmvp(folder: Path, rows: int) -> Path:
    """``rows`` questions in the published layout, with photographs (of noise) instead of drawings."""
    (folder / "MMVP Images").mkdir(parents=True)
    with (folder / "Questions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Index", "Question", "Options", "Correct Answer"])
        for n in range(1, rows + 1):
            writer.writerow([n, f"Is it open or closed, {(n + 1) // 2}?", "(a) Open (b) Closed", f"({'ab'[n % 2]})"])
            Image.effect_noise((28, 28), 10 + n % 50).convert("RGB").save(folder / "MMVP Images" / f"{n}.jpg")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_mmvp(tmp_path_factory.mktemp("published") / "MMVP", 300)


def scored(folder: Path, questions: Any, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What ``realvr score --beside`` prints and writes for a model that always says A."""
    evaluate(Constant("<answer>A</answer>"), [questions], folder, EvalSettings(ablation=False), batch=100)
    capsys.readouterr()
    assert main(["score", str(folder), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    (entry,) = json.loads((folder / "summary.json").read_text())["benches"].values()
    return out + (folder / "summary.md").read_text() + (folder / "summary.csv").read_text(), entry


def test_a_published_number_needs_the_published_set(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, entry = scored(tmp_path / "whole", load("MMVP", whole), capsys)
    assert entry["not_published_set"] == "" and said.count("72.0") == 3 and entry["headline"] == 50.0
    said, entry = scored(tmp_path / "mini", load("mini-mmvp", whole), capsys)
    assert "72.0" not in said and "MMVP" not in said and entry["not_published_set"] == "called a mini set"
    said, entry = scored(tmp_path / "limit", load("mmvp", whole, limit=100), capsys)
    assert "72.0" not in said and "100 questions (--limit 100)" in entry["not_published_set"]
    assert "No published number stands beside MMVP: only 100 questions (--limit 100)." in said
    said, entry = scored(tmp_path / "limit300", load("mmvp", whole, limit=300), capsys)
    assert "72.0" not in said  # --limit was given
    part = tmp_path / "MMVP"
    shutil.copytree(whole, part)
    rows = (part / "Questions.csv").read_text().splitlines(keepends=True)
    (part / "Questions.csv").write_text("".join(rows[:-2]))
    said, entry = scored(tmp_path / "part", load("mmvp", part), capsys)
    assert "72.0" not in said and entry["not_published_set"] == "298 questions; the published set has 300"


def test_drawings_in_the_published_numbers_are_not_the_published_set(
    world: dict[str, Path], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``realvr world make --split mmvp`` writes by default: 300 rows in MMVP's layout, here copied elsewhere."""
    drawn = tmp_path / "MMVP"
    shutil.copytree(whole, drawn)
    picture = (world["mmvp"] / "MMVP Images" / "1.png").read_bytes()
    for n in range(1, 301):
        (drawn / "MMVP Images" / f"{n}.jpg").write_bytes(picture)
    said, entry = scored(tmp_path / "run", load("mmvp", drawn), capsys)
    assert entry["not_published_set"] == "drawn by the embedded world"
    assert "72.0" not in said and "MMVP" not in said and "mini-mmvp" in said


def blink(**changes: Any) -> dict[str, Any]:
    facts = {"path": "BLINK", "format": "blink", "questions": 697, "tasks": list(PAPER), "missing_tasks": []}
    rows = {"task_rows": {task: ROWS[task] for task in PAPER}, "world": False, "limit": None}
    return facts | rows | changes


def test_rows_subtasks_and_layout_decide() -> None:
    assert differs("blink", blink()) == ""
    moved = {task: ROWS[task] for task in PAPER} | {"Counting": 119, "Jigsaw": 151}
    for changes in (
        {"format": "jsonl"},
        {"questions": 696},
        {"limit": 697},
        {"world": True},
        {"tasks": list(ROWS), "questions": 1901},
        {"tasks": ["Counting"], "questions": 120},
        {"missing_tasks": ["Jigsaw"]},
        {"task_rows": moved},
    ):
        assert differs("blink", blink(**changes)), changes
    for name in ("mini-blink", "mine", "BLINK.jsonl"):
        assert differs(name, blink())


def test_the_papers_mme_number_is_over_the_lite_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows, there in (("mme-realworld", 23_609, False), ("mme-realworld-lite", 1_919, True)):
        run = tmp_path / name
        run.mkdir()
        row = {"bench": name, "question": "1", "condition": "own", "latents": 0, "seed": 0, "answer": "A"}
        (run / "predictions.jsonl").write_text(
            json.dumps(row | {"text": "A", "extracted": "A", "correct": True}) + "\n"
        )
        facts = {"path": "x", "format": "mme-realworld", "questions": rows, "tasks": [], "limit": None}
        record = {"responder": {"latents": 0}, "benches": {name: facts}, "sets": {name: {"world": False}}}
        (run / "eval.json").write_text(json.dumps(record))
        assert main(["score", str(run), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
        assert ("52.2" in capsys.readouterr().out) == there


@pytest.mark.parametrize("part", [None, "hrbench-8k"])
def test_the_papers_mean_needs_all_five_published_sets(
    part: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {
        name: {"format": form, "questions": rows, "tasks": [], "limit": None}
        for name, form, rows in (
            ("mmvp", "mmvp", 300),
            ("hrbench-4k", "hr-bench", 800),
            ("hrbench-8k", "hr-bench", 800),
            ("mme-realworld-lite", "mme-realworld", 1_919),
        )
    } | {"blink": blink()}
    if part is not None:
        facts[part]["limit"] = 800
    row = {"question": "1", "condition": "own", "latents": 0, "seed": 0, "answer": "A"}
    row |= {"text": "A", "extracted": "A", "correct": True, "task": "Counting", "cycle": "0", "category": "single"}
    lines = [json.dumps({"bench": name} | row) + "\n" for name in facts]
    (tmp_path / "predictions.jsonl").write_text("".join(lines))
    record = {"responder": {"latents": 0}, "benches": facts, "sets": {name: {"world": False} for name in facts}}
    (tmp_path / "eval.json").write_text(json.dumps(record))
    assert main(["score", str(tmp_path), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
    mean = benchmark_row("ReaLVR@Qwen2.5-VL-7B").values["average"][0]
    lines = [line for line in (tmp_path / "summary.csv").read_text().splitlines() if "published" in line]
    assert any(line.startswith("five-task mean") and f",{mean:.1f}," in line for line in lines) == (part is None)
    assert len(lines) == (6 if part is None else 4)
    assert "Score" in capsys.readouterr().out


def test_runs_of_earlier_versions_get_todays_names(world: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    """Their records call the world's files as they were given, and say nothing about where questions come from."""
    run = tmp_path / "old"
    questions = load("mini-mmvp", world["mmvp"])
    evaluate(Constant("<answer>A</answer>"), [questions], run)
    for name in ("eval.json", "predictions.jsonl"):
        (run / name).write_text((run / name).read_text().replace("mini-mmvp", "mmvp"))
    record = json.loads((run / "eval.json").read_text())
    record.pop("sets")
    record["settings"]["conditions"] = record["settings"]["conditions"][:-1]
    (run / "eval.json").write_text(json.dumps(record))
    assert main(["score", str(run)]) == 0
    assert list(json.loads((run / "summary.json").read_text())["benches"]) == ["mini-mmvp"]
    with pytest.raises(UserError, match="holds an evaluation of mmvp, which is called mini-mmvp now"):
        evaluate(Constant("<answer>A</answer>"), [questions], run)
    facts = {**record["benches"]["mmvp"], "questions": 300, "path": str(whole)}
    assert differs("mmvp", facts) == ""  # the files are there and no drawings
    assert "does not say" in differs("mmvp", facts | {"path": str(tmp_path / "gone")})


def test_an_unfinished_run_gets_conditions_that_were_added_since(whole: Path, tmp_path: Path) -> None:
    questions = load("mmvp", whole, limit=6)
    evaluate(Constant("<answer>A</answer>"), [questions], tmp_path)
    rows = (tmp_path / "predictions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "predictions.jsonl").write_text("".join(row for row in rows if '"noise"' not in row))
    record = json.loads((tmp_path / "eval.json").read_text())
    record.pop("sets")
    record["settings"]["conditions"].remove("noise@3")
    (tmp_path / "eval.json").write_text(json.dumps(record))
    again = Constant("<answer>A</answer>")
    evaluate(again, [questions], tmp_path)
    assert again.answers == 6 and (tmp_path / "predictions.jsonl").read_text().count('"noise"') == 6
    record = json.loads((tmp_path / "eval.json").read_text())
    assert "noise@3" in record["settings"]["conditions"] and record["sets"]["mmvp"]["world"] is False
