"""What a person sees of a training: completions with options and whole answers, and a batch before it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forked import forked
from realvr.training import memory
from realvr.training.sections import LogSettings
from realvr.training.tracking import Tracker
from verbs import Place

NAME = "the-very-long-name-of-a-thing-" + "x" * 90
LONG = "The left one, because " + "it is further away and " * 60 + f"so <answer>B. {NAME}"
ROW = {
    "sample": "s1",
    "question": "Which? " * 80 + "Choose one.",
    "options": ["the cube", NAME],
    "answer": "B",
    "completion": LONG + "</answer>",
    "reward": float("nan"),
}


def test_a_table_shows_options_and_never_cuts_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, LogSettings(tensorboard=False), steps=3) as tracker:
        tracker.table(1, [ROW])
    shown = capsys.readouterr().err
    cells = [re.split("[│┃]", line)[1:-1] for line in shown.splitlines() if "│" in line or "┃" in line]
    columns = ["".join(cell[place].strip() for cell in cells) for place in range(len(ROW))]
    assert all(column.startswith(name) for column, name in zip(columns, ROW, strict=True))
    texts = dict(zip(ROW, columns, strict=True))
    squeezed = {name: text.replace(" ", "") for name, text in texts.items()}
    assert squeezed["options"] == "optionsA.thecubeB." + NAME
    assert squeezed["answer"] == "answerB"
    assert squeezed["completion"].endswith(f"<answer>B.{NAME}</answer>")
    assert "…" in squeezed["completion"] and len(squeezed["completion"]) < 400
    (kept,) = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert kept == {"step": 1} | ROW | {"reward": None}  # the file has everything


@pytest.mark.parametrize("after", ["", " and so on" * 50])
def test_an_answer_longer_than_the_cell_stays_whole(
    after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"word{place}" for place in range(100))
    row = {"completion": "because " * 100 + f"<answer>{words}</answer>{after}"}
    with Tracker(tmp_path, LogSettings(tensorboard=False), steps=3) as tracker:
        tracker.table(1, [row])
    cells = [line.strip("│┃ ") for line in capsys.readouterr().err.splitlines() if line[:1] in "│┃"]
    shown = " ".join(cells)
    assert f"<answer>{words}</answer>" in shown and shown.count("…") == (2 if after else 1)


def test_a_table_uses_the_room_of_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns, which is what a pipe counts as, would break every answer and even a heading."""
    monkeypatch.delenv("COLUMNS", raising=False)
    row = {"sample": "world/train/15", "question": "What shape is the object at the bottom left?", "options": ["cube"]}
    row |= {"answer": "triangle", "completion": "<answer>triangle</answer>", "reward": 1.0, "group_mean": 0.5}
    with Tracker(tmp_path, LogSettings(tensorboard=False), steps=3) as tracker:
        tracker.table(1, [row])
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("group_mean", "<answer>triangle</answer>", "world/train/15"))


def test_stage_two_records_the_options(place: Place, tmp_path: Path) -> None:
    args = [*place.verbs["rl"].args(tmp_path / "run"), "--optim.steps", "1", "--log.table-every", "1"]
    assert forked(args, tmp_path).code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    samples = {row["id"]: row for row in map(json.loads, place.data.read_text().splitlines())}
    assert rows and all(row["options"] == samples[row["sample"]].get("choices", []) for row in rows)


@pytest.mark.parametrize("kind", ["sft", "rl", "base"])
def test_a_dry_run_sums_up_images(kind: str, place: Place, tmp_path: Path) -> None:
    done = forked([*place.verbs[kind].args(tmp_path / "run"), "--dry-run"], tmp_path)
    text = done.out.read_text()
    assert done.code == 0 and "images[0]" not in text, text
    found = re.findall(r"images: (\d+) images?, ([\d to]+) visual tokens each, ([\d,]+) in all; pixels (.*)", text)
    assert len(found) == 1 and int(found[0][0]) >= 2, text
    assert sum(int(count) for count in re.findall(r"(\d+) x float32", found[0][3])) == int(found[0][0])
    assert not (tmp_path / "run").exists()


def test_shapes_of_plain_tensors_stay() -> None:
    import torch

    found = dict(memory.shapes({"a": [torch.zeros(2, 3)], "b": torch.zeros(1, dtype=torch.bool)}))
    assert found == {"batch.a[0]": "float32 (2, 3)", "batch.b": "bool (1,)"}
