"""The real lmms-eval on a local task with the packaged model, as the documentation writes it, beside `realvr eval`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import realvr
from eval_cases import lines
from optional import lacking

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-lmms"
CONDITIONS = {
    "runs/lmms/own": ("own", 8),
    "runs/lmms/noise": ("noise", 8),
    "asked/none": ("own", 0),
    "asked/mean": ("mean", 8),
    "asked/other": ("other", 8),
}
"""Folders of lmms-eval's output, and how predictions.jsonl of `realvr eval` calls what was asked; the first two are
documented."""
ROUNDS = "include: trails.yaml\ntask: rounds\noutput_type: generate_until_multi_round\n"


@dataclass(frozen=True)
class Ran:
    """A folder in which the documented commands were given."""

    place: Path
    log: str

    def replies(self, name: str) -> list[str]:
        (file,) = (self.place / name).rglob("*_samples_trails.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        return [row["filtered_resps"] for row in rows]

    def score(self, name: str) -> float:
        (file,) = (self.place / name).rglob("*_results.json")
        return json.loads(file.read_text())["results"]["trails"]["accuracy,none"]


def section() -> str:
    """What the documentation says about lmms-eval."""
    return (ROOT / "docs" / "evaluation.md").read_text().partition("\n## In lmms-eval and VLMEvalKit\n")[2]


def settings(command: str) -> dict[str, Any]:
    """A documented command as an entry of lmms-eval's --config, so that one process can run several."""
    words = shlex.split(command)[1:]
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    ends = [*flags[1:], len(words)]
    return {words[a][2:]: words[a + 1] if b - a == 2 else True for a, b in zip(flags, ends, strict=True)}


def run(place: Path, *command: str) -> str:
    """Give a command in a folder, with nothing but the local disk to read from."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(realvr.__file__).parents[1]),
        "HF_HOME": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(command, cwd=place, env=environment, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def known_tasks() -> set[str]:
    """Names of tasks and groups that come with lmms-eval."""
    (folder,) = ENVIRONMENT.glob("lib/python*/site-packages/lmms_eval/tasks")
    texts = (file.read_text() for file in folder.rglob("*yaml"))
    return {name for text in texts for name in re.findall(r"^(?:task|group): *[\"']?([\w-]+)", text, re.MULTILINE)}


def give_commands(place: Path) -> Ran:
    """Everything the documentation says, and more of lmms-eval, in one process: it takes its time to start."""
    for name, text in re.findall(r"^```\w+\n# (tasks/\S+)\n(.*?)^```", section(), re.MULTILINE | re.DOTALL):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "tasks" / "rounds.yaml").write_text(ROUNDS)
    for command in re.findall(r"^    realvr (.*)$", section(), re.MULTILINE):
        run(place, sys.executable, "-m", "realvr", *shlex.split(command))
    commands = [settings(command) for command in re.findall(r"^    (lmms-eval .*)$", section(), re.MULTILINE)]
    documented = [entry for entry in commands if "include_path" in entry]
    hub = {task for entry in commands if entry not in documented for task in entry["tasks"].split(",")}
    assert hub and hub <= known_tasks(), "tasks that read from the hub are not run here, but they exist"

    def entry(name: str, arguments: str, **changes: Any) -> dict[str, Any]:
        return documented[0] | {"output_path": name, "model_args": f"pretrained=mini,{arguments}"} | changes

    entries = [
        *documented,
        *(
            entry(f"asked/{condition}", f"id_column=id,condition={condition}")
            for condition in ("none", "mean", "other")
        ),
        entry("cached/part", "condition=mean", use_cache="answers", limit=4),
        entry("cached/whole", "condition=mean", use_cache="answers"),
        entry("wrong/column", "id_column=name"),
        entry("wrong/rounds", "latents=4", tasks="rounds"),
    ]
    (place / "runs.json").write_text(json.dumps(entries))  # JSON is YAML
    return Ran(place, run(place, str(ENVIRONMENT / "bin" / "lmms-eval"), "--config", "runs.json"))


@pytest.mark.slow
def test_replies_and_scores_equal_those_of_realvr_eval(tmp_path: Path) -> None:
    """One test: the processes that share the suite would each run lmms-eval for a part of it."""
    if not (ENVIRONMENT / ".installed").is_file():
        lacking("lmms-eval is not installed in .venv-lmms (`make lmms` installs it)")
    ran = give_commands(tmp_path)
    for name, condition in CONDITIONS.items():
        found = lines(tmp_path / "runs" / "trails")
        rows = [row for row in found if (row["condition"], row["latents"]) == condition]
        assert [row["question"] for row in rows] == [f"trails-{number}" for number in range(12)]
        assert ran.replies(name) == [row["text"].strip() for row in rows], name  # lmms-eval strips what it keeps
        assert ran.score(name) == sum(row["correct"] for row in rows) / 12, name
    assert len({tuple(ran.replies(name)) for name in CONDITIONS}) == len(CONDITIONS), "conditions are told apart"
    summary = json.loads((tmp_path / "runs" / "trails" / "summary.json").read_text())
    assert ran.score("runs/lmms/own") * 100 == pytest.approx(summary["benches"]["mini-trails"]["headline"])
    refused(ran)


def refused(ran: Ran) -> None:
    """What cannot be asked is named in one line, and leaves no score behind."""
    for line in (
        "trails: condition=mean needs the latents of all 12 questions, and some were answered from a response cache",
        "id_column=name: trails has no such column; it has id, images, question",
        "rounds asks in several rounds (generate_until_multi_round): models of realvr answer tasks of the type",
    ):
        assert f"Error during evaluation: {line}" in ran.log
    assert len(ran.replies("cached/part")) == 4
    for name in ("cached/whole", "wrong/column", "wrong/rounds"):
        assert not list((ran.place / name).rglob("*_results.json"))
