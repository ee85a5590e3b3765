"""Small checkpoints of every family, built once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from helpers import DEVICE, DTYPE, load_stock
from pair import Pair, exact_pair
from realvr.backbone import FAMILIES, Backbone
from realvr.zoo.tiny import build

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


@pytest.fixture(scope="session")
def marked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, its markers with different embeddings: new ones all start at the mean, hiding a mix-up."""
    backbone = Backbone.load(checkpoint, dtype=torch.float32, device="cpu")
    markers = backbone.markers
    generator = torch.Generator().manual_seed(5)
    for weight in {
        id(w): w for w in (backbone.core.get_input_embeddings().weight, backbone.model.lm_head.weight)
    }.values():
        scale = float(weight.detach().std())
        with torch.no_grad():
            for token in (markers.start, markers.slot, markers.end):
                weight[token] = torch.randn(weight.shape[1], generator=generator) * scale
    return backbone.save(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="session")
def pair(marked: Path) -> Pair:
    """Ours and a stock model with eager attention, in the number format of the run. Shared: do not change it."""
    stock = reference.load(marked, DTYPE, "eager", DEVICE)
    return Pair(Backbone.load(marked, dtype=DTYPE, device=DEVICE), stock)


@pytest.fixture(scope="session")
def exact(marked: Path) -> Pair:
    """In float64, without the float32 islands of the stock code. Shared: do not change it."""
    return exact_pair(marked)


@pytest.fixture
def fresh_exact(marked: Path) -> Pair:
    """The same, for one test alone."""
    return exact_pair(marked)
