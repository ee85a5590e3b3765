"""A run that was started on some ranks continues on others: the steps are those of an uninterrupted run.

In float64, so that the order of sums over ranks does not matter: every number agrees to 1e-6 of its size.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import stage_runs
from engine_runs import (
    PER_RANK,
    STAGE_TWO,
    assert_rewarded,
    assert_same_model,
    assert_same_steps,
    facts,
    reference,
    train,
)
from realvr.errors import UserError
from realvr.training import lanes
from realvr.training.sections import OptimSettings
from stage_runs import column, configure, lines, world, write

STAGES: dict[str, dict[str, Any]] = {
    "sft": {"pack_tokens": 256, "position_jitter": 3, "hide_image_ratio": 0.5},
    "rl": {"max_new": 12, "negatives": 6, "updates_per_rollout": 3},
    "base": {},
}


def settings(kind: str, model: Path, data: Path, out: Path, dtype: str = "float64") -> dict[str, Any]:
    """Six steps. Stage 2 makes three updates on the same rollouts: step 4 stands within such a batch, as does 2."""
    optim = STAGE_TWO["optim"] | {"steps": 6}
    changes = {"optim": optim, "checkpoint": {"every": 1, "keep": 10}, **STAGES[kind]}
    return configure(kind, model, data, out, model={"dtype": dtype}, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "ranks"),
    [
        ("sft", "fsdp2", {2: 2, 4: 1, 6: 2}),
        ("rl", "ddp", {2: 2, 4: 1, 6: 4}),
        ("rl", "fsdp2", {2: 2, 4: 1, 5: 2, 6: 4}),
        ("rl", "zero3", {2: 2, 4: 1, 6: 2}),
        ("base", "fsdp2", {4: 2, 6: 1}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_other_numbers_of_ranks_go_on(
    kind: str, engine: str, ranks: dict[int, int], dense: Path, plain: Path, tmp_path: Path
) -> None:
    """``ranks``: how many train up to which step. Stage 2 is what one process trains. Stage 1 and base training hang on
    the number of ranks at the start: two under DDP, never interrupted, stand for it. Experts aside, ZeRO-3 alone is
    float32."""
    data = write(world(40), tmp_path / "data")
    whole, out, model = tmp_path / "whole", tmp_path / "run", plain if kind == "base" else dense
    width, steps, apart = ("float32", 1e-3, 1e-3) if engine == "zero3" else ("float64", 1e-6, 1e-6)
    raw = settings(kind, model, data, whole, width)
    if kind == "rl":
        stage_runs.run(kind, raw)
        assert_rewarded(whole)
    else:
        reference(kind, raw)
    for last, processes in ranks.items():
        raw = settings(kind, model, data, out, width)
        train(kind, raw, "--optim.steps", str(last), processes=processes, engine=engine)
        assert [rank["world"] for rank in facts(out)] == [processes] * processes
    assert column(lines(out), "step") == list(range(1, 7))
    assert_same_steps(whole, out, rel=steps, abs=steps / 1e3, without=PER_RANK)
    assert_same_model(whole, out, model, tolerance=apart)
    if kind == "base":  # the vision tower is trained, and in shards
        assert facts(out)[0]["parameters"]["trained"].keys() == {"DTensor"}
        assert not facts(out)[0]["parameters"]["frozen"]


@pytest.mark.slow
def test_adapters_with_dropout_go_on_with_a_notice(dense: Path, eight: Path, tmp_path: Path) -> None:
    raw = settings("sft", dense, eight, tmp_path / "run") | {"lora": {"rank": 4, "dropout": 0.1}}
    reference("sft", raw, "--optim.steps", "1")
    done = train("sft", raw, "--optim.steps", "2", processes=1)
    assert "the dropout of the adapters goes on with other random numbers" in done.stderr
    assert column(lines(tmp_path / "run"), "step") == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_a_checkpoint_becomes_a_model_folder(engine: str, dense: Path, eight: Path, tmp_path: Path) -> None:
    """The way to another engine, or out of one whose files fit one number of ranks: two ranks write a checkpoint, one
    exports it under the same engine, and one process under DDP starts from that."""
    out, width = tmp_path / "run", "float32" if engine == "zero3" else "float64"
    raw = settings("sft", dense, eight, out, width)
    train("sft", raw, "--optim.steps", "2", engine=engine)
    shutil.move(out / "final", tmp_path / "final")
    done = train("sft", raw, "--export", processes=1, engine=engine)
    assert f"the model after step 2: {out / 'model-000002'}" in done.stdout and not (out / "final").exists()
    exported = (out / "model-000002/model.safetensors").read_bytes()
    assert exported == (tmp_path / "final/model.safetensors").read_bytes()
    flags = ("--model.path", str(out / "model-000002"), "--optim.steps", "1")
    train("sft", raw, *flags, "--run.out", str(tmp_path / "next"), processes=1)
    assert len(lines(tmp_path / "next")) == 1 and facts(tmp_path / "next")[0]["distributed_type"] == "NO"
    if engine == "ddp":
        train("sft", raw, "--export", "--resume", str(out / "checkpoints/step-000001"), processes=1)
        assert (out / "model-000001/model.safetensors").read_bytes() != exported


# ---------------------------------------------------------------------- the parts of a step


class Rank:
    """One rank of several."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_ranks_divide_the_lanes_among_them(count: int, world: int) -> None:
    """Every microbatch of every lane has one rank, in the order of the step, equally many each."""
    optim = OptimSettings(batch=24, microbatch=2)
    each = 12 // count
    taken = [
        [
            (lane.number, number)
            for lane in lanes.lanes_of(Rank(rank, world), optim, count)  # type: ignore[arg-type]
            for number in range(each)[lane.own]
        ]
        for rank in range(world)
    ]
    assert [place for part in taken for place in part] == [divmod(place, each) for place in range(12)]
    assert {len(part) for part in taken} == {12 // world}
    counting = [
        lane.number
        for rank in range(world)
        for lane in lanes.lanes_of(Rank(rank, world), optim, count)  # type: ignore[arg-type]
        if lane.counts
    ]
    assert counting == list(range(count))


def test_lanes_pass_through_any_number_of_ranks() -> None:
    optim = OptimSettings(batch=12, microbatch=1)
    states = [{"stream": rank} for rank in range(3)]
    for count in (1, 4, 2, 6, 3):
        states = [lanes.redistribute(states, Rank(rank, count), optim) for rank in range(count)]  # type: ignore[arg-type]
        assert lanes.lane_states(states) == {rank: {"stream": rank} for rank in range(3)}
    assert states == [{"stream": rank} for rank in range(3)]  # as before: nothing else while each rank has one


def test_a_batch_that_lanes_do_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="started on 3 processes.*optim.batch 8 must be a multiple of 3 x"):
        lanes.lanes_of(Rank(0, 2), OptimSettings(batch=8, microbatch=1), 3)  # type: ignore[arg-type]


def test_a_state_that_differs_between_ranks_is_named() -> None:
    with pytest.raises(UserError, match="method 'toy' keeps 'teacher' apart on each rank.*continue on 2"):
        lanes.same_on_all([{"bank": [1.0], "teacher": 1}, {"bank": [1.0], "teacher": 2}], "method 'toy'")
