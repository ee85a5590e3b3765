"""Prototypes, margins and evidence losses against loops written from the paper's text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realvr.maths import evidence

B, K, D, M, N = 3, 4, 5, 6, 7


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b)))


def slow_pool(tokens: list[list[float]], mask: list[float], eps: float) -> list[float]:
    if all(a == 0 for a in mask):
        mask = [1.0] * len(mask)
    out = []
    for d in range(len(tokens[0])):
        top = bottom = 0.0
        for n in range(len(tokens)):
            top += mask[n] * tokens[n][d]
            bottom += mask[n]
        out.append(top / (bottom + eps))
    return out


def slow_margin(z: list[list[float]], positive: list[float], negatives: list[list[float]]) -> list[float]:
    return [slow_cosine(t, positive) - max(slow_cosine(t, n) for n in negatives) for t in z]


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents, positives, negatives, weights."""
    z, positive, negatives = (
        normal(*s, seed=seed + i, dtype=dtype) for i, s in enumerate([(B, K, D), (B, D), (B, M, D)])
    )
    return z, positive, negatives, normal(B, K, seed=seed + 9).abs().to(dtype)


# Prototypes


@pytest.mark.parametrize(
    "mask",
    [
        [0, 1, 1, 0, 0, 0, 1],
        [0.25, 0, 0.5, 1, 0, 0, 0.125],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ],
)
def test_pool_is_the_masked_mean(mask: list[float]) -> None:
    tokens = normal(N, D)
    got = evidence.pool(tokens, torch.tensor(mask, dtype=torch.float64), eps=1e-3)
    assert got.tolist() == pytest.approx(slow_pool(tokens.tolist(), mask, 1e-3), abs=1e-12)


def test_pool_without_a_region_is_the_whole_image() -> None:
    tokens = normal(N, D)
    torch.testing.assert_close(evidence.pool(tokens), tokens.mean(0), atol=1e-5, rtol=1e-5)
    assert torch.equal(evidence.pool(tokens), evidence.pool(tokens, torch.zeros(N, dtype=torch.bool)))
    assert torch.equal(evidence.pool(tokens), evidence.pool(tokens, torch.ones(N, dtype=torch.bool)))


def test_pool_of_no_tokens_is_zero() -> None:
    assert evidence.pool(torch.zeros(0, D), torch.zeros(0)).tolist() == [0.0] * D


@pytest.mark.parametrize("mask", [[-0.5, 0.5], [2.0, 0.0], [math.nan, 0.0]])
def test_pool_rejects_values_outside_the_unit_interval(mask: list[float]) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        evidence.pool(normal(2, D), torch.tensor(mask))


def test_pool_rejects_a_mask_of_another_image() -> None:
    with pytest.raises(ValueError, match="does not fit 7"):
        evidence.pool(normal(N, D), torch.ones(N + 1))


def test_pool_of_half_precision_accumulates_in_float32() -> None:
    tokens = torch.full((5000, 2), 1.0, dtype=torch.bfloat16)
    assert evidence.pool(tokens).dtype == torch.float32
    torch.testing.assert_close(evidence.pool(tokens), torch.ones(2))


# Margins


def test_margin_is_positive_minus_hardest_negative() -> None:
    z, positive, negatives, _ = batch()
    got = evidence.margin(z, positive, negatives)
    for b in range(B):
        want = slow_margin(z[b].tolist(), positive[b].tolist(), negatives[b].tolist())
        assert got[b].tolist() == pytest.approx(want, abs=1e-12)


