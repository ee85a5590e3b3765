"""Results of methods, diagnostics and benchmarks from outside the package: shown, or named with what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import realvr
from html_tree import Element, read
from realvr.cli import main
from realvr.training.records import METHOD, METHOD_FILE, Metric, about

TOY = Path(__file__).resolve().parents[1] / "toys" / "toy_diagnostic.py"
NORM = {"norm": {"mean": 3.25, "low": 3.0, "high": 3.5, "pairs": 40}}


def run(root: Path, name: str, metrics: list[dict[str, Any]], method: Any) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if method is not None:
        METHOD_FILE.dump(folder / METHOD, method)


def section(page: Path, id: str) -> Element:
    return next(one for one in read(page).all("section") if one.attributes["id"] == id)


def test_a_run_is_shown_under_the_titles_of_its_own_method(tmp_path: Path) -> None:
    steps = [{"step": n, "loss": 1.0 / n, "teacher/distance": 0.5 * n, "seconds": 6.0} for n in (1, 2, 3, 4)]
    shown: list[Metric] = [
        {"name": "teacher/distance", "title": "Distance to the teacher", "first": True, "last": True},
        {"name": "loss", "title": "Loss"},
    ]
    run(tmp_path, "ema", steps, about("rl", "ema-teacher", shown))
    run(tmp_path, "plain", [{"step": 1, "reward": 1.0, "loss": 2.0}], None)  # of a version without method.json
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    training = section(tmp_path / "out/index.html", "training")
    labels = [one.attributes["aria-label"] for one in training.all("svg", role="img")]
    assert "Distance to the teacher over training steps: ema from 0.5 to 2." in labels
    assert "Reward over training steps: plain from 1 to 1." in labels
    table = read(tmp_path / "out/index.html").table("Stage 2: reinforcement learning: mean of the last tenth")
    (row,) = [row for row in table[1:] if row[0] == "ema"]
    assert row[:3] == ["ema", "ema-teacher", "4"]
    assert row[table[0].index("Distance to the teacher")] == "2.000|1 of 4 steps"


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 1, "stage": "rl"}', '{"version": 9}'])
def test_a_damaged_description_of_a_method_is_named(content: str, tmp_path: Path, capsys: Any) -> None:
    run(tmp_path, "ema", [{"step": 1, "loss": 1.0}], None)
    (tmp_path / "ema" / METHOD).write_text(content)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{METHOD}: " in said and len(said.strip().splitlines()) == 1


def measured(root: Path) -> Path:
    folder = root / "model" / "norms"
    folder.mkdir(parents=True)
    settings = {"diagnostic": "span-norm", "model": {"path": "model"}, "data": "questions.jsonl", "power": 1.5}
    (folder / "span-norm.json").write_text(json.dumps(NORM | {"settings": settings}))
    (folder / "span-norm_settings.json").write_text(json.dumps(settings))
    return folder


def report(*args: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a plugin stays loaded where it was loaded."""
    environment = os.environ | {"PYTHONPATH": str(Path(realvr.__file__).parents[1])}
    command = [sys.executable, "-m", "realvr", "report", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_diagnostic_of_a_plugin_has_its_section_column_and_command(tmp_path: Path) -> None:
    folder = measured(tmp_path)
    done = report(tmp_path, "--out", tmp_path / "out", "--plugin", TOY)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "out/index.html"
    assert read(page).table("Norms")[1] == ["model/norms", "3.2500|[3.0000, 3.5000]"]
    overview = read(page).table("What the latents do")
    assert overview[1][overview[0].index("norm")] == "3.25|[3.00, 3.50]"
    command = f"realvr diagnose span-norm model questions.jsonl --power 1.5 --out {folder}"
    assert command in section(page, "provenance").text()


def test_without_the_plugin_a_notice_names_the_folder_and_the_flag(tmp_path: Path, capsys: Any) -> None:
    folder = measured(tmp_path)
    notice = f"{folder} holds results of diagnostic span-norm, which is not known here; add --plugin FILE.py"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2  # there is nothing else
    assert notice in capsys.readouterr().err
    run(tmp_path, "ema", [{"step": 1, "loss": 1.0}], None)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert notice in section(tmp_path / "out/index.html", "overview").text()


def test_scores_of_an_unknown_rule_stand_and_are_not_compared(tmp_path: Path) -> None:
    """As a plugin's benchmark leaves them: the number of the file is shown; its difference would be another number."""
    for name, right in (("first", 6), ("second", 9)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = [
            {"bench": bench, "question": str(n), "condition": "own", "latents": 0, "seed": 0, "answer": "A"}
            | {"choices": ["x", "y"], "text": f"<answer>{'A' if n < right else 'B'}</answer>", "correct": n < right}
            | {"extracted": "A" if n < right else "B"}
            for bench in ("odd", "even")
            for n in range(10)
        ]
        (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["score", str(folder)]) == 0
        summary = json.loads((folder / "summary.json").read_text())
        summary["benches"]["odd"] |= {"metric": "mean over shades", "headline": 12.5}
        (folder / "summary.json").write_text(json.dumps(summary))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    scores = tree.table("Benchmark scores, %")
    assert [row[scores[0].index("odd")].split("|")[0].rstrip("†") for row in scores[1:]] == ["12.5", "12.5"]
    table = tree.table("Difference from first")
    assert table[1][table[0].index("odd")] == "–" and table[1][table[0].index("even")].startswith("+30.0")
    said = section(tmp_path / "out/index.html", "overview").text()
    assert "McNemar's exact test" in said  # of questions of one's own too
    assert "the scoring rule of odd is not loaded" in said and "--plugin FILE.py" in said
