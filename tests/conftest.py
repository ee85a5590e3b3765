"""Small checkpoints of every family, built once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import DEVICE, DTYPE, load_stock
from realvr.backbone import FAMILIES, Backbone
from realvr.backbone.tiny import build

if DEVICE == "cpu":
    torch.set_num_threads(1)  # the models are tiny and pytest-xdist brings its own processes
torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def build_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the tiny checkpoint of a family, as released: without latent markers. Not to be written to."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = build(name, "tiny", root / name)
        return made[name]

    return get


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every family in turn."""
    return request.param


@pytest.fixture(scope="session")
def checkpoint(family: str, build_tiny: Callable[[str], Path]) -> Path:
    return build_tiny(family)


@pytest.fixture(scope="session")
def backbone(checkpoint: Path) -> Backbone:
    """The adapter over that checkpoint. Shared: a test that changes it uses ``fresh`` instead."""
    return Backbone.load(checkpoint, dtype=DTYPE, device=DEVICE)


@pytest.fixture
def fresh(checkpoint: Path) -> Backbone:
    """The same, for one test alone."""
    return Backbone.load(checkpoint, dtype=DTYPE, device=DEVICE)


@pytest.fixture(scope="session")
def saved(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``backbone.save`` writes: the same weights with the latent markers."""
    return backbone.save(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="session")
def stock(saved: Path) -> Any:
    """A plain transformers model of the saved directory, with eager attention everywhere."""
    return load_stock(saved)
