"""The tutorials as a reader follows them: every command of a page, in order, in an empty folder, made short."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from forked import Forked
from stage_runs import environment

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHORT = {"train sft": ["--optim.steps", "2"], "train rl": ["--optim.steps", "2"], "eval": ["--limit", "8"]}
SHORT |= {name: ["--limit", "4"] for name in ("counterfactual", "exchange", "steer")}
SHORT |= {"diagnose grounding": ["--limit", "4"], "diagnose walk": ["--limit", "4"]}
SHORT |= {"diagnose cases": ["--examine", "2", "--cases", "2", "--steered", "1"]}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def shortened(line: str) -> list[str]:
    """The words of a command, with fewer rows, steps and questions."""
    words = shlex.split(re.sub(r"--count \d+", "--count 32", line), comments=True)
    if words[0] != "realvr":
        return words
    more = SHORT.get(" ".join(words[1:3]), SHORT.get(words[1], []))
    return [sys.executable, "-m", "realvr", *words[1:], *more]


def run(line: str, folder: Path) -> Forked:
    """One command, shortened, in a folder."""
    process = Forked.of(shortened(line), home=folder, environment=environment())
    process.wait(600)
    return process


def follow(page: str, folder: Path) -> None:
    for text in blocks(page, "python"):
        (name,) = re.findall(r'^"""(\w+\.py):', text)
        (folder / name).write_text(text)
    commands = [line for block in blocks(page, "console") for line in block.splitlines()]
    assert len(commands) >= 4
    for line in commands:
        done = run(line, folder)
        assert done.code == 0, f"{page}: {line}\n{done.out.read_text()[-2000:]}{done.said[-2000:]}"


@pytest.mark.slow
def test_your_own_data(tmp_path: Path) -> None:
    follow("tutorial_data.md", tmp_path)
    assert (tmp_path / "runs/report/index.html").is_file()
    assert (tmp_path / "runs/rl/final/config.json").is_file()


@pytest.mark.slow
def test_a_method_of_your_own(tmp_path: Path) -> None:
    follow("tutorial_method.md", tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/steady/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["loss/steady"] > 0 for step in steps)
    for step in steps:  # the term is in the loss, with the weight that the command gives it
        parts = step["loss/policy"] + 0.2 * step["loss/evidence"] + 0.3 * step["loss/steady"]
        assert step["loss"] == pytest.approx(parts, rel=1e-4, abs=1e-5)
    shutil.rmtree(tmp_path / "runs/high-floor")
    line = blocks("tutorial_method.md", "console")[0].splitlines()[1]
    done = run(f"{line} --eta 0.3", tmp_path)
    assert done.code == 2 and "eta" in done.said, "what defines the method cannot be changed"


@pytest.mark.slow
def test_reading_the_diagnostics(tmp_path: Path) -> None:
    follow("tutorial_diagnostics.md", tmp_path)
    page = (tmp_path / "runs/report/index.html").read_text()
    for name in ("counterfactual", "exchange", "grounding", "walk", "steer", "cases"):
        assert list((tmp_path / "runs").glob(f"*/{name}.json")) and f'id="{name}"' in page, name