def test_each_latent_may_have_prototypes_of_its_own() -> None:
    """Latent t against the t-th positive and the t-th of each negative. A zero vector undefines that latent alone."""
    z, _, _, weights = batch()
    positive, negatives = normal(B, K, D, seed=7), normal(B, M, K, D, seed=8)
    valid = torch.ones(B, M, dtype=torch.bool)
    valid[0, 1:], positive[1, 2], negatives[2, :, 0] = False, 0, 0
    got = evidence.margin(z, positive, negatives, valid)
    assert evidence.defined(positive, negatives, valid).tolist() == [
        [not (b == 1 and t == 2) and not (b == 2 and t == 0) for t in range(K)] for b in range(B)
    ]
    total = [0.0] * B
    for b in range(B):
        for t in range(K):
            kept = [negatives[b, m, t].tolist() for m in range(M) if valid[b, m] and negatives[b, m, t].any()]
            there = kept and positive[b, t].any()
            (want,) = slow_margin([z[b, t].tolist()], positive[b, t].tolist(), kept) if there else (0.0,)
            assert got[b, t].item() == pytest.approx(want, abs=1e-12)
            total[b] += weights[b, t].item() * max(0.5 - want, 0) if there else 0
    assert evidence.loss(z, positive, negatives, weights, 0.5, valid).tolist() == pytest.approx(total)
    same = batch()[1]
    repeated = same[:, None].expand(B, K, D)
    for loss in (evidence.alignment_loss, lambda *given: evidence.positive_loss(*given, 0.5)):
        torch.testing.assert_close(loss(z, repeated, weights), loss(z, same, weights), rtol=0, atol=0)


def test_margin_ignores_invalid_and_zero_negatives() -> None:
    z, positive, negatives, _ = batch()
    valid = torch.rand(B, M, generator=torch.Generator().manual_seed(3)) < 0.5
    valid[:, 0] = True
    negatives[:, 1] = 0
    got = evidence.margin(z, positive, negatives, valid)
    for b in range(B):
        kept = [negatives[b, s].tolist() for s in range(M) if valid[b, s] and s != 1]
        assert got[b].tolist() == pytest.approx(slow_margin(z[b].tolist(), positive[b].tolist(), kept), abs=1e-12)


def test_margin_of_a_zero_negative_is_not_a_cosine_of_zero() -> None:
    """All real negatives point away: a zero negative that counted as cosine 0 would be the hardest."""
    z = torch.tensor([[[1.0, 0.0]]])
    negatives = torch.tensor([[[-1.0, 0.0], [0.0, 0.0]]])
    assert evidence.margin(z, torch.tensor([[1.0, 0.0]]), negatives).item() == 2.0


def test_margin_with_one_negative_and_one_slot() -> None:
    z, positive, negatives, _ = batch()
    got = evidence.margin(z[:, :1], positive, negatives[:, :1])
    assert got.shape == (B, 1)
    for b in range(B):
        want = slow_margin(z[b, :1].tolist(), positive[b].tolist(), negatives[b, :1].tolist())
        assert got[b].tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("size", [0, 2])
def test_margin_without_negatives_is_zero_and_connected(size: int) -> None:
    z, positive, negatives, _ = batch()
    z.requires_grad_()
    valid = torch.zeros(B, size, dtype=torch.bool)
    got = evidence.margin(z, positive, negatives[:, :size], valid)
    assert got.tolist() == [[0.0] * K] * B
    assert not evidence.defined(positive, negatives[:, :size], valid).any()
    got.sum().backward()
    assert z.grad is not None and not z.grad.any()


def test_cosine_runs_over_the_hidden_dimension() -> None:
    """With D = K a cosine over positions would have the right shape and the wrong values."""
    z, positive = normal(2, D, D), normal(2, D, seed=1)
    got = evidence.similarity(z, positive)
    for b in range(2):
        for t in range(D):
            assert got[b, t].item() == pytest.approx(slow_cosine(z[b, t].tolist(), positive[b].tolist()), abs=1e-12)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_cosine_survives_extreme_sizes_in_float32(size: float) -> None:
    z, positive, _, _ = batch(dtype=torch.float32)
    want = evidence.similarity(z, positive)
    z_scaled = (z * size).requires_grad_()
    got = evidence.similarity(z_scaled, positive / size)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    got.sum().backward()
    assert torch.isfinite(z_scaled.grad).all()  # type: ignore[arg-type]


def test_zero_latent_has_cosine_and_gradient_zero() -> None:
    z, positive, negatives, weights = batch()
    z[0, 1] = 0
    z.requires_grad_()
    assert evidence.similarity(z, positive)[0, 1].item() == 0.0
    evidence.loss(z, positive, negatives, weights, 2.0).sum().backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()
    assert not z.grad[0, 1].any() and z.grad[0, 0].any()


