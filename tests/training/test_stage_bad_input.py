"""What the stages do with groups, images, answers and rows that are not as they should be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_rewards
from realvr.backbone import Backbone
from realvr.data.sample import Box
from realvr.errors import UserError
from realvr.training import loop
from realvr.training.dropping import TOO_LONG
from realvr.training.examples import Encoder
from stage_runs import column, configure, lines, make, run, weights, world, write

REWARDS = Path(stage_rewards.__file__)


@pytest.mark.parametrize("outcome", ["never", "always"])
def test_groups_without_variance_still_learn_from_evidence(
    outcome: str, trained: Path, data: Path, tmp_path: Path
) -> None:
    raw = configure("rl", trained, data, tmp_path, rewards={f"{REWARDS}:{outcome}": 1.0})
    task, settings, engine = make("rl", raw | {"log": raw["log"] | {"parts_every": 1}})
    before = weights(task)
    assert loop.train(task, settings, engine) == 0
    (record,) = lines(tmp_path)
    assert record["groups/without_variance"] == 1 and record["loss/policy"] == 0
    assert record["reward"] == (outcome == "always")
    assert record["grad_norm/policy"] == 0 and record["grad_norm/evidence"] > 0 and record["loss/evidence"] > 0
    assert any(not torch.equal(before[name], value) for name, value in weights(task).items())


def test_one_image_per_batch_takes_negatives_from_the_bank(trained: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 4, "batch": 1, "microbatch": 1}
    raw = configure("rl", trained, data, tmp_path, rewards={f"{REWARDS}:never": 1.0}, optim=optim)
    task, _, _ = make("rl", raw | {"run": {"out": str(tmp_path / "other")}})
    loss, metrics = task.module(task.collect(0).microbatches[0])
    assert loss.item() == 0 and loss.requires_grad and float(metrics["evidence/undefined"][0]) == 1
    loss.backward()
    found = run("rl", raw)
    assert column(found, "evidence/negatives_used") == [0, 1, 2, 3]
    assert column(found, "evidence/undefined") == [1, 0, 0, 0]
    assert found[0]["loss"] == 0 and found[0]["grad_norm"] == 0 and found[0]["evidence/margin"] is None
    assert all(line["loss/evidence"] > 0 and line["grad_norm"] > 0 for line in found[1:])


def test_a_latent_for_each_box_needs_enough_latents(trained: Path, tmp_path: Path) -> None:
    """Found before the model is read; a run with enough of them trains, with all weight assigned."""
    rows = world(4)
    corners = [(0.0, 0.0, 0.3, 0.3), (0.5, 0.0, 1.0, 0.3), (0.5, 0.5, 1.0, 1.0), (0.0, 0.5, 0.3, 1.0)]
    long = dataclasses.replace(rows[2], boxes=[Box(0, corner) for corner in corners])
    asked = {"evidence_boxes": "per-slot", "credit": "normalised"}
    raw = configure("rl", trained, write([*rows[:2], long], tmp_path / "long"), tmp_path / "a", **asked)
    with pytest.raises(UserError, match=r"data.jsonl.*: 4 evidence boxes, but K = 3: .*; take last or all"):
        make("rl", raw)
    make("rl", raw | {"method": "lvr-rl", "run": {"out": str(tmp_path / "b")}})  # no evidence loss, no matter
    short = dataclasses.replace(long, boxes=long.boxes[:3])
    (line,) = run("rl", configure("rl", trained, write([*rows, short], tmp_path / "short"), tmp_path / "c", **asked))
    assert line["loss/evidence"] > 0 and line["evidence/unassigned_weight"] == pytest.approx(0, abs=1e-6)


def test_the_same_image_is_never_its_own_negative(trained: Path, tmp_path: Path) -> None:
    (sample,) = world(1)
    twins = [dataclasses.replace(sample, id=f"twin-{number}") for number in range(4)]
    raw = configure("rl", trained, write(twins, tmp_path), tmp_path / "run", optim={"steps": 2})
    found = run("rl", raw)
    assert column(found, "evidence/negatives_used") == [0, 0] and column(found, "evidence/undefined") == [1, 1]
    assert all(math.isfinite(line["loss"]) for line in found)


def test_answers_that_do_not_parse(untrained: Path, data: Path, tmp_path: Path) -> None:
    """An untrained model writes no answer block: no reward, no wrong answers, no credit; the uniform share remains."""
    (record,) = run("rl", configure("rl", untrained, data, tmp_path))
    assert record["reward"] == 0 and record["evidence/has_wrong_answer"] == 0 and record["evidence/credit_mass"] == 0
    assert record["loss/evidence"] > 0 and record["grad_norm"] > 0


def test_rows_without_boxes(trained: Path, tmp_path: Path) -> None:
    bare = [dataclasses.replace(sample, boxes=[]) for sample in world(4)]
    data = write(bare, tmp_path)
    (record,) = run("sft", configure("sft", trained, data, tmp_path / "sft", allow_no_evidence=True))
    assert record["data/with_targets"] == 0 and record["loss/reconstruction"] is None
    assert record["loss"] == pytest.approx(record["loss/next_token"]) and record["grad_norm"] > 0
    task, _, _ = make("rl", configure("rl", trained, data, tmp_path / "rl"))
    micro = task.collect(0).microbatches[0]
    first = micro.visual.per_image()[0]
    assert torch.allclose(micro.positive_BD[0], first.mean(0), atol=1e-5)  # the whole image stands in
    loss, _ = task.module(micro)
    assert math.isfinite(loss.item())


def test_long_examples_get_smaller_images_or_are_rejected(trained: Path) -> None:
    backbone = Backbone.load(trained, dtype="float32")
    (sample,) = world(1, size=224)
    whole = Encoder(backbone, 4096).sequence(sample)
    assert whole is not None
    text = len(whole) - whole.prompt.images[0].tokens - len(whole.targets)
    for limit in (len(whole) - 1, text + 20):
        encoder = Encoder(backbone, limit)
        found, prompt = encoder.sequence(sample), encoder.prompt(sample)
        assert found is not None and len(found) <= limit and prompt is not None and len(prompt) <= limit
        assert found.prompt.images[0].tokens < whole.prompt.images[0].tokens and not encoder.rejected
    encoder = Encoder(backbone, text)
    assert encoder.sequence(sample) is None and encoder.rejected == {TOO_LONG: 1}


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_rejected_rows_are_counted_and_replaced(kind: str, trained: Path, tmp_path: Path) -> None:
    found = world(4)
    long = dataclasses.replace(found[0].turns[-1], text="Where? " * 300)
    found[0] = dataclasses.replace(found[0], turns=[*found[0].turns[:-1], long])
    key = "pack_tokens" if kind == "sft" else "max_prompt"
    raw = configure(kind, trained, write(found, tmp_path), tmp_path / "run", optim={"steps": 2}, **{key: 256})
    records = run(kind, raw)
    assert records[-1]["data/rejected_per_rank"] >= 1 and all(line["loss"] is not None for line in records)
    none = configure(kind, trained, write(found, tmp_path), tmp_path / "none", **{key: 20})
    with pytest.raises(UserError, match="could not be encoded: .* too_long .*none can be used"):
        run(kind, none)


@pytest.mark.parametrize("kind", ["sft", "rl", "base"])
def test_a_batch_that_cannot_be_split(kind: str, trained: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="multiple of 1 ranks x optim.microbatch 2"):
        make(kind, configure(kind, trained, data, tmp_path, optim={"batch": 3}))


def test_a_reward_that_is_not_a_number_names_its_sample(trained: Path, tmp_path: Path) -> None:
    found = world(4)
    found[2] = dataclasses.replace(found[2], id="the-bad-one", meta=found[2].meta | {"bad": True})
    data = write(found, tmp_path)
    changes: dict[str, Any] = {"rewards": {f"{REWARDS}:undefined": 1.0}, "optim": {"microbatch": 1}}
    raw = configure("rl", trained, data, tmp_path / "run", **changes)
    task, settings, engine = make("rl", raw)
    before = weights(task)
    with pytest.raises(UserError, match="every one of the 1 steps was skipped.*nothing was trained"):
        loop.train(task, settings, engine)  # skipped and counted
    assert not (tmp_path / "run" / "final").exists()
    (record,) = lines(tmp_path / "run")
    assert record["skipped"] == 1 and record["loss"] is None
    assert all(torch.equal(before[name], value) for name, value in weights(task).items())
    strict = configure("rl", trained, data, tmp_path / "strict", **changes)
    strict["run"]["max_bad_steps"] = 0
    with pytest.raises(UserError, match="examples the-bad-one;"):
        run("rl", strict)


@pytest.mark.parametrize("kind", ["sft", "base"])
def test_weights_that_are_not_numbers_name_the_batch(kind: str, trained: Path, tmp_path: Path) -> None:
    found = [dataclasses.replace(sample, id=f"row-{i}") for i, sample in enumerate(world(4))]
    raw = configure(kind, trained, write(found, tmp_path), tmp_path / "run", run={"max_bad_steps": 0})
    task, settings, engine = make(kind, raw)
    with torch.no_grad():
        task.backbone.model.lm_head.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"stopped at step 1: .* examples row-\d"):
        loop.train(task, settings, engine)


def test_user_rewards_that_cannot_be_loaded(trained: Path, data: Path, tmp_path: Path) -> None:
    for name, message in (
        ("acuracy", "neither accuracy nor format nor path.py:function"),
        (f"{tmp_path}/absent.py:f", "does not exist"),
        (f"{REWARDS}:absent", "has no function 'absent'"),
    ):
        with pytest.raises(UserError, match=message):
            make("rl", configure("rl", trained, data, tmp_path, rewards={name: 1.0}))
