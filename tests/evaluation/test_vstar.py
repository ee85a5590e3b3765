"""V*: from its files to a score with both categories, beside the five-task mean and not in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from eval_cases import Speaker, lines
from realvr.cli import main
from realvr.data.export import write
from realvr.data.reading import read
from realvr.data.sample import ImageRef, Sample
from realvr.evaluation.benchmark import title
from realvr.evaluation.questions import load
from realvr.evaluation.records import Prediction
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.evaluation.scoring import summarise
from realvr.evaluation.tasks.blink import Blink
from realvr.evaluation.tasks.vstar import VStar


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    small = ["--size", "128", "--resize-pixels", "16384", "--patch", "14", "--count", "10", "--workers", "1"]
    assert main(["world", "make", str(root), "--split", "vstar", *small]) == 0
    return root / "vstar"


def test_the_worlds_stand_in_is_asked_and_scored_per_category(world: Path, tmp_path: Path) -> None:
    questions = load("vstar", world)  # the folder stands for test_questions.jsonl
    assert (questions.bench, questions.format, len(questions)) == ("mini-vstar", "vstar", 10)
    wrong = {sample.id for sample in questions.samples if sample.category == "relative_position"}
    answers = {sample.id: sample.answer for sample in questions.samples}

    class Sighted(Speaker):
        def say(self, request):
            letter = answers[request.sample.id]
            return f"<answer>{'AB'[letter == 'A'] if request.sample.id in wrong else letter}</answer>"

    summary = evaluate(Sighted(), [questions], tmp_path / "run", EvalSettings(latents=(0, 2)))
    entry = summary["benches"]["mini-vstar"]
    assert entry["headline"] == 60.0 and entry["metric"] == "accuracy"
    assert entry["metrics"] == {
        "accuracy": 60.0,
        "categories": {
            "direct_attributes": {"accuracy": 100.0, "n": 6},
            "relative_position": {"accuracy": 0.0, "n": 4},
        },
    }
    assert "five_task_mean" not in summary
    asked = [row for row in lines(tmp_path / "run") if row["condition"] == "own"]
    assert {row["category"] for row in asked} == {"direct_attributes", "relative_position"}


def test_the_published_layout_is_called_by_its_name(tmp_path: Path) -> None:
    pictures = [ImageRef.from_image(f"{shade}.png", Image.new("RGB", (20, 20), (shade, 0, 0))) for shade in (10, 200)]
    samples = [
        Sample.ask(str(k), [picture], "Which?", "B", choices=["x", "y"], category="relative_position")
        for k, picture in enumerate(pictures)
    ]
    for name in ("vstar.jsonl", "vstar.parquet"):
        write(samples, "vstar", tmp_path / name)
        questions = load("vstar", tmp_path / name)
        assert questions.bench == "vstar" and [s.content() for s in questions.samples] == [s.content() for s in samples]
    assert VStar.facts.rows == 191 and title("vstar") == "V*"


def test_v_star_stays_out_of_the_five_task_mean() -> None:
    names = ("mmvp", "blink", "hrbench-4k", "hrbench-8k", "mme-realworld-lite", "vstar")

    def rows(wrong: str) -> list[Prediction]:
        return [
            Prediction(bench=name, question=f"{name}{n}", answer="A", choices=["x", "y"], extracted="A", seed=0,
                       correct=name != wrong, policy="strict", task="t", category="c", latents=8, condition="own")
            for name in names
            for n in range(4)
        ]  # fmt: skip

    assert summarise(rows("vstar"), resamples=50)["five_task_mean"]["own"]["mean"] == 100.0
    assert summarise(rows("mmvp"), resamples=50)["five_task_mean"]["own"]["mean"] == 80.0


def test_labels_of_a_subtask_are_recorded(tmp_path: Path) -> None:
    """Two versions of BLINK that differ in one label of one subtask differ in that subtask's hash alone."""
    root = tmp_path / "world"
    make = ["world", "make", str(root), "--split", "blink", "--size", "48", "--count", "10", "--workers", "1"]
    assert main(make) == 0
    samples = list(read(root / "blink" / "BLINK"))
    corrected = [
        replace(s, answer="AB"[s.answer == "A"]) if s.task == "Relative_Reflectance" and s.id.endswith("_1") else s
        for s in samples
    ]
    shutil.rmtree(root)
    write(samples, "blink", tmp_path / "old")
    write(corrected, "blink", tmp_path / "new")
    old, new = (load("blink", tmp_path / name).set_facts()["labels"] for name in ("old", "new"))
    assert set(old) == set(new) == set(Blink.facts.tasks)
    assert {task for task in old if old[task] != new[task]} == {"Relative_Reflectance"}
    json.dumps(old)
