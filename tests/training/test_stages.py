"""The real stages through the real loop: they learn, each method is what it says, and a split changes nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import stage_rewards
from helpers import difference, load_stock, stock_inputs
from realvr.backbone import Backbone
from realvr.errors import UserError
from realvr.latent.span import prefill, score, splice
from realvr.training import loop
from realvr.training.method import METHODS
from stage_runs import LATENTS, column, configure, lines, make, numbers, run, weights, with_markers, world, write

GOLDEN = Path(__file__).parents[1] / "golden" / "training.json"
REWARDS = Path(stage_rewards.__file__)
DOUBLE = {"dtype": "float64"}


def reward(name: str) -> dict[str, float]:
    """A user's reward as the only one."""
    return {f"{REWARDS}:{name}": 1.0}


def final(out: Path) -> dict[str, torch.Tensor]:
    """Weights of the exported model."""
    return weights_of(Backbone.load(out / "final", dtype="float64"))


def weights_of(backbone: Backbone) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in backbone.model.named_parameters()}


def is_vision(name: str) -> bool:
    return any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))


# ---------------------------------------------------------------------- learning


def test_stage_one_learns_text_and_reconstruction(stage_one: Path) -> None:
    found = lines(stage_one)
    first, last = found[0], found[-1]
    assert last["loss/next_token"] < 0.1 * first["loss/next_token"]
    assert last["loss/reconstruction"] < 0.6 * first["loss/reconstruction"]
    assert last["latents/cos_target"] > first["latents/cos_target"] + 0.25
    assert first["loss"] == pytest.approx(first["loss/next_token"] + 0.1 * first["loss/reconstruction"], rel=1e-6)


def held_out_margin(model: Path, data: Path, out: Path) -> float:
    """Mean margin of the model's own latents on the prompts of ``data``."""
    raw = configure("rl", model, data, out, rewards=reward("never"), optim={"batch": 16, "microbatch": 16}, group=2)
    task, _, _ = make("rl", raw | {"max_new": 2, "negatives": 15})
    with torch.no_grad():
        _, metrics = task.module(task.collect(0).microbatches[0], term="evidence")
    total, count = metrics["evidence/margin"]
    return float(total / count)


@pytest.mark.slow
def test_the_evidence_loss_alone_raises_the_margin_on_new_prompts(trained: Path, tmp_path: Path) -> None:
    seen = write(world(48), tmp_path / "seen")
    unseen = write(world(16, split="validation", seed=5), tmp_path / "unseen")
    changes: dict[str, Any] = {"rewards": reward("never"), "group": 2, "max_new": 2, "lambda_ev": 1.0, "negatives": 7}
    optim = {"steps": 40, "batch": 8, "microbatch": 8, "lr": 2e-3}
    found = run("rl", configure("rl", trained, seen, tmp_path / "run", optim=optim, **changes))
    assert set(column(found, "loss/policy")) == {0.0}
    assert column(found, "loss") == pytest.approx(column(found, "loss/evidence"), abs=1e-6)
    before = held_out_margin(trained, unseen, tmp_path / "a")
    after = held_out_margin(tmp_path / "run/final", unseen, tmp_path / "b")
    assert after > before + 0.05, (before, after)


def test_stage_two_raises_the_reward_of_a_toy_task(untrained: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 30, "lr": 5e-3, "batch": 4, "microbatch": 4}
    changes: dict[str, Any] = {"rewards": reward("vowels"), "method": "lvr-rl", "group": 8, "max_new": 6}
    found = column(run("rl", configure("rl", untrained, data, tmp_path, optim=optim, **changes)), "reward")
    assert sum(found[-5:]) > 1.5 * sum(found[:5]), found
    assert "reward/stage_rewards.py:vowels" in lines(tmp_path)[0]


