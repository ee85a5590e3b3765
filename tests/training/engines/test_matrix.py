"""Every engine on two real ranks trains what one process trains: losses, norms, rewards and the exported model.

Dense models in float64, so that the order of sums over ranks does not matter: every number of every step agrees to 1e-6
of its size, the models to 1e-6 of what training changed. Experts and DeepSpeed can be float32 at most: 1e-3 and 1e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stage_runs
from engine_runs import (
    LORA,
    STAGE_ONE,
    STAGE_TWO,
    assert_ranks,
    assert_same_model,
    assert_same_steps,
    both,
    engine_file,
    reference,
    train,
)
from stage_runs import configure

ENGINES = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel", "Parameter"),
    "fsdp2": ("FSDP", "FSDPStep", "DTensor"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine", "ZeRO-3 slice"),
}
"""Distributed type, type of the wrapped module, type of the trained parameters."""
TOLERANCE = {"float64": (1e-6, 1e-6), "float32": (1e-3, 1e-2)}
"""How far steps and models may be apart."""


def dtype(engine: str, kind: str) -> str:
    """The widest type in which the engine trains the model."""
    return "float32" if kind == "moe" or engine == "zero3" else "float64"


LOCKSTEP = ("fsdp2", "moe")
"""Where ranks roll out in step; otherwise they gather the model. DeepSpeed takes long for it, with experts above all:
`test_sharded.py` has it with a dense model."""


def check(
    one: Path, two: Path, start: Path, engine: str, kind: str, lora: object = None, processes: int = 2, width: str = ""
) -> None:
    """The engine that was asked for ran, and both runs are the same."""
    distributed_type, wrapped, parameters = ENGINES[engine]
    for rank in assert_ranks(two, processes, distributed_type, wrapped):
        kinds = rank["parameters"]
        assert parameters in kinds["trained"] | kinds["frozen"], kinds
        assert lora or set(kinds["trained"]) == {parameters}, kinds  # adapters may be whole on every rank
    steps, model = TOLERANCE[width or dtype(engine, kind)]
    assert_same_steps(one, two, rel=steps, abs=steps / 1e3)
    assert_same_model(one, two, start, tolerance=model)


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
    changes = STAGE_TWO | {"model": {"dtype": dtype(engine, kind)}} | ({"lora": lora} if lora else {})
    launcher = "realvr" if (engine, kind) == ("fsdp2", "dense") else ""  # `test_sharded.py` has it with the others
    file = engine_of(engine, kind, tmp_path)
    one, two = both("rl", models(kind), eight, tmp_path, engine=file, launcher=launcher, **changes)
    check(one, two, models(kind), engine, kind, lora)


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(("kind", "lora"), [("dense", LORA), ("moe", None)], ids=["dense lora", "moe full"])
def test_stage_two_the_other_way_round(
    kind: str, lora: dict[str, Any] | None, engine: str, models: Callable[[str], Path], eight: Path, tmp_path: Path
) -> None:
    """With a KL to the start, two updates on each batch of rollouts, and layers that are recomputed. Experts
    once on more ranks than there are experts."""
    processes = 4 if (engine, kind) == ("fsdp2", "moe") else 2
    changes = STAGE_TWO | {"model": {"dtype": dtype(engine, kind)}} | ({"lora": lora} if lora else {})
    changes |= {
        "beta": 0.05,
        "updates_per_rollout": 2,
        "memory": "checkpointed",
        "optim": {"steps": 4, "microbatch": 1},
    }
    file = engine_of(engine, kind, tmp_path)
    one, two = both("rl", models(kind), eight, tmp_path, engine=file, processes=processes, **changes)
    check(one, two, models(kind), engine, kind, lora, processes=processes)


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
    """Each rank packs its own share, so that one process would pack other rows: two ranks under DDP stand for it, which
    `test_stage_processes.py` compares with the loss of all their rows. In float32, for all three engines."""
    changes = STAGE_ONE | {"model": {"dtype": "float32"}} | ({"lora": lora} if lora else {})
    for engine in ENGINES:
        raw = configure("sft", models(kind), eight, tmp_path / engine, **changes)
        if engine == "ddp":
            reference("sft", raw)
        else:
            train("sft", raw, processes=2, engine=engine_of(engine, kind, tmp_path))
        check(tmp_path / "ddp", tmp_path / engine, models(kind), engine, kind, lora, width="float32")
