"""Advantages and the clipped objective against loops written from their definitions, and against TRL."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trl_oracle
from optional import need_package
from realvr.maths import grpo

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "trl_grpo.json").read_text())
B, G, S = 2, 3, 5
LIMIT = 6
REDUCTIONS: tuple[grpo.Reduction, ...] = ("grpo", "dr_grpo", "bnpo")


def batch(seed: int = 0, shift: float = 0.5, shape: tuple[int, ...] = (B, G, S)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old, new, ref = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=generator)
    return {
        "logp": -old.abs() + shift * new,
        "old_logp": -old.abs(),
        "advantages": torch.randn(shape[:-1], generator=generator, dtype=torch.float64),
        "mask": torch.arange(shape[-1]) < lengths[..., None],
        "ref_logp": -old.abs() + shift * ref,
    }


# Advantages


@pytest.mark.parametrize("eps", [1e-4, 0.5])
def test_advantages_are_standardised_within_the_group(eps: float) -> None:
    rewards = torch.tensor([[2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    got = grpo.advantages(rewards, eps)
    for p, group in enumerate(rewards.tolist()):
        mean, std = statistics.mean(group), statistics.stdev(group)
        assert got[p].tolist() == pytest.approx([(r - mean) / (std + eps) for r in group], abs=1e-12)
        plain = grpo.advantages(rewards, scale=False)[p].tolist()
        assert plain == pytest.approx([r - mean for r in group], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e6])
def test_a_group_without_variance_has_no_advantage(reward: float) -> None:
    """Exactly none: the mean of equal numbers need not equal them, and the rounding would be divided by 1e-4."""
    rewards = torch.full((1, 7), reward)
    assert not grpo.advantages(rewards).any()
    assert not grpo.varied(rewards).any()


def test_a_single_completion_has_no_advantage() -> None:
    assert grpo.advantages(torch.tensor([[3.0], [0.0]])).tolist() == [[0.0], [0.0]]


def test_a_reward_that_is_not_a_number_is_not_hidden() -> None:
    got = grpo.advantages(torch.tensor([[1.0, math.nan], [1.0, 0.0], [math.inf, math.inf]]))
    assert torch.isnan(got[0]).all() and torch.isfinite(got[1]).all() and torch.isnan(got[2]).all()


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="without completions"):
        grpo.advantages(torch.zeros(2, 0))


def test_advantages_of_integers_and_number_formats() -> None:
    rewards = torch.tensor([[0, 1, 1, 2]])
    want = grpo.advantages(rewards.double())
    assert want.dtype == torch.float64
    for dtype in (torch.long, torch.bfloat16, torch.float32):
        got = grpo.advantages(rewards.to(dtype))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(-5, 5), st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_order_or_offset(rewards: list[float], offset: float, random: Any) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    x = torch.tensor([rewards], dtype=torch.float64)
    torch.testing.assert_close(grpo.advantages(x[:, order]), grpo.advantages(x)[:, order])
    assert grpo.advantages(x).sum().item() == pytest.approx(0, abs=1e-6)
    spread = max(rewards) - min(rewards)
    if spread > 1e-3:  # an offset must not round the spread away
        torch.testing.assert_close(grpo.advantages(x + offset), grpo.advantages(x), atol=1e-7, rtol=1e-7)


# The objective


def slow_objective(logp: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * advantage, clipped * advantage)


def slow_loss(x: dict[str, Tensor], reduction: str, beta: float, low: float, high: float) -> float:
    """Loops over prompts, completions and tokens."""
    sequences, tokens = [], []
    for b in range(B):
        for g in range(G):
            values = []
            for s in range(S):
                if x["mask"][b, g, s]:
                    logp, old, ref = (x[k][b, g, s].item() for k in ("logp", "old_logp", "ref_logp"))
                    kl = math.exp(ref - logp) - (ref - logp) - 1
                    values.append(-slow_objective(logp, old, x["advantages"][b, g].item(), low, high) + beta * kl)
            tokens += values
            sequences.append(sum(values) / len(values))
    if reduction == "grpo":
        return sum(sequences) / len(sequences)
    return sum(tokens) / (len(tokens) if reduction == "bnpo" else B * G * LIMIT)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("beta", "low", "high"), [(0.0, 0.2, 0.2), (0.1, 0.2, 0.2), (0.0, 0.1, 0.3)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_loss_against_loops(reduction: grpo.Reduction, beta: float, low: float, high: float, shift: float) -> None:
    x = batch(shift=shift)
    got = grpo.loss(**x, clip=low, clip_high=high, reduction=reduction, max_length=LIMIT, beta=beta)
    assert got.item() == pytest.approx(slow_loss(x, reduction, beta, low, high), abs=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 2.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 1.5])
def test_token_objective_on_every_side_of_the_clip(ratio: float, advantage: float) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64)
    got = grpo.token_objective(logp, torch.zeros(1).double(), torch.tensor(advantage, dtype=torch.float64))
    assert got.item() == pytest.approx(slow_objective(math.log(ratio), 0.0, advantage, 0.2, 0.2), abs=1e-12)


def test_first_update_has_the_plain_policy_gradient() -> None:
    """At ratio 1 the gradient of the objective is A grad log p, also where the value cancels."""
    x = batch(shift=0.0)
    logp = x["logp"].requires_grad_()
    grpo.token_objective(logp, x["old_logp"], x["advantages"]).sum().backward()
    torch.testing.assert_close(logp.grad, x["advantages"][..., None].expand(B, G, S))


def test_clipped_tokens_have_no_gradient_even_if_the_ratio_overflows() -> None:
    logp = torch.tensor([500.0, 0.0], requires_grad=True)
    loss = grpo.loss(logp, torch.zeros(2), torch.tensor(1.0), torch.ones(2), reduction="bnpo")
    assert loss.item() == pytest.approx(-(1.2 + 1.0) / 2)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [0.0, -0.5]


def test_kl_is_accurate_near_zero() -> None:
    """exp(d) - d - 1 is d^2 / 2; the plain formula in float32 gives 0 or worse."""
    d = 1e-3
    got = grpo.token_kl(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.0 + d], dtype=torch.float64))
    assert got.item() == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-6)
    logp, step = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (grpo.token_kl(logp, logp + 1e-4 * step) >= 0).all()
    assert not grpo.token_kl(logp, logp).any()


def test_clip_fraction_counts_tokens_without_gradient() -> None:
    x = batch(shift=0.7)
    logp = x["logp"].requires_grad_()
    loss = grpo.loss(logp, x["old_logp"], x["advantages"], x["mask"])
    (gradient,) = torch.autograd.grad(loss, logp)
    want = ((gradient == 0) & x["mask"]).sum() / x["mask"].sum()
    got = grpo.clip_fraction(logp, x["old_logp"], x["advantages"], x["mask"])
    assert 0 < got.item() < 1 and got.item() == pytest.approx(want.item())
    assert not got.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_may_hold_anything(reduction: grpo.Reduction) -> None:
    x = batch()
    options: dict[str, Any] = {"reduction": reduction, "max_length": LIMIT, "beta": 0.1}
    want = grpo.loss(**x, **options)
    fraction = grpo.clip_fraction(*(x[k] for k in ("logp", "old_logp", "advantages", "mask")))
    for key, junk in (("logp", math.nan), ("old_logp", -math.inf), ("ref_logp", math.inf)):
        x[key][~x["mask"]] = junk
    x["logp"].requires_grad_()
    got = grpo.loss(**x, **options)
    assert torch.equal(got, want)
    assert torch.equal(grpo.clip_fraction(*(x[k] for k in ("logp", "old_logp", "advantages", "mask"))), fraction)
    got.backward()
    gradient = x["logp"].grad
    assert gradient is not None and torch.isfinite(gradient).all() and not gradient[~x["mask"]].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(B, G, S), (B, G, 0), (1, 1, S)])
def test_nothing_generated_is_zero_and_connected(reduction: grpo.Reduction, shape: tuple[int, ...]) -> None:
    logp = torch.randn(shape, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss = grpo.loss(
        logp,
        logp.detach(),
        torch.ones(shape[:-1]),
        mask,
        reduction=reduction,
        max_length=LIMIT,
        beta=0.1,
        ref_logp=logp,
    )
    assert loss.item() == 0.0
    loss.backward()
    assert logp.grad is not None and not logp.grad.any()
    assert grpo.clip_fraction(logp, logp, torch.ones(shape[:-1]), mask).item() == 0.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_accumulated_parts_equal_the_whole(reduction: grpo.Reduction) -> None:
    x = batch()
    options: dict[str, Any] = {"reduction": reduction, "max_length": LIMIT, "beta": 0.1}
    parts = [{k: v[b : b + 1] for k, v in x.items()} for b in range(B)]
    total = torch.stack([grpo.normalizer(p["mask"], reduction, LIMIT) for p in parts]).sum()
    assert torch.equal(total, grpo.normalizer(x["mask"], reduction, LIMIT))
    got = torch.stack([grpo.loss(**p, **options, denominator=total) for p in parts]).sum()
    torch.testing.assert_close(got, grpo.loss(**x, **options))
    # Ranks average their gradients: each divides by its share of the count, which may be a fraction.
    tenth = grpo.loss(**x, **options, denominator=total / 1000)
    torch.testing.assert_close(tenth, 1000 * grpo.loss(**x, **options))


def test_old_and_reference_policies_and_advantages_are_constants() -> None:
    x = {k: v if k == "mask" else v.requires_grad_() for k, v in batch().items()}
    names = ("logp", "old_logp", "advantages", "ref_logp")
    gradients = torch.autograd.grad(grpo.loss(**x, beta=0.1), [x[k] for k in names], allow_unused=True)
    assert gradients[0] is not None and gradients[1:] == (None, None, None)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(reduction: grpo.Reduction) -> None:
    x = batch()
    logp = x.pop("logp").requires_grad_()
    options: dict[str, Any] = {"reduction": reduction, "max_length": LIMIT, "beta": 0.1}
    assert torch.autograd.gradcheck(lambda y: grpo.loss(y, **x, **options), (logp,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_number_formats(dtype: torch.dtype) -> None:
    x = {k: v if k == "mask" else v.to(dtype) for k, v in batch().items()}
    got = grpo.loss(**x, beta=0.1)
    assert got.dtype == torch.float32 and grpo.loss(**batch()).dtype == torch.float64
    want = grpo.loss(**{k: v if k == "mask" else v.double() for k, v in x.items()}, beta=0.1)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_settings_that_make_no_sense_are_refused() -> None:
    x = batch()
    with pytest.raises(ValueError, match="unknown reduction 'dapo'"):
        grpo.loss(**x, reduction="dapo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_length"):
        grpo.loss(**x, reduction="dr_grpo")
    with pytest.raises(ValueError, match="clip range"):
        grpo.loss(**x, clip=1.0)
    x.pop("ref_logp")
    with pytest.raises(ValueError, match="reference policy"):
        grpo.loss(**x, beta=0.1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(REDUCTIONS), st.permutations(range(G)))
def test_the_order_of_completions_does_not_matter(seed: int, reduction: grpo.Reduction, order: list[int]) -> None:
    x = batch(seed)
    want = grpo.loss(**x, reduction=reduction, max_length=LIMIT)
    moved = {k: v[:, order] for k, v in x.items()}
    torch.testing.assert_close(grpo.loss(**moved, reduction=reduction, max_length=LIMIT), want)


# TRL


def compare(case: dict[str, Any], reduction: grpo.Reduction, theirs: dict[str, Any]) -> None:
    """Loss, gradient, clip fraction and KL of one case."""
    logp = case["logp"].clone().requires_grad_()
    rest = [case[k] for k in ("old_logp", "advantages", "mask")]
    bounds = {"clip": case["clip"], "clip_high": case["clip_high"]}
    loss = grpo.loss(
        logp,
        *rest,
        **bounds,
        beta=case["beta"],
        ref_logp=case["ref_logp"],
        reduction=reduction,
        max_length=trl_oracle.MAX_LENGTH,
    )
    loss.backward()
    assert loss.item() == pytest.approx(theirs["loss"], abs=1e-12)
    torch.testing.assert_close(logp.grad, torch.tensor(theirs["gradient"], dtype=torch.float64))
    assert grpo.clip_fraction(logp, *rest, **bounds).item() == pytest.approx(theirs["clip_fraction"], abs=1e-6)
    if theirs["kl"] is not None:
        kl = grpo.reduce(grpo.token_kl(logp, case["ref_logp"]), case["mask"], "bnpo")
        assert kl.item() == pytest.approx(theirs["kl"], abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", trl_oracle.CASES)
def test_loss_equals_the_recorded_loss_of_trl(name: str, reduction: grpo.Reduction) -> None:
    recorded = GOLDEN[name]["inputs"]
    case = {
        k: v if not isinstance(v, list) else torch.tensor(v, dtype=torch.bool if k == "mask" else torch.float64)
        for k, v in recorded.items()
    }
    compare(case, reduction, GOLDEN[name][reduction])


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_the_recorded_ones_of_trl(scale: bool) -> None:
    recorded = GOLDEN["advantages"]
    got = grpo.advantages(torch.tensor(recorded["rewards"]), scale=scale)
    torch.testing.assert_close(got, torch.tensor(recorded["scaled" if scale else "unscaled"]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", trl_oracle.CASES)
def test_loss_equals_that_of_trl(name: str, reduction: grpo.Reduction) -> None:
    need_package("trl")
    case = trl_oracle.tensors(name)
    compare(case, reduction, trl_oracle.loss(case, reduction))


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_those_of_trl(scale: bool) -> None:
    need_package("trl")
    got = grpo.advantages(torch.tensor(trl_oracle.REWARDS), scale=scale)
    torch.testing.assert_close(got, torch.tensor(trl_oracle.advantages(scale)))