def test_base_training_learns_all_three_and_moves_vision(plain: Path, data: Path, tmp_path: Path) -> None:
    optim = {"steps": 15, "lr": 3e-3, "batch": 4, "microbatch": 4}
    task, settings, engine = make("base", configure("base", plain, data, tmp_path, optim=optim))
    before = weights(task)
    assert loop.train(task, settings, engine) == 0
    found, after = lines(tmp_path), weights(task)
    for name, share in (("next_token", 0.5), ("caption", 0.7), ("dense", 0.7)):
        values = column(found, f"loss/{name}")
        assert values[-1] < share * values[0], (name, values)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(map(is_vision, moved)) and any(not is_vision(name) for name in moved)
    assert not any("heads" in name for name in final(tmp_path))  # the dense heads are not exported


def test_golden_losses_of_twenty_steps(stage_one: Path, trained: Path, data: Path, tmp_path: Path) -> None:
    """Stage 1, then Stage 2 from its model. REALVR_UPDATE_GOLDEN=1 writes the file anew."""
    optim = {"steps": 20, "batch": 4, "microbatch": 4}
    rl = run("rl", configure("rl", trained, data, tmp_path, model=DOUBLE, max_new=12, optim=optim))
    names = {
        "sft": ("loss", "loss/next_token", "loss/reconstruction", "latents/cos_target", "grad_norm"),
        "rl": ("loss", "loss/policy", "loss/evidence", "reward", "evidence/margin", "evidence/credit_mass"),
    }
    found = {"sft": lines(stage_one), "rl": rl}
    got = {kind: {name: column(found[kind], name) for name in names[kind]} for kind in names}
    assert max(column(rl, "evidence/has_wrong_answer")) > 0 and max(column(rl, "evidence/credit_mass")) > 0
    if os.environ.get("REALVR_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(got, indent=1) + "\n")
    wanted = json.loads(GOLDEN.read_text())
    for kind, values in wanted.items():
        for name, series in values.items():
            assert len(series) == 20
            assert got[kind][name] == pytest.approx(series, rel=1e-4, abs=1e-4), (kind, name)


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("kind", ["sft", "rl", "base"])
def test_accumulation_changes_nothing(kind: str, trained: Path, data: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_new": 12} if kind == "rl" else {}
    found = {}
    for size in (1, 4):
        optim = {"steps": 3, "batch": 4, "microbatch": size}
        raw = configure(kind, trained, data, tmp_path / str(size), model=DOUBLE, optim=optim, **changes)
        found[size] = numbers(run(kind, raw))
    for one, four in zip(found[1], found[4], strict=True):
        assert one.keys() == four.keys()
        for name in one.keys() - {"data/row_fill"}:  # a microbatch is as wide as its longest row
            assert one[name] == pytest.approx(four[name], rel=1e-5, abs=1e-6), name
    one_by_one, together = final(tmp_path / "1"), final(tmp_path / "4")
    assert max(difference(value, together[name]) for name, value in one_by_one.items()) < 1e-6


# ---------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_only_the_decoder_or_its_adapters_move(kind: str, rank: int, trained: Path, data: Path, tmp_path: Path) -> None:
    raw = configure(kind, trained, data, tmp_path, lora={"rank": rank}, optim={"steps": 2})
    task, settings, engine = make(kind, raw)
    before = weights(task)
    assert loop.train(task, settings, engine) == 0
    after = weights(task)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(map(is_vision, moved))
    if rank:
        apart = ("lora_", "marker_rows") if kind == "sft" else ("lora_",)
        assert all(any(part in name for part in apart) for name in moved)
        for name, parameter in task.backbone.model.named_parameters():
            assert parameter.requires_grad == any(part in name for part in apart), name
    else:
        assert any("self_attn" in name for name in moved) and any("mlp" in name for name in moved)
    inputs = stock_inputs(task.backbone, [task.encoder.prompt(sample) for sample in world(2)])
    with torch.no_grad():
        ours = task.backbone.model(**inputs).logits
        stock = load_stock(tmp_path / "final")(**inputs).logits
        start = load_stock(trained)(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert not any("lora" in name for name, _ in load_stock(tmp_path / "final").named_parameters())
    assert difference(ours[real], stock[real]) < 1e-4 < difference(start[real], stock[real])


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_policy_is_the_start(rank: int, trained: Path, data: Path, tmp_path: Path) -> None:
    raw = configure("rl", trained, data, tmp_path, lora={"rank": rank}, beta=0.1, model=DOUBLE, max_new=12)
    task, settings, engine = make("rl", raw | {"optim": raw["optim"] | {"steps": 3, "lr": 5e-3}})
    assert loop.train(task, settings, engine) == 0
    kl = column(lines(tmp_path), "policy/kl")
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 1e-6
    micro = task.collect(3).microbatches[0]
    start = Backbone.load(trained, dtype="float64", latents=LATENTS)
    with torch.no_grad():
        state, _ = prefill(start, micro.batch, micro.visual)
        state, _ = splice(start, state, micro.latents_BKD)
        wanted = score(start, state, micro.ids_BGS, micro.real_BGS, temperature=1.0, forbidden=start.forbidden_ids())[0]
    real = micro.real_BGS
    assert difference(micro.ref_logp_BGS[real], wanted[real]) < 1e-9
    assert difference(micro.old_logp_BGS[real], wanted[real]) > 1e-4


def test_adapter_dropout_is_off_in_rollouts_and_on_in_the_loss(trained: Path, data: Path, tmp_path: Path) -> None:
    raw = configure("rl", trained, data, tmp_path, lora={"rank": 4, "dropout": 0.5}, model=DOUBLE, max_new=12)
    task, settings, engine = make("rl", raw | {"optim": raw["optim"] | {"steps": 2, "lr": 5e-2}})
    assert loop.train(task, settings, engine) == 0
    micro = task.collect(2).microbatches[0]
    with torch.no_grad():
        noisy = task.module(micro)[1]["policy/ratio"]
        task.module.eval()
        plain = task.module(micro)[1]["policy/ratio"]
    assert float(plain[0] / plain[1]) == pytest.approx(1, abs=1e-6)
    assert float(noisy[0] / noisy[1]) != pytest.approx(1, abs=1e-4)


# ---------------------------------------------------------------------- methods

MEANS: dict[str, dict[str, Any]] = {
    "realvr": {"lambda_ev": 0.2, "eta": 0.3},
    "lvr-rl": {"lambda_ev": 0},
    "direct": {"lambda_ev": 0, "latents": 0},
    "uniform": {"routing": "uniform", "eta": 1},
    "selective": {"eta": 0},
    "raw-attention": {"routing": "raw"},
    "no-negatives": {"objective": "hinge-positive"},
    "undetached": {"detach": False},
    "off-policy": {"on_policy": False},
    "mass-matched-u+": {"mass_matched": True, "routing": "uniform", "objective": "hinge-positive"},
    "mass-matched-u±": {"mass_matched": True, "routing": "uniform", "objective": "contrast"},
    "mass-matched-c+": {"mass_matched": True, "routing": "selective", "objective": "hinge-positive"},
    "mass-matched-c±": {"mass_matched": True, "routing": "selective", "objective": "contrast"},
    "custom": {},
}
USUAL = {"routing": "selective", "objective": "contrast", "mass_matched": False, "detach": True, "on_policy": True}


def test_every_method_does_what_the_documentation_says(trained: Path, plain: Path, data: Path, tmp_path: Path) -> None:
    """One step of each, on the same prompts from the same model; Direct from one without a span."""
    assert MEANS.keys() == {method.name for method in METHODS if method.stage == "rl"}
    found = {}
    for method in MEANS:
        rewards = {"accuracy": 1.0, "format": 1.0} | reward("vowels")
        raw = configure("rl", trained, data, tmp_path / method, method=method, model=DOUBLE, max_new=12)
        if method == "direct":
            raw["model"] = {"path": str(plain), **DOUBLE}
        (record,) = run("rl", raw | {"rewards": rewards, "margin": 1.5})  # every hinge is active
        settings = yaml.safe_load((tmp_path / method / "settings.yaml").read_text())
        for name, value in (USUAL | MEANS[method]).items():
            assert (settings["method"] | settings["model"])[name] == value, (method, name)
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0, method
        assert ("loss/evidence" in record) == (method not in ("lvr-rl", "direct")), method
        found[method] = record
    latent = {method: record for method, record in found.items() if method != "direct"}
    policy = [record["loss/policy"] for record in latent.values()]
    assert policy == pytest.approx([policy[0]] * len(policy), abs=1e-12)  # the same rollouts
    assert found["realvr"]["evidence/has_wrong_answer"] > 0
    value = {method: record["loss/evidence"] for method, record in latent.items() if method != "lvr-rl"}
    same = {"realvr", "undetached", "off-policy", "custom"}  # off-policy: before the first update latents are the same
    for method in value:
        assert (value[method] == pytest.approx(value["realvr"], abs=1e-9)) == (method in same), method
    assert value["mass-matched-u±"] == pytest.approx(value["uniform"], abs=1e-9)  # both are 1/K
    assert len({round(v, 7) for v in value.values()}) == len(value) - 4
    norm = found["realvr"]["grad_norm"]
    for method in ("undetached", "off-policy"):
        assert found[method]["grad_norm"] != pytest.approx(norm, rel=1e-7), method
    assert found["custom"]["grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert found["lvr-rl"]["loss"] == pytest.approx(found["lvr-rl"]["loss/policy"], abs=1e-12)
    whole = found["realvr"]["loss/policy"] + 0.2 * found["realvr"]["loss/evidence"]
    assert found["realvr"]["loss"] == pytest.approx(whole, abs=1e-7)


def test_direct_has_no_span_and_needs_no_markers(plain: Path, data: Path, tmp_path: Path) -> None:
    raw = configure("rl", plain, data, tmp_path, method="direct")
    del raw["model"]["latents"]
    task, _, _ = make("rl", raw)
    micro = task.collect(0).microbatches[0]
    assert micro.latents_BKD.shape[1] == 0 and task.term_names == ("policy",)
    markers = task.backbone.markers
    assert not torch.isin(micro.batch.ids_BT, torch.tensor([markers.start, markers.slot, markers.end])).any()


@pytest.mark.parametrize("method", ["realvr", "lvr-rl"])
def test_latents_need_stage_one(method: str, plain: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train Stage 1 first"):
        make("rl", configure("rl", plain, data, tmp_path, method=method))


# ---------------------------------------------------------------------- every family


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_one_step_of_every_family(kind: str, family: str, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model = with_markers(checkpoint, tmp_path / "model") if kind == "rl" else checkpoint
    raw = configure(kind, model, data, tmp_path / "run", optim={"batch": 2}, group=2) if kind == "rl" else configure(
        kind, model, data, tmp_path / "run", optim={"batch": 1, "microbatch": 1}
    )  # fmt: skip
    task, settings, engine = make(kind, raw)
    engine.prepare(task.module, settings.optim)
    (micro,) = task.collect(0).microbatches
    loss, metrics = engine.forward(micro)
    engine.backward(loss)
    assert math.isfinite(loss.item()) and all(math.isfinite(float(value)) for value, _ in metrics.values())
    layers = [p for name, p in task.backbone.decoder.layers.named_parameters() if p.requires_grad]
    for parameter in layers:
        assert parameter.grad is not None and parameter.grad.isfinite().all()
    assert sum(bool(parameter.grad.any()) for parameter in layers) >= 0.8 * len(layers)
    for module in task.backbone.vision_modules():
        assert all(parameter.grad is None for parameter in module.parameters())
    before = weights(task)
    engine.step(1e-3)
    assert sum(not torch.equal(before[name], value) for name, value in weights(task).items()) > len(layers) / 2


def test_stage_one_without_latents_is_cross_entropy_only(plain: Path, data: Path, tmp_path: Path) -> None:
    """Direct-SFT: the same rows as Stage 1, no span, no reconstruction."""
    task, _, _ = make("sft", configure("sft", plain, data, tmp_path, model={"latents": 0}))
    (micro, *_) = task.collect(0).microbatches
    assert not bool(micro.slot_RT.any())
    markers = task.backbone.markers
    assert not bool(torch.isin(micro.ids_RT, torch.tensor([markers.start, markers.slot, markers.end])).any())
    loss, metrics = task.module(micro)
    assert float(loss.detach()) == pytest.approx(float(metrics["loss/next_token"][0]))
