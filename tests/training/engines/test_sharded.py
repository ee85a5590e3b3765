"""Engines that shard, on two real ranks: runs that are killed, stopped, continued; what a rank holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from engine_runs import (
    DYING,
    STAGE_TWO,
    assert_rewarded,
    assert_same_model,
    assert_same_steps,
    checkpoints,
    engine_file,
    error_line,
    facts,
    reference,
    train,
)
from realvr.training.estimate import Setup, Weight, weights_of
from realvr.training.estimate.peak import held_bytes, local
from stage_runs import configure, lines, numbers

pytestmark = pytest.mark.slow
SHARDED = ("fsdp2", "zero3")
MODEL = {"fsdp2": "moe", "zero3": "dense"}


def files(folder: Path, engine: str, **either: Any) -> Path:
    folder.mkdir()
    return engine_file(folder, type=engine, **either)


NARROW = """
from pathlib import Path

import torch

from realvr.backbone import small_kernels
from realvr.training import adapter_kernels, low_rank
from realvr.training.methods.lvr_sft import LvrSft
from realvr.training.thin_lora import ThinLinear


def narrow(x, weight, scale=1.0):
    return (scale * x.float() @ weight)[None]


def widen(inner, weight, scale, base, keep=False):
    inner = inner.sum(0)
    return base.copy_(base.float() + scale * inner @ weight), inner if keep else None


def summed(inner, x, scale=1.0, turned=False):
    found = scale * inner.t() @ x.float()
    return found.t().contiguous() if turned else found


def watched(name):
    plain = getattr(low_rank, name)

    def used(*given):
        Path("{folder}", "used-" + name).touch()
        return plain(*given)

    setattr(low_rank, name, used)


watched("low_rank"), watched("adapted")
small_kernels.FEW = 1
adapter_kernels.narrow, adapter_kernels.widen, adapter_kernels.summed = narrow, widen, summed
cpu = torch.device("cpu")
ThinLinear.kernels = property(lambda layer: cpu if layer.in_features > layer.out_features else None)


class Narrow(LvrSft):
    \"\"\"A plugin has to define something.\"\"\"

    name = "narrow"
