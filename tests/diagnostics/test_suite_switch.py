"""Tests that need several questions on one picture, or labels: a kill, two processes, the same bytes. The other
diagnostics are in test_suite.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import outside
from optional import need_package
from outside import contents, records

TESTS = ("task-structure", "question-switch", "variation")


@pytest.mark.slow
def test_boards_with_several_questions_killed_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    need_package("sklearn")
    data = tmp_path / "data"
    world = ["world", "make", data, "--split", "trails", "--kinds", "switch", "--count", 8, "--workers", 1]
    outside.run(*world, plugin=None)
    args = ["diagnose", "mini", "--data", data / "trails" / "samples.jsonl", "--limit", 32, "--batch", 3]
    args += ["--device", "cpu", "--max-new", 16, "--tests", ",".join(TESTS), "--card"]
    args += ["--set", "task-structure.by=arrows", "task-structure.resamples=2"]
    outside.run(*args, "--out", tmp_path / "whole", plugin=None, seconds=600)
    cut = tmp_path / "cut"
    for share in (0.1, 0.6):  # the killed parent takes its processes along
        process = outside.start(*args, "--out", cut, "--processes", 2, plugin=None)
        process.until(lambda share=share: records(cut) > share * records(tmp_path / "whole"), 300)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was over before it was killed"
    outside.run(*args, "--out", cut, "--processes", 2, plugin=None, seconds=600)
    whole, found = contents(tmp_path / "whole"), contents(cut)
    outcomes = json.loads((tmp_path / "whole" / "diagnose.json").read_text())["tests"]
    assert {name: one["status"] for name, one in outcomes.items()} == dict.fromkeys(TESTS, "measured")
    assert set(found) == set(whole) and [name for name in whole if found[name] != whole[name]] == []

    def summary(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / "whole" / f"{name}.json").read_text())

    assert summary("variation")["questions"]["count"] == 8 and summary("variation")["examples"]["count"] == 32
    assert summary("question-switch")["pictures"] == 8 and summary("question-switch")["selection"]["pairs"] == 8
    structure = summary("task-structure")
    assert len(structure["classes"]) > 1 and structure["grouped"] and len(structure["representations"]) == 4
    card = (tmp_path / "whole" / "card.md").read_text()
    assert all(f"| {name} |" in card for name in TESTS)