def test_a_latent_that_is_not_a_number_is_not_hidden() -> None:
    z, positive, negatives, weights = batch()
    z[0, 1, 2] = math.nan
    assert torch.isnan(evidence.loss(z, positive, negatives, weights, 0.5)).tolist() == [True, False, False]


# Losses


@pytest.mark.parametrize("target", [0.1, 0.5, 2.0])
def test_loss_is_the_weighted_hinge(target: float) -> None:
    z, positive, negatives, weights = batch()
    got = evidence.loss(z, positive, negatives, weights, target)
    for b in range(B):
        total = 0.0
        for t, g in enumerate(slow_margin(z[b].tolist(), positive[b].tolist(), negatives[b].tolist())):
            total += weights[b, t].item() * max(target - g, 0.0)
        assert got[b].item() == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("target", [0.1, 0.5, 2.0])
def test_positive_losses_are_hinge_and_plain_alignment(target: float) -> None:
    z, positive, _, weights = batch()
    hinge = evidence.positive_loss(z, positive, weights, target)
    plain = evidence.alignment_loss(z, positive, weights)
    for b in range(B):
        cosines = [slow_cosine(t, positive[b].tolist()) for t in z[b].tolist()]
        pairs = list(zip(weights[b].tolist(), cosines, strict=True))
        assert hinge[b].item() == pytest.approx(sum(w * max(target - c, 0.0) for w, c in pairs), abs=1e-12)
        assert plain[b].item() == pytest.approx(sum(w * (1 - c) for w, c in pairs), abs=1e-12)


def test_examples_without_a_margin_contribute_exactly_zero() -> None:
    z, positive, negatives, weights = batch()
    positive[0] = 0
    valid = torch.ones(B, M, dtype=torch.bool)
    valid[1] = False
    z.requires_grad_()
    losses = evidence.loss(z, positive, negatives, weights, 0.5, valid)
    assert losses[:2].tolist() == [0.0, 0.0] and losses[2] > 0
    losses.sum().backward()
    assert z.grad is not None and not z.grad[:2].any() and z.grad[2].any()
    assert evidence.defined(positive, negatives, valid).tolist() == [False, False, True]


def test_positive_losses_need_a_prototype_but_no_negative() -> None:
    z, positive, _, weights = batch()
    positive[0] = 0
    z.requires_grad_()
    for losses in (evidence.positive_loss(z, positive, weights, 0.5), evidence.alignment_loss(z, positive, weights)):
        assert losses[0].item() == 0.0 and (losses[1:] > 0).all()
        (gradient,) = torch.autograd.grad(losses.sum(), z)
        assert not gradient[0].any() and gradient[1:].any()


def test_hinge_at_the_tie_is_flat() -> None:
    """g_t = m exactly: no loss, and 1{g_t < m} = 0 lets no gradient through."""
    score = torch.tensor([[0.5, 0.25, 0.75]], dtype=torch.float64, requires_grad=True)
    h = evidence.violation(score, 0.5)
    assert h.tolist() == [[0.0, 0.25, 0.0]]
    h.sum().backward()
    assert score.grad is not None and score.grad.tolist() == [[0.0, -1.0, 0.0]]


def test_tied_negatives_share_the_gradient() -> None:
    negatives = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)
    evidence.margin(z, torch.tensor([[1.0, 0.0]], dtype=torch.float64), negatives).sum().backward()
    assert negatives.grad is not None
    torch.testing.assert_close(negatives.grad[0, 0], negatives.grad[0, 1].flip(0))


@pytest.mark.parametrize("target", [0.0, -0.5, 2.1, math.nan])
def test_target_margin_must_be_sensible(target: float) -> None:
    z, positive, negatives, weights = batch()
    with pytest.raises(ValueError, match="target margin"):
        evidence.loss(z, positive, negatives, weights, target)


