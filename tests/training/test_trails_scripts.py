"""The scripts of the trails study: what they compute from predictions and records of runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_arms_are_paired_over_seeds_and_questions() -> None:
    """Two seeds, three questions; by hand. The start has no seed and stands beside both."""
    stage2 = script("trails_stage2")
    arrows = {"a": 1, "b": 5, "c": 6}
    right = {
        "stage-1": {None: {"a": True, "b": False, "c": False}},
        "lvr-rl": {1: {"a": True, "b": False, "c": True}, 2: {"a": True, "b": False, "c": False}},
        "realvr": {2: {"a": False, "b": True, "c": True}, 1: {"a": True, "b": True, "c": True}},
    }
    found = stage2.summarise(right, arrows, 4, [("realvr", "lvr-rl"), ("realvr", "stage-1"), ("realvr", "absent")])
    assert {name: cell["value"] for name, cell in found["arms"]["realvr"].items()} == {
        "1": 50, "5": 100, "6": 100, "short": 50, "long": 100, "all": pytest.approx(500 / 6),
    }  # fmt: skip
    assert list(found["differences"]) == ["realvr - lvr-rl", "realvr - stage-1"]
    difference = found["differences"]["realvr - lvr-rl"]
    assert difference["long"]["value"] == pytest.approx(75) and difference["short"]["value"] == pytest.approx(-50)
    assert (difference["long"]["seeds"], difference["long"]["n"]) == (2, 2)
    assert found["differences"]["realvr - stage-1"]["long"]["value"] == pytest.approx(100)
    text = stage2.markdown(found | {"recorded": {}})
    assert "| realvr - lvr-rl | 2 | -50.0 [-100.0, +0.0] | +75.0 " in text and "| 1–4 | over 4 | all |" in text


def test_the_interval_draws_seeds_and_questions() -> None:
    """Against all equally likely draws of two seeds and three questions, one after the other."""
    values = np.array([[1.0, 0.0, 2.0], [5.0, 4.0, 9.0]])
    means = [
        np.mean([values[s, q] for s in seeds for q in questions])
        for seeds in itertools.product(range(2), repeat=2)
        for questions in itertools.product(range(3), repeat=3)
    ]
    low, high = script("trails_stage2").interval(values, np.random.default_rng(1))
    assert low == pytest.approx(np.percentile(means, 2.5), abs=0.35)
    assert high == pytest.approx(np.percentile(means, 97.5), abs=0.35)


def test_curves_add_up_what_was_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hand-written records, validated after steps 2 and 3, as one seed and as two."""
    curves = script("trails_curves")
    (tmp_path / "model").mkdir()
    shapes = {"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4), "model.layers.0.w": (4, 4)}
    shapes["vision_tower.w"] = (100, 4)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model" / "model.safetensors")
    config = {"text_config": {"num_attention_heads": 2, "num_hidden_layers": 3, "hidden_size": 4}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    size = curves.model_size(tmp_path / "model")
    assert size == {"parameters": 40 + 16, "layers": 3, "attention_width": 4}
    tied = curves.flops(100, 10, size)
    assert tied == 100 * 6 * 56 + sum(3 * 4 * 12 * 5 for _ in range(100))  # each token: 12 flops x width x 5 others
    (tmp_path / "run").mkdir()
    steps = [
        {"step": 1, "tokens": 100, "data/examples_per_rank": 10},
        {"step": 2, "tokens": 50, "data/examples_per_rank": 5, "validation/accuracy": 0.25}
        | {"validation/accuracy/arrows=2": 0.5, "validation/accuracy/arrows=10": 0.0},
        {"step": 3, "tokens": 100, "data/examples_per_rank": 10, "validation/accuracy": 0.75}
        | {"validation/accuracy/arrows=2": 1.0, "validation/accuracy/arrows=10": 0.5},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "run" / "settings.yaml").write_text("run: {seed: 7}\nvalidation: {n: 4}\n")
    arguments = ["out/c.json", "A=run", "B=run,run", "--model", "model"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trails_curves.py", *arguments])
    curves.main()
    found = json.loads((tmp_path / "out" / "c.json").read_text())["curves"]
    assert [len(found[name]) for name in ("A", "B")] == [1, 2]
    one = found["A"][0]
    assert one["step"] == [2, 3] and one["accuracy"] == [25, 75] and one["tokens"] == [150, 250]
    assert one["flops"] == pytest.approx([1.5 * tied, 2.5 * tied]) and one["examples"] == [15, 25]
    assert one["arrows"] == {"2": [50, 100], "10": [0, 50]} and list(one["arrows"]) == ["2", "10"]
    assert (one["seed"], one["questions"]) == (7, 4)
    if importlib.util.find_spec("matplotlib"):
        with Image.open(tmp_path / "out" / "c.png") as figure:
            assert figure.width > 500


@pytest.mark.slow
def test_stage_2_on_trails_from_start_to_table(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "trails_stage2.py", tmp_path / "out", "--model", "mini"]
    command += ["--seeds", "1", "--arms", "lvr-rl", "slots=--method realvr --evidence-boxes per-slot"]
    command += ["--rows", "16", "--questions", "14", "--jobs", "1", "--batch", "14", "--device", "cpu"]
    command += ["--train", "--optim.steps 1 --optim.batch 4 --optim.microbatch 4"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| slots - lvr-rl | 1 |" in done.stdout and "| stage-1 | 1 |" in done.stdout
    before = (tmp_path / "out" / "slots" / "1" / "train" / "metrics.jsonl").stat().st_mtime_ns
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout
    assert (tmp_path / "out" / "slots" / "1" / "train" / "metrics.jsonl").stat().st_mtime_ns == before
