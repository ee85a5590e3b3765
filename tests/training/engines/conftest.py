"""Tiny models after a short Stage 1, and small data, made once per test process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import stage_runs
from stage_runs import configure, world, write


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight questions about eight pictures; two have no evidence boxes."""
    samples = [replace(sample, boxes=sample.boxes if number > 1 else []) for number, sample in enumerate(world(8))]
    return write(samples, tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="session")
def dense(trained: Path) -> Path:
    """A dense model that answers in the right form, not always rightly."""
    return trained


@pytest.fixture(scope="session")
def moe(build_tiny: Callable[[str], Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, likewise; in float32, because torch multiplies experts in no wider type. Three of them: no
    number of ranks in these tests divides that."""
    out = tmp_path_factory.mktemp("moe") / "run"
    optim = {"steps": 20, "lr": 5e-3, "batch": 2, "microbatch": 2}
    model = shutil.copytree(build_tiny("qwen3-vl-moe"), out.with_name("three"))
    fields = json.loads((model / "config.json").read_text())
    fields["text_config"]["num_experts"] = 3
    (model / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    stage_runs.run("sft", configure("sft", model, data, out, pack_tokens=256, optim=optim))
    return out / "final"


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """``dense`` or ``moe`` by name."""
    return lambda name: request.getfixturevalue(name)
