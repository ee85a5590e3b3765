"""The real stages in real processes: two ranks, kill -9, dry runs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forked
from realvr.cli import main
from realvr.training import loop
from realvr.training.method import build
from stage_runs import (
    column,
    command,
    config_file,
    configure,
    environment,
    facts,
    lines,
    make,
    numbers,
    run,
    start,
    world,
    write,
)

DOUBLE = {"dtype": "float64"}


@pytest.mark.slow
def test_two_ranks_of_stage_two_are_one_process(trained: Path, tmp_path: Path) -> None:
    data = write(world(8), tmp_path / "data")
    optim = {"steps": 3, "batch": 4, "microbatch": 1}
    changes: dict[str, Any] = {"model": DOUBLE, "max_new": 12, "negatives": 16, "bank": 0, "optim": optim}
    changes["log"] = {"parts_every": 2}
    config = config_file(configure("rl", trained, data, tmp_path / "two", **changes), tmp_path / "two.yaml")
    start(command("rl", config, ranks=2))
    found = facts(tmp_path / "two")
    assert [fact["world"] for fact in found] == [2, 2] and [fact["rank"] for fact in found] == [0, 1]
    assert {fact["wrapped"] for fact in found} == {"DistributedDataParallel"}
    assert found[0]["sums"] == found[1]["sums"]

    task, settings, engine = make("rl", configure("rl", trained, data, tmp_path / "one", **changes))
    assert loop.train(task, settings, engine) == 0
    sums = [parameter.detach().double().sum().item() for parameter in engine.trainable()]
    assert found[0]["sums"] == pytest.approx(sums, rel=1e-6, abs=1e-6)
    one, two = numbers(lines(tmp_path / "one")), numbers(lines(tmp_path / "two"))
    assert len(one) == len(two) == 3
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    # Two prompts per rank and no bank: one rank alone could offer one negative. The other two are the other rank's.
    assert column(two, "evidence/negatives_used") == [3.0, 3.0, 3.0]
    assert "grad_norm/evidence" in two[1] and max(column(two, "loss/evidence")) > 0


class Rank:
    """One rank of two, in this process: what the other one says is known beforehand."""

    world, device, shards, lockstep = 2, torch.device("cpu"), False, False

    def __init__(self, rank: int, said: list[list[Any]]) -> None:
        self.rank, self.said, self.calls = rank, said, 0

    def gather_objects(self, value: Any) -> list[Any]:
        own, other = self.said[self.rank], self.said[1 - self.rank]
        if self.calls == len(own):
            own.append(value)
        self.calls += 1
        return [own[self.calls - 1], other[self.calls - 1] if self.calls <= len(other) else value][:: 1 - 2 * self.rank]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sft", {"pack_tokens": 256, "position_jitter": 3, "hide_image_ratio": 0.5}),
        ("base", {"position_jitter": 3, "feature_norm_weight": 0.3}),
    ],
)
@pytest.mark.slow
def test_two_ranks_add_up_to_the_loss_of_all_their_rows(
    kind: str, changes: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    """Each rank packs its own share, so one process would pack other rows: here it takes the rows of both ranks, adds
    up their losses and makes one update by hand."""
    data = write(world(140), tmp_path / "data")  # more than both look at when they pack
    changes = {**changes, "model": DOUBLE, "optim": {"steps": 1, "batch": 4, "microbatch": 1}}
    raw = configure(kind, trained, data, tmp_path / "two", **changes)
    start(command(kind, config_file(raw, tmp_path / "two.yaml"), ranks=2))
    found = facts(tmp_path / "two")
    assert [fact["world"] for fact in found] == [2, 2] and found[0]["sums"] == found[1]["sums"]

    (task, settings, engine), said = make(kind, raw | {"run": {"out": str(tmp_path / "one")}}), [[], []]
    shares: list[Any] = []
    for _ in range(2):  # the first time, what each rank says is only collected
        engine.seed(settings.run.seed)
        shares = [build(settings, Rank(rank, said)).collect(0).microbatches for rank in range(2)]
    names = [{name for batch in share for name in batch.names} for share in shares]
    assert names[0] and names[1] and not names[0] & names[1]
    every = shares[0] + shares[1]
    for batch in every:  # a mean over the whole step: each share is divided by the counts of both
        if kind == "sft":
            assert batch.tokens_total == sum(len(other.labels_M) for other in every)
            assert batch.targets_total == sum(len(set(other.slot_example_N.tolist())) for other in every)
        else:
            assert batch.totals["next_token"] == sum(int((~other.caption_M).sum()) for other in every)
            assert batch.totals["caption"] == sum(int(other.caption_M.sum()) for other in every)
            assert batch.totals["dense"] == sum(int((other.dense_NA >= 0).sum()) for other in every)
            assert batch.totals["visual"] == sum(len(other.dense_NA) for other in every)
    engine.prepare(task.module, settings.optim)
    for batch in every:
        engine.backward(engine.forward(batch)[0])
    norm = engine.gradient_norm(settings.optim.clip)
    engine.step(settings.optim.lr_at(0))
    (line,) = lines(tmp_path / "two")
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-9)
    sums = [parameter.detach().double().sum().item() for parameter in engine.trainable()]
    assert found[0]["sums"] == pytest.approx(sums, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # Three negatives from the batch, three from the bank.
        pytest.param("rl", {"max_new": 12, "negatives": 6}, marks=pytest.mark.slow),
        # The checkpoint falls between two updates.
        pytest.param("rl", {"max_new": 12, "negatives": 6, "updates_per_rollout": 2}, marks=pytest.mark.slow),
        ("sft", {"pack_tokens": 256, "position_jitter": 3, "hide_image_ratio": 0.5}),
    ],
    ids=["rl", "rl two updates", "sft"],
)
def test_killed_runs_resume_to_the_same_numbers(
    kind: str, changes: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    data = write(world(8), tmp_path / "data")
    changes = {**changes, "optim": {"steps": 6, "lr": 2e-3}, "checkpoint": {"every": 3}}
    whole = run(kind, configure(kind, trained, data, tmp_path / "whole", **changes))
    out = tmp_path / "run"
    config = config_file(configure(kind, trained, data, out, **changes), tmp_path / "config.yaml")
    process = Forked.of(command(kind, config), environment=environment())
    process.until(lambda: (out / "metrics.jsonl").exists() and len(lines_so_far(out)) >= 4)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-000003"]
    assert main(["train", kind, str(config), "--resume", "auto"]) == 0
    assert column(lines(out), "step") == list(range(1, 7))
    assert numbers(lines(out)) == numbers(whole)


def lines_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("kind", ["sft", "rl", "base"])
def test_dry_runs_print_shapes_and_train_nothing(
    kind: str, trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    config = config_file(configure(kind, trained, data, out), tmp_path / "config.yaml")
    assert main(["train", kind, str(config), "--dry-run"]) == 0
    text = capsys.readouterr().out
    shown = {"sft": "microbatch.ids_RT: int64 (2, ", "rl": "microbatch.latents_BKD: float32 (2, 3, 64)"}
    assert shown.get(kind, "microbatch.dense_NA: int64 (") in text
    assert "microbatches per step and rank: 2" in text and "optimizer: 0." in text and "total" in text
    assert not out.exists()