"""
"""Adapters are one node of the graph: that of large passes and, where a layer has more inputs than outputs, that of
kernels for a GPU, whose definitions stand for them."""


@pytest.mark.parametrize("engine", SHARDED)
def test_killed_runs_go_on_exactly(engine: str, models: Callable[[str], Path], eight: Path, tmp_path: Path) -> None:
    """In bf16, with 32-bit masters and a frozen copy for the KL. One rank is killed in the second step, while the other
    is in a collective that no code of ours has called; then one in the second checkpoint. Every number and weight is
    that of the run that was left alone, rollouts in step or gathered. Nothing is printed but ours. What each rank holds
    is what the plan counts."""
    model, plugin, whole, out = models(MODEL[engine]), ("--plugin", str(DYING)), tmp_path / "whole", tmp_path / "run"
    gather = files(tmp_path / "gather", engine, rollout="gather")
    lockstep = files(tmp_path / "lockstep", engine, rollout="lockstep")
    changes = STAGE_TWO | {"model": {"dtype": "bfloat16"}, "beta": 0.05, "method": {"type": "dying-rl"}}
    changes["checkpoint"] = {"every": 1, "keep": 10}
    done = train("rl", configure("rl", model, eight, whole, **changes), *plugin, engine=gather, launcher="realvr")
    assert not done.stdout and {line.split(":")[0] for line in done.stderr.splitlines()} == {"data", "done"}
    _assert_held(engine, model, whole)
    assert_rewarded(whole)

    raw = configure("rl", model, eight, out, **changes)
    for file, moment in ((lockstep, "terms 2 1"), (gather, "save 2 1")):
        done = train("rl", raw, *plugin, code=1, engine=file, launcher="realvr", REALVR_DIE=f"kill {moment}")
        line = error_line(done.stderr)
        assert "rank 1 of 2 was ended by SIGKILL; the same command goes on from " in line
        assert line.endswith("checkpoints/step-000001") and checkpoints(out) == ["step-000001"]
    train("rl", raw, *plugin, engine=gather)
    assert numbers(lines(out)) == numbers(lines(whole))
    assert_same_model(whole, out, model, tolerance=0)


def _assert_held(engine: str, model: Path, out: Path) -> None:
    """The bytes that the plan counts, against the tensors of two ranks: parameters by ``engine.json``, trained weights
    and optimizer by their checkpoint."""
    with torch.device("meta"):
        shape = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    weights, setup = weights_of(shape, train_decoder=True), Setup(engine, 2)
    assert max(rank["numbers"] for rank in facts(out)) == sum(local(weight, setup) for weight in weights)
    wanted, trained = held_bytes(weights, setup), [weight for weight in weights if weight.trained]
    assert wanted["frozen weights"] == sum(w.bytes for w in weights if not w.trained)  # vision is whole
    for rank in range(2):
        stem = out / f"checkpoints/step-000003/shard-0000{rank}"
        index = json.loads(stem.with_suffix(".json").read_text())["tensors"]
        with safe_open(stem.with_suffix(".safetensors"), "pt") as opened:
            sizes = {key: opened.get_tensor(key).nbytes for key, each in index.items() if each["rows"] is not None}
        states = sum(size for key, size in sizes.items() if "#" in key)
        whole = sum(size for key, size in sizes.items() if "#" not in key)
        if engine == "zero3":  # files have the masters, in place of 16-bit weights, and no padding
            assert 0 <= wanted["optimizer"] - states - whole <= 12 * _count(trained)
        else:
            assert any(key.endswith("#master") for key in sizes)
            room = _rows_too_many(trained)
            assert 0 <= wanted["trained weights"] - whole <= 2 * room
            assert 0 <= wanted["optimizer"] - states <= 12 * room


def _count(weights: list[Weight]) -> int:
    return sum(weight.count for weight in weights)


def _rows_too_many(weights: list[Weight]) -> int:
    """Numbers by which two ranks can differ: a row of each matrix, one number of each vector."""
    return sum(weight.count * (weight.shape[-1] if len(weight.shape) > 1 else 1) for weight in weights)


@pytest.mark.parametrize("engine", SHARDED)
def test_validation_and_a_step_that_is_not_finite(engine: str, dense: Path, eight: Path, tmp_path: Path) -> None:
    """Both ranks skip it and keep nothing of it: later steps and the answers to held-out questions are those of one
    process. Once with layers that stay whole until their backward pass, once with one process of the engine."""
    width, steps, apart = ("float64", 1e-6, 1e-6) if engine == "fsdp2" else ("float32", 1e-3, 1e-3)
    changes = STAGE_TWO | {"model": {"dtype": width}, "validation": {"path": str(eight), "every": 2, "max_new": 6}}
    reward = tmp_path / "reward.py"
    first = json.loads(eight.read_text().splitlines()[0])["id"]
    reward.write_text(
        f"def odd(text, sample):\n    return float('nan') if sample.id == {first!r} else len(text) / 10\n"
    )
    changes |= {"rewards": {f"{reward}:odd": 1.0}, "run": {"max_bad_steps": 5}}
    more: dict[str, Any] = {"reshard_after_forward": False} if engine == "fsdp2" else {}
    lockstep = files(tmp_path / "lockstep", engine, rollout="lockstep", **more)
    for name, processes, file in (("one", 1, "ddp"), ("alone", 1, engine), ("two", 2, lockstep)):
        train("rl", configure("rl", dense, eight, tmp_path / name, **changes), processes=processes, engine=file)
    assert lines(tmp_path / "one")[-1]["skipped"] > 0
    for name in ("alone", "two"):
        assert_same_steps(
            tmp_path / "one", tmp_path / name, rel=steps, abs=steps / 1e3, without=("validation/seconds",)
        )
        assert_same_model(tmp_path / "one", tmp_path / name, dense, tolerance=apart)


@pytest.mark.parametrize("engine", SHARDED)
def test_a_dry_run_prints_what_a_rank_holds(engine: str, moe: Path, eight: Path, tmp_path: Path) -> None:
    """Every rank loads its part; nothing is trained or written."""
    done = train("rl", configure("rl", moe, eight, tmp_path / "run", **STAGE_TWO), "--dry-run", engine=engine)
    printed = {line.split(": ")[0]: line for line in done.stdout.splitlines()}
    assert printed["processes"] == "processes: 2, microbatches per step and rank: 2"
    assert {"frozen weights", "trained weights", "gradients", "optimizer"} <= printed.keys()
    assert "gathered weights" in " ".join(printed) and "GiB, in: " in printed["total (estimate)"]
    assert not (tmp_path / "run").exists()


def test_lora_in_bf16_with_marker_rows(dense: Path, eight: Path, tmp_path: Path) -> None:
    """Adapters are 32-bit and marker rows 16-bit; DeepSpeed and a group of FSDP2 take one type. The steps are those of
    DDP but for rounding: 32-bit rows, and DeepSpeed's linear layers, which add the bias apart.

    AdamW divides a gradient by its size: one that is nothing but rounding would move a weight as far as any other, in a
    direction of its own. With a large ``eps`` weights move as far as their gradients are large, and both engines can be
    compared."""
    changes: dict[str, Any] = {
        "pack_tokens": 256,
        "optim": {"steps": 3, "microbatch": 1, "eps": 1.0, "lr": 0.1, "clip": 0.0},
        "model": {"dtype": "bfloat16"},
    }
    changes["lora"] = {"rank": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.0}
    plugin = tmp_path / "narrow.py"
    plugin.write_text(NARROW.format(folder=tmp_path))
    reference("sft", configure("sft", dense, eight, tmp_path / "ddp", **changes))
    for engine in ("zero3", "fsdp2"):
        raw = configure("sft", dense, eight, tmp_path / engine, **changes)
        train("sft", raw, "--plugin", str(plugin), engine=engine)
        assert_same_steps(tmp_path / "ddp", tmp_path / engine, rel=2e-2, abs=1e-3)
        assert_same_model(tmp_path / "ddp", tmp_path / engine, dense, tolerance=0.05)
        used = {file.name for file in tmp_path.glob("used-*")}  # not in layers that ZeRO-3 gathers by themselves
        assert used == ({"used-low_rank", "used-adapted"} if engine == "fsdp2" else set())
