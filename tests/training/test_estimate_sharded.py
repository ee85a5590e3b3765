"""The estimate of engines that shard: what ZeRO-3 holds against real tensors, one rule for gathered rollouts, and parts
of a dry run that add up."""

from __future__ import annotations

import json
import re
import socket
import sys
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest

from engine_runs import engine_file, environment
from forked import Forked
from realvr.training.engine.settings import ZeRO3Settings
from realvr.training.estimate import Decoder, Estimate, Setup, Weight, Workload
from realvr.training.estimate.peak import GIB, rollout_states
from realvr.training.memory import expected_lines, measured_lines

HELD = Path(__file__).resolve().parents[1] / "toys" / "held_by_zero3.py"
BUCKET = 90_001
FROZEN, TRAINED = (301, 701), ((501, 301), (501, 401))
"""Shapes of that file's model."""


# ---------------------------------------------------------------------- against real engines


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [("bfloat16", 1), *(pytest.param(dtype, 2, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32"))],
)
def test_what_zero3_holds_against_real_tensors(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Everything that is alive after two steps, gradients of 32 bits and DeepSpeed's buffer included. The plan and the
    engine say the same, part by part. And both decide alike whether the model is gathered for rollouts."""
    file = engine_file(tmp_path, type="zero3", zero_optimization={"reduce_bucket_size": BUCKET})
    found = _on_ranks([str(HELD), dtype, str(file)], ranks, tmp_path)
    numbers = sum(-(-rows * columns // ranks) for rows, columns in TRAINED)
    for one in found:
        assert one["plan"] == one["engine"]
        assert sum(one["plan"].values()) == pytest.approx(one["real"], abs=100)  # counters and flags
        assert one["plan"]["gradients"] == 4 * numbers + BUCKET * (2 if dtype == "bfloat16" else 4)
    for engine, free in found[0]["free"].items():
        assert free == _least_free(engine, 2 if dtype == "bfloat16" else 4)


def _least_free(engine: str, itemsize: int) -> int:
    """Bytes beside all that is held from which on the plan gathers that model."""
    weights = [Weight(FROZEN, "root", False), *(Weight(shape, "root", True, itemsize) for shape in TRAINED)]
    decoder = Decoder(layers=1, width=8, ffn=8, heads=1, kv_heads=1, head_dim=8, vocab=8)
    setup, work = Setup(engine, 2), Workload("rl")
    held = sum(rollout_states(decoder, weights, work, setup, None)[0].values()) - sum(w.bytes for w in weights)
    return bisect_left(
        range(10**8), True, key=lambda free: rollout_states(decoder, weights, work, setup, held + free)[1]
    )


def _on_ranks(arguments: list[str], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What a script prints on each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        known = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        started.append(Forked.of([sys.executable, *arguments], folder=folder / str(rank), environment=known))
    for process in started:
        assert process.wait() == 0, process.said
    return [json.loads(process.out.read_text()) for process in started]


def test_deepspeeds_own_buffer_size() -> None:
    """The plan does not import DeepSpeed; its default is written down, and a file may change it."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def bucket(**zero: Any) -> int:
        return Setup.of(ZeRO3Settings(zero_optimization=zero), 8, True).bucket

    assert bucket() == DeepSpeedZeroConfig().reduce_bucket_size and DeepSpeedZeroConfig().contiguous_gradients
    assert bucket(reduce_bucket_size=7) == 7 and bucket(contiguous_gradients=False) == 0


# ---------------------------------------------------------------------- dry runs


def parts_of(text: str) -> tuple[dict[str, float], float]:
    """GiB by what holds them, and their total, as a dry run prints them."""
    found = {name: float(size) for name, size in re.findall(r"^([a-z][^:]*): ([\d.]+) GiB", text, re.MULTILINE)}
    return found, found.pop("total (estimate)")


def test_parts_of_a_dry_run_add_up() -> None:
    """Gradients are those of the moment that is printed, gathered weights too: the engine's numbers are of another."""
    parts = {"frozen weights": 1, "trained weights": 2, "gradients": 0, "optimizer": 12, "gathered weights": 9}
    moments = {"rollout": parts | {"keys and values": 3, "activations": 4}, "update": {"optimizer": 12}}
    expected = Estimate({}, {name: {k: v * GIB for k, v in each.items()} for name, each in moments.items()})
    held = {name: size * GIB for name, size in (parts | {"gradients": 2, "gathered weights": 5}).items()}
    found, total = parts_of("\n".join(expected_lines(held, expected)))
    assert total == sum(found.values()) == 31 and found["gradients"] == 0 and found["gathered weights"] == 9
    # A microbatch that took 11: gradients and gathered weights are in it, and in what the engine holds.
    lines = list(measured_lines(held, expected, 11 * GIB, 1))
    assert lines == ["activations (measured): 4.000 GiB", "total: 26.000 GiB"]
