"""Small data and a small trained model, made once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import stage_runs
from stage_runs import configure, with_markers, world, write


@pytest.fixture(scope="session")
def plain(build_tiny: Callable[[str], Path]) -> Path:
    """A tiny model as released."""
    return build_tiny("qwen2.5-vl")


@pytest.fixture(scope="session")
def untrained(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with latent markers, otherwise untrained."""
    return with_markers(plain, tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four questions about four pictures."""
    return write(world(4), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def stage_one(plain: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished Stage-1 run of 20 steps on the four questions: its model answers in the right form, not always
    rightly. In float64, so that what follows from it does not hang on the rounding of one machine."""
    out = tmp_path_factory.mktemp("stage-one") / "run"
    optim = {"steps": 20, "lr": 5e-3, "batch": 2, "microbatch": 2}
    stage_runs.run("sft", configure("sft", plain, data, out, model={"dtype": "float64"}, pack_tokens=256, optim=optim))
    return out


@pytest.fixture(scope="session")
def trained(stage_one: Path) -> Path:
    """The model of that run."""
    return stage_one / "final"
