"""Every engine on two real ranks trains what one process trains: losses, norms, rewards and the exported model.

Dense models in float64, so that the order of sums over ranks does not matter: every number of every step agrees to 1e-6
of its size, the models to 1e-6 of what training changed. Experts and DeepSpeed can be float32 at most: 1e-3 of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import stage_runs
from engine_runs import (
    LORA,
    PER_RANK,
    STAGE_ONE,
    STAGE_TWO,
    TWO_LANES,
    assert_ranks,
    assert_same_model,
    assert_same_steps,
    assert_uneven,
    both,
    engine_file,
    facts,
    train,
)
from realvr.training.estimate import Setup, with_adapters
from realvr.training.estimate.peak import local
from stage_runs import configure

ENGINES = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel", "Parameter"),
    "fsdp2": ("FSDP", "FSDPStep", "DTensor"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine", "ZeRO-3 slice"),
}
"""Distributed type, type of the wrapped module, type of the trained parameters."""
TOLERANCE = {"float64": (1e-6, 1e-6), "float32": (1e-3, 1e-3)}
"""How far steps and models may be apart."""


def dtype(engine: str, kind: str) -> str:
    """The widest type in which the engine trains the model."""
    return "float32" if kind == "moe" or engine == "zero3" else "float64"


LOCKSTEP = ("fsdp2", "moe")
"""Where ranks roll out in step; otherwise they gather the model. DeepSpeed takes long for it, with experts above all:
`test_sharded.py` has it with a dense model."""


def check(
    one: Path,
    two: Path,
    start: Path,
    engine: str,
    kind: str,
    lora: object = None,
    processes: int = 2,
    width: str = "",
    without: tuple[str, ...] = (),
) -> None:
    """The engine that was asked for ran, and both runs are the same."""
    distributed_type, wrapped, parameters = ENGINES[engine]
    for rank in assert_ranks(two, processes, distributed_type, wrapped):
        kinds = rank["parameters"]
        assert parameters in kinds["trained"] | kinds["frozen"], kinds
        assert lora or set(kinds["trained"]) == {parameters}, kinds  # adapters may be whole on every rank
    steps, model = TOLERANCE[width or dtype(engine, kind)]
    assert_same_steps(one, two, rel=steps, abs=steps / 1e3, without=without)
    assert_same_model(one, two, start, tolerance=model)


SEED = {"dense": 30, "moe": 188}
"""With which the ranks of the first step have unequal work: all wrong answers are those of one rank, and the longest
completions differ. Experts are trained in float32, where other machines may round to another text: looser there."""


def stage_two(engine: str, kind: str, lora: object) -> dict[str, Any]:
    """Settings of Stage 2 that leave work uneven."""
    changes = STAGE_TWO | {"model": {"dtype": dtype(engine, kind)}, "run": {"seed": SEED[kind]}}
    return changes | ({"lora": lora} if lora else {})


def engine_of(name: str, kind: str, folder: Path) -> str | Path:
    return (
        name
        if name == "ddp"
        else engine_file(folder, type=name, rollout="lockstep" if (name, kind) == LOCKSTEP else "gather")
    )


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(("kind", "lora"), [("dense", None), ("moe", LORA)], ids=["dense full", "moe lora"])
def test_stage_two_with_evidence(
    kind: str, lora: dict[str, Any] | None, engine: str, models: Callable[[str], Path], eight: Path, tmp_path: Path
) -> None:
    """Work is uneven: completions end at different lengths, wrong answers differ in number, boxes are missing."""
    changes = stage_two(engine, kind, lora)
    launcher = "realvr" if (engine, kind) == ("fsdp2", "dense") else ""  # `test_sharded.py` has it with the others
    file = engine_of(engine, kind, tmp_path)
    one, two = both("rl", models(kind), eight, tmp_path, engine=file, launcher=launcher, **changes)
    check(one, two, models(kind), engine, kind, lora)
    assert_uneven(two, whole=kind == "dense")
    if engine == "fsdp2" and lora:
        _assert_adapters_whole(models(kind), two, lora)


def _assert_adapters_whole(model: Path, out: Path, lora: dict[str, Any]) -> None:
    """As the plan counts them; the engine cuts those of the last layer alone."""
    with torch.device("meta"):
        shape = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model))
    weights, setup = with_adapters(shape, lora["rank"], lora["targets"], markers=False), Setup("fsdp2", 2)
    most = sum(w.numel * w.count for w in weights if w.adapter) // shape.config.get_text_config().num_hidden_layers
    assert 0 <= sum(local(w, setup) for w in weights) - max(rank["numbers"] for rank in facts(out)) <= most


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(("kind", "lora"), [("dense", LORA), ("moe", None)], ids=["dense lora", "moe full"])
def test_stage_two_the_other_way_round(
    kind: str, lora: dict[str, Any] | None, engine: str, models: Callable[[str], Path], eight: Path, tmp_path: Path
) -> None:
    """With a KL to the start, two updates on each batch of rollouts, and layers that are recomputed. Experts
    once on more ranks than there are experts."""
    processes = 4 if (engine, kind) == ("fsdp2", "moe") else 2
    changes = stage_two(engine, kind, lora) | {
        "beta": 0.05,
        "updates_per_rollout": 2,
        "memory": "checkpointed",
        "optim": STAGE_TWO["optim"] | {"steps": 4},
    }
    file = engine_of(engine, kind, tmp_path)
    one, two = both("rl", models(kind), eight, tmp_path, engine=file, processes=processes, **changes)
    check(one, two, models(kind), engine, kind, lora, processes=processes)
    assert_uneven(two, processes, whole=kind == "dense")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_fused_layers(engine: str, models: Callable[[str], Path], eight: Path, tmp_path: Path) -> None:
    """Layers in fewer kernels, whose weights are gathered for each; beside one process with stock layers."""
    changes = STAGE_TWO | {"memory": "checkpointed-prefill"}
    stock, fused = tmp_path / "stock", tmp_path / "fused"
    raw = configure("rl", models("dense"), eight, fused, model={"dtype": "float32", "fused_layers": True}, **changes)
    train("rl", raw, processes=2, engine=engine_of(engine, "dense", tmp_path))
    stage_runs.run("rl", configure("rl", models("dense"), eight, stock, model={"dtype": "float32"}, **changes))
    check(stock, fused, models("dense"), engine, "dense", width="float32")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_stage_one(
    kind: str, lora: dict[str, Any] | None, models: Callable[[str], Path], eight: Path, tmp_path: Path
) -> None:
    """Each rank packs its own share: the one process packs the shares of both. In float32, for all three engines."""
    changes = STAGE_ONE | {"model": {"dtype": "float32"}} | ({"lora": lora} if lora else {})
    raw = configure("sft", models(kind), eight, tmp_path / "one", method={"type": "two-lanes"}, **changes)
    train("sft", raw, "--plugin", str(TWO_LANES), processes=1)
    for engine in ENGINES:
        raw = configure("sft", models(kind), eight, tmp_path / engine, **changes)
        train("sft", raw, processes=2, engine=engine_of(engine, kind, tmp_path))
        two = tmp_path / engine
        check(tmp_path / "one", two, models(kind), engine, kind, lora, width="float32", without=PER_RANK)
