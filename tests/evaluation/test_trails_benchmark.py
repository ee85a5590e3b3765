"""Trails as a benchmark: from a file of tagged questions to a score by number of arrows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from eval_cases import Speaker
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import LETTERS, ImageRef, Sample
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.evaluation.questions import load
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.world.splits import SPLITS

COLORS = ["red", "blue", "green", "orange"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """200 questions tagged as the world tags them: 1 to 10 arrows in turn, two kinds."""
    made = []
    for number in range(200):
        picture = ImageRef.from_image(f"{number}.png", Image.new("RGB", (8, 8), (number, 0, 0)))
        tags = {"kind": "end" if number // 10 % 2 else "turn", "arrows": str(1 + number % 10)}
        answer = LETTERS[number % 4]
        made.append(Sample.ask(str(number), [picture], "Where does it end?", answer, choices=COLORS, tags=tags))
    write(made, "jsonl", tmp_path / "trails" / "samples.jsonl")
    return tmp_path / "trails"


def test_accuracy_is_given_by_number_of_arrows(questions: Path, tmp_path: Path) -> None:
    asked = load("trails", questions)  # the folder stands for samples.jsonl
    assert (asked.bench, asked.format, len(asked)) == ("trails", "jsonl", 200)

    class UpToNine(Speaker):
        def say(self, request):
            right = int(request.sample.tags["arrows"]) < 10
            return f"<answer>{request.sample.answer if right else 'Z'}</answer>"

    summary = evaluate(UpToNine(), [asked], tmp_path / "run", EvalSettings(latents=(0, 2)))
    entry = summary["benches"]["trails"]
    assert entry["headline"] == 90.0
    arrows = entry["metrics"]["arrows"]
    assert list(arrows) == [str(n) for n in range(1, 11)]  # 10 comes last
    assert arrows["10"] == {"accuracy": 0.0, "n": 20} and arrows["9"] == {"accuracy": 100.0, "n": 20}
    assert {kind: part["n"] for kind, part in entry["metrics"]["kinds"].items()} == {"end": 100, "turn": 100}
    assert "five_task_mean" not in summary


def test_a_limit_takes_equally_many_of_each_number(questions: Path) -> None:
    """Numbers of arrows come in turn: every tenth question of the file would always have the same one."""
    for limit in (20, 40, 50):
        found = Counter(sample.tags["arrows"] for sample in load("trails", questions, limit=limit).samples)
        assert len(found) == 10 and max(found.values()) - min(found.values()) <= 1


def test_the_worlds_trails_are_asked_under_their_name(tmp_path: Path) -> None:
    assert main(["world", "make", str(tmp_path), "--split", "trails", "--count", "14", "--workers", "1"]) == 0
    asked = load("trails", tmp_path / "trails")
    assert (asked.bench, len(asked)) == ("mini-trails", 14)
    assert all({"kind", "arrows"} <= sample.tags.keys() for sample in asked.samples)
    assert BENCHMARKS.get("trails").facts.rows == SPLITS["trails"].count
