"""Small checkpoints of every family, built once per test process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

import reference
from helpers import DEVICE, DTYPE, load_stock
from pair import Pair, exact_pair
from realvr.backbone import FAMILIES, Backbone
from realvr.zoo.tiny import build

if DEVICE == "cpu":
    torch.set_num_threads(1)  # the models are tiny and pytest-xdist brings its own processes
torch.backends.cudnn.allow_tf32 = False


THREE = ("qwen2.5-vl", "gemma3", "qwen3-vl-moe")
FAST = {
    "backbone": THREE,
    "diagnostics": THREE[:2],
    "evaluation": THREE,
    "latent": THREE[:2],
    "training": ("qwen2.5-vl", "qwen3-vl-moe"),
}
"""Families in the fast suite, by folder of tests: rotary positions in three axes; sliding windows and two-way images;
deep visual features and experts. The slow suite has all five."""
SLOW_VERBS = ("base", "counterfactual", "exchange")
"""Verbs whose hard use is tried in the slow suite; that of the others is tried in the fast one."""
SLOW_FIXTURES = {"finished", "everything"}
"""A whole demo; every split of the world."""
TOGETHER = (
    "test_demo_run.py",
    "test_docs_site.py",
    "test_eval_models.py",
    "test_outside_benchmark.py",
    "test_outside_diagnostic.py",
    "test_splits.py",
    "test_wheel.py",
)
"""Files with a fixture that takes long to make: their slow tests run in one process, which makes it once."""


class OnceEach(LoadScopeScheduling):
    """Files of ``TOGETHER`` as one piece of work, the largest first; every other test alone."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return file if file.endswith(TOGETHER) else nodeid


def pytest_configure() -> None:
    """Some virtual machines announce AMX and forbid it: there torch's 16-bit products would end the process."""
    limit, facts = "ONEDNN_MAX_CPU_ISA", Path("/proc/cpuinfo")
    if limit in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if facts.exists() and "amx_bf16" in facts.read_text():
        product = "import torch; x = torch.ones(128, 128, dtype=torch.bfloat16); x @ x"
        if subprocess.run([sys.executable, "-c", product], capture_output=True).returncode < 0:
            os.environ[limit] = "AVX512_CORE_BF16"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OnceEach | None:
    return OnceEach(config, log) if config.option.markexpr == "slow" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        folder = item.path.parent.name
        fast = FAST.get(folder, ())
        if (
            (fast and params.get("family", fast[0]) not in fast)
            or (folder == "hard_use" and params.get("name") in SLOW_VERBS)
            or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        ):
            item.add_marker(pytest.mark.slow)


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