def test_weights_of_another_shape_are_refused() -> None:
    z, positive, negatives, weights = batch()
    with pytest.raises(ValueError, match="do not fit"):
        evidence.loss(z, positive, negatives, weights[:, :1], 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_number_formats(dtype: torch.dtype) -> None:
    z, positive, negatives, weights = batch(dtype=dtype)
    got = evidence.loss(z, positive, negatives, weights, 0.5)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want = evidence.loss(z.double(), positive.double(), negatives.double(), weights.double(), 0.5)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_autocast_does_not_coarsen_the_loss() -> None:
    z, positive, negatives, weights = batch(dtype=torch.float32)
    want = evidence.loss(z, positive, negatives, weights, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evidence.loss(z, positive, negatives, weights, 0.5)
    assert torch.equal(got, want)


# Gradients


def test_gradcheck() -> None:
    z, positive, negatives, weights = batch()
    z.requires_grad_()
    weights.requires_grad_()
    valid = torch.ones(B, M, dtype=torch.bool)
    valid[1, 2:] = False
    assert torch.autograd.gradcheck(lambda x: evidence.similarity(x, positive), (z,))
    assert torch.autograd.gradcheck(lambda x: evidence.margin(x, positive, negatives, valid), (z,))
    assert torch.autograd.gradcheck(
        lambda x, w: evidence.loss(x, positive, negatives, w, 0.5, valid, detach=False), (z, weights)
    )
    assert torch.autograd.gradcheck(
        lambda x, w: evidence.positive_loss(x, positive, w, 0.5, detach=False), (z, weights)
    )
    assert torch.autograd.gradcheck(lambda x, w: evidence.alignment_loss(x, positive, w, detach=False), (z, weights))


def test_weights_and_prototypes_are_constants() -> None:
    z, positive, negatives, weights = (x.requires_grad_() for x in batch())
    losses = evidence.loss(z, positive, negatives, weights, 0.5).sum()
    losses = losses + evidence.positive_loss(z, positive, weights, 0.5).sum()
    losses = losses + evidence.alignment_loss(z, positive, weights).sum()
    gradients = torch.autograd.grad(losses, (z, positive, negatives, weights), allow_unused=True)
    assert gradients[0] is not None and gradients[1:] == (None, None, None)


# Properties

seeds = st.integers(0, 10_000)


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_margin_does_not_depend_on_scale(seed: int, a: float, b: float) -> None:
    z, positive, negatives, _ = batch(seed)
    want = evidence.margin(z, positive, negatives)
    torch.testing.assert_close(evidence.margin(a * z, b * positive, a * negatives), want, atol=1e-10, rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_margin_does_not_depend_on_the_order_of_negatives(seed: int) -> None:
    z, positive, negatives, _ = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(B, M, generator=generator) < 0.6
    order = torch.randperm(M, generator=generator)
    want = evidence.margin(z, positive, negatives, valid)
    torch.testing.assert_close(evidence.margin(z, positive, negatives[:, order], valid[:, order]), want)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_loss_moves_with_slots_and_examples(seed: int) -> None:
    """Slots with their weights may change places; examples do not see each other."""
    z, positive, negatives, weights = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    slots, examples = torch.randperm(K, generator=generator), torch.randperm(B, generator=generator)
    want = evidence.loss(z, positive, negatives, weights, 0.5)
    torch.testing.assert_close(evidence.loss(z[:, slots], positive, negatives, weights[:, slots], 0.5), want)
    moved = evidence.loss(z[examples], positive[examples], negatives[examples], weights[examples], 0.5)
    torch.testing.assert_close(moved, want[examples])


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.01, 2))
def test_loss_is_bounded(seed: int, target: float) -> None:
    """-2 <= g <= 2, so that 0 <= loss <= (m + 2) sum of weights."""
    z, positive, negatives, weights = batch(seed)
    losses = evidence.loss(z, positive, negatives, weights, target)
    assert (losses >= 0).all() and (losses <= (target + 2) * weights.sum(-1) + 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(seeds, st.permutations(range(N)))
def test_pool_does_not_depend_on_the_order_of_tokens(seed: int, order: list[int]) -> None:
    tokens = normal(N, D, seed=seed)
    mask = torch.rand(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(evidence.pool(tokens[order], mask[order]), evidence.pool(tokens, mask))


def test_the_batch_mean_divides_by_the_examples_of_the_step() -> None:
    losses = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    assert evidence.batch_mean(losses).item() == pytest.approx(2.0)
    assert evidence.batch_mean(losses, 12.0).item() == pytest.approx(0.5)
    assert evidence.batch_mean(losses[:0]).item() == 0.0
