"""Readouts, selective credit and weights against loops written from the paper's text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realvr.maths import credit, evidence

LAYERS, B, H, R, K, Y = 3, 2, 4, 6, 5, 3


def attention(*shape: int, seed: int = 0) -> Tensor:
    """Post-softmax rows towards the first ``shape[-1]`` of twice as many keys: they sum to less than 1."""
    scores = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.softmax(-1)[..., : shape[-1]]


def readouts(seed: int, slots: int = K) -> tuple[Tensor, Tensor]:
    """r+ and r- of the size that attention has."""
    return attention(B, slots, seed=seed), attention(B, slots, seed=seed + 1)


# Readout


def test_readout_is_the_mean_over_layers_heads_and_content() -> None:
    rows = attention(LAYERS, B, H, R, K)
    content = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    got = credit.readout(rows, content)
    for b in range(B):
        for t in range(K):
            values = []
            for layer in range(LAYERS):
                for head in range(H):
                    values += [rows[layer, b, head, j, t].item() for j in range(R) if content[b, j]]
            assert got[b, t].item() == pytest.approx(sum(values) / len(values), abs=1e-12)
    torch.testing.assert_close(credit.readout(rows.mean(2), content), got)


def test_readout_of_several_answers_side_by_side() -> None:
    rows = attention(LAYERS, B, H, Y * R, K)
    content = torch.rand(B, Y, R, generator=torch.Generator().manual_seed(1)) < 0.5
    content[..., 0] = True
    placed = torch.zeros(B, Y, Y * R, dtype=torch.bool)
    for y in range(Y):
        placed[:, y, y * R : (y + 1) * R] = content[:, y]
    got = credit.readout(rows, placed)
    assert got.shape == (B, Y, K)
    for y in range(Y):
        alone = credit.readout(rows[..., y * R : (y + 1) * R, :], content[:, y])
        torch.testing.assert_close(got[:, y], alone)


def test_readout_is_not_renormalised() -> None:
    rows = torch.full((1, 1, 1, 1, K), 0.01, dtype=torch.float64)
    assert credit.readout(rows, torch.ones(1, 1)).sum().item() == pytest.approx(0.05)


def test_readout_ignores_what_stands_outside_the_content() -> None:
    rows = attention(LAYERS, B, H, R, K)
    content = torch.zeros(B, R, dtype=torch.bool)
    content[:, 2] = True
    want = credit.readout(rows, content)
    rows[..., 3, :] = math.nan
    assert torch.equal(credit.readout(rows, content), want)


def test_readout_without_content_is_zero_and_connected() -> None:
    rows = attention(LAYERS, B, H, R, K).requires_grad_()
    got = credit.readout(rows, torch.zeros(B, R))
    assert not got.any()
    got.sum().backward()
    assert rows.grad is not None and not rows.grad.any()


def test_readout_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="attention rows are"):
        credit.readout(torch.zeros(B, R, K), torch.zeros(B, R))
    with pytest.raises(ValueError, match="does not fit"):
        credit.readout(torch.zeros(LAYERS, B, H, R, K), torch.zeros(B, R + 1))


def test_readout_of_half_precision_is_float32() -> None:
    rows = attention(LAYERS, B, H, R, K).to(torch.bfloat16)
    got = credit.readout(rows, torch.ones(B, R))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), credit.readout(rows.double(), torch.ones(B, R)), atol=1e-7, rtol=1e-6)


# Wrong answers


def test_mean_wrong_is_the_mean_over_valid_answers() -> None:
    r_pos, r_wrong = attention(3, K), attention(3, Y, K, seed=1)
    valid = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    got = credit.mean_wrong(r_pos, r_wrong, valid)
    for b in range(3):
        for t in range(K):
            kept = [r_wrong[b, y, t].item() for y in range(Y) if valid[b, y]]
            want = sum(kept) / len(kept) if kept else r_pos[b, t].item()
            assert got[b, t].item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("answers", [0, Y])
def test_no_wrong_answer_means_no_credit(answers: int) -> None:
    r_pos, r_wrong = attention(B, K), attention(B, answers, K, seed=1)
    r_neg = credit.mean_wrong(r_pos, r_wrong, torch.zeros(B, answers))
    gamma = credit.selective(r_pos, r_neg)
    assert not gamma.any()
    assert credit.weights(gamma, 0.3).tolist() == [[0.3 / K] * K] * B
    assert not credit.weights(gamma, 0.0).any()
    assert credit.raw(r_pos).equal(r_pos)


# Credit and weights


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("slots", [1, K])
def test_credit_weights_and_remainders(eta: float, slots: int) -> None:
    r_pos, r_neg = readouts(0, slots)
    gamma = credit.selective(r_pos, r_neg)
    w, q = credit.weights(gamma, eta), None if eta == 0 else credit.mass_matched(gamma, eta)
    for b in range(B):
        g = [max(r_pos[b, t].item() - r_neg[b, t].item(), 0.0) for t in range(slots)]
        want = [eta / slots + (1 - eta) * x for x in g]
        assert gamma[b].tolist() == pytest.approx(g, abs=1e-15)
        assert w[b].tolist() == pytest.approx(want, abs=1e-15)
        assert credit.unassigned(gamma)[b].item() == pytest.approx(1 - sum(g))
        assert credit.unassigned_weight(gamma, eta)[b].item() == pytest.approx((1 - eta) * (1 - sum(g)))
        if q is not None:
            bottom = eta + (1 - eta) * sum(g)
            assert q[b].tolist() == pytest.approx([x / bottom for x in want])


def test_uniform_endpoint_ignores_the_contrast() -> None:
    gamma = credit.selective(*readouts(0))
    assert credit.weights(gamma, 1.0).tolist() == [[1 / K] * K] * B
    assert credit.mass_matched_uniform(gamma).tolist() == [[1 / K] * K] * B
    torch.testing.assert_close(credit.mass_matched(gamma, 1.0), credit.mass_matched_uniform(gamma))


def test_normalised_credit_has_mass_one_and_the_weights_that_of_uniform_routing() -> None:
    """By hand; the second example has no credit. Any eta: the mass is that of uniform routing, which is 1."""
    gamma = torch.tensor([[0.0, 1e-6, 3e-6, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    shares = credit.normalised(gamma)
    assert shares.tolist() == [pytest.approx([0, 0.25, 0.75, 0]), pytest.approx([0.25] * 4)]
    uniform = credit.weights(gamma, 1.0)
    for eta in (0.0, 0.3, 1.0):
        w = credit.weights(shares, eta)
        assert w[0].tolist() == pytest.approx([eta / 4 + (1 - eta) * share for share in (0, 0.25, 0.75, 0)])
        assert w.sum(-1).tolist() == pytest.approx([1, 1]) and uniform.sum(-1).tolist() == pytest.approx([1, 1])
        assert credit.unassigned_weight(shares, eta).tolist() == pytest.approx([0, 0], abs=1e-12)
    # The paper's credit of this size leaves nearly nothing but the floor.
    assert credit.weights(gamma, 0.3).sum(-1).tolist() == pytest.approx([0.3, 0.3], abs=1e-5)


def test_normalised_credit_passes_gradients_where_there_is_credit() -> None:
    gamma = torch.tensor([[0.2, 0.1, 0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(credit.normalised, (gamma,))
    none = torch.zeros(1, 3, requires_grad=True)
    credit.normalised(none).square().sum().backward()
    assert none.grad is not None and none.grad.tolist() == [[0, 0, 0]]


def test_spread_says_how_far_weights_are_from_uniform() -> None:
    w = torch.tensor([[2.0, 2, 2, 2], [0, 0, 3, 0], [0, 0, 0, 0], [1, 3, 2, 2]])
    assert credit.spread(w).tolist() == pytest.approx([0, 0.75, 0, 0.125])


def test_the_share_that_routing_can_move() -> None:
    """The part of the total weight that is not the uniform baseline; both ends of eta, no credit, no weight at all."""
    gamma = torch.tensor([[0.1, 0.0, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-4, 2e-4, 0.0, 0.0]])
    sums = [0.3, 0.0, 3e-4]
    assert credit.movable(gamma, 0.3).tolist() == pytest.approx([0.7 * s / (0.3 + 0.7 * s) for s in sums], rel=1e-5)
    assert credit.movable(gamma, 1.0).tolist() == [0, 0, 0] and credit.movable(gamma, 0.0).tolist() == [1, 0, 1]
    by_hand = 1 - 0.3 / credit.weights(gamma, 0.3).sum(-1)
    assert credit.movable(gamma, 0.3).tolist() == pytest.approx(by_hand.tolist(), abs=1e-6)


def test_mass_matched_is_undefined_without_a_uniform_part() -> None:
    with pytest.raises(ValueError, match="eta > 0"):
        credit.mass_matched(torch.rand(B, K), 0.0)


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_eta_must_lie_in_the_unit_interval(eta: float) -> None:
    for function in (credit.weights, credit.mass_matched, credit.unassigned_weight, credit.movable):
        with pytest.raises(ValueError, match="eta must lie"):
            function(torch.rand(B, K), eta)


def test_no_slots_no_weights() -> None:
    for call in (lambda g: credit.weights(g, 0.3), credit.mass_matched_uniform, credit.normalised):
        with pytest.raises(ValueError, match="K = 0"):
            call(torch.zeros(B, 0))


def test_equal_readouts_pass_no_gradient() -> None:
    """The indicator of the appendix is strict: 1{r+ > r-}."""
    r_pos = torch.tensor([[0.1, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    credit.selective(r_pos, torch.tensor([[0.1, 0.1, 0.2]], dtype=torch.float64)).sum().backward()
    assert r_pos.grad is not None and r_pos.grad.tolist() == [[0.0, 1.0, 0.0]]


def test_gradcheck() -> None:
    rows = attention(LAYERS, B, H, R, K).requires_grad_()
    wrong = attention(B, Y, K, seed=1).requires_grad_()
    content = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    valid = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)

    def route(rows: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
        r_pos = credit.readout(rows, content)
        gamma = credit.selective(r_pos, credit.mean_wrong(r_pos, wrong, valid))
        return credit.weights(gamma, 0.3), credit.mass_matched(gamma, 0.3)

    assert torch.autograd.gradcheck(route, (rows, wrong))


# Properties

seeds, etas = st.integers(0, 10_000), st.floats(0, 1)


@settings(max_examples=60, deadline=None)
@given(seeds, etas, st.integers(1, 9))
def test_the_allocation_is_complete(seed: int, eta: float, slots: int) -> None:
    gamma = credit.selective(*readouts(seed, slots))
    total = credit.unassigned_weight(gamma, eta) + credit.weights(gamma, eta).sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert (credit.unassigned_weight(gamma, eta) >= -1e-12).all()
    mass = eta + (1 - eta) * gamma.sum(-1)
    torch.testing.assert_close(credit.weights(gamma, eta).sum(-1), mass)


@settings(max_examples=60, deadline=None)
@given(seeds, st.floats(1e-6, 1), st.integers(1, 9))
def test_mass_matched_weights_sum_to_one(seed: int, eta: float, slots: int) -> None:
    r_pos, r_neg = readouts(seed, slots)
    for gamma in (credit.selective(r_pos, r_neg), torch.zeros_like(r_pos)):
        for q in (credit.mass_matched(gamma, eta), credit.mass_matched_uniform(gamma)):
            torch.testing.assert_close(q.sum(-1), torch.ones(B, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(etas, st.integers(1, 9))
def test_without_credit_the_weights_are_uniform(eta: float, slots: int) -> None:
    got = credit.weights(torch.zeros(B, slots, dtype=torch.float64), eta)
    assert got.tolist() == [[eta / slots] * slots] * B


@settings(max_examples=40, deadline=None)
@given(seeds, etas, st.permutations(range(K)))
def test_weights_follow_the_slots(seed: int, eta: float, order: list[int]) -> None:
    r_pos, r_neg = readouts(seed)
    want = credit.weights(credit.selective(r_pos, r_neg), eta)[:, order]
    torch.testing.assert_close(credit.weights(credit.selective(r_pos[:, order], r_neg[:, order]), eta), want)


@settings(max_examples=40, deadline=None)
@given(seeds, st.permutations(range(Y)))
def test_the_order_of_wrong_answers_does_not_matter(seed: int, order: list[int]) -> None:
    r_pos, r_wrong = attention(B, K, seed=seed), attention(B, Y, K, seed=seed + 1)
    valid = torch.rand(B, Y, generator=torch.Generator().manual_seed(seed)) < 0.6
    want = credit.mean_wrong(r_pos, r_wrong, valid)
    torch.testing.assert_close(credit.mean_wrong(r_pos, r_wrong[:, order], valid[:, order]), want)


# The gradient decomposition of app:detached-credit, on a small model: theta makes both the latents and the attention.

ETA, TARGET, D = 0.3, 0.5, 4


class Toy:
    """A differentiable stand-in for "latents and readouts of the current model", with fixed prototypes and answers."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.theta = torch.randn(D, D, generator=g, dtype=torch.float64, requires_grad=True)
        self.x = torch.randn(B, K, D, generator=g, dtype=torch.float64)
        self.positive = torch.randn(B, D, generator=g, dtype=torch.float64)
        self.negatives = torch.randn(B, 3, D, generator=g, dtype=torch.float64)
        self.queries = torch.randn(B, 1 + Y, D, generator=g, dtype=torch.float64)
        self.valid = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)

    def z(self) -> Tensor:
        return torch.tanh(self.x @ self.theta)

    def gamma(self) -> Tensor:
        rows = (self.queries @ self.theta @ self.z().transpose(1, 2)).softmax(-1) * 0.8
        return credit.selective(rows[:, 0], credit.mean_wrong(rows[:, 0], rows[:, 1:], self.valid))

    def loss(self, detach: bool) -> Tensor:
        weights = credit.weights(self.gamma(), ETA)
        return evidence.loss(self.z(), self.positive, self.negatives, weights, TARGET, detach=detach).sum()


def slow_terms(toy: Toy) -> tuple[Tensor, Tensor]:
    """sum_t w_t grad h_t and sum_t h_t grad w_t, each h_t and w_t differentiated alone."""
    cosine = torch.nn.functional.cosine_similarity
    margin_term, router_term = torch.zeros(D, D).double(), torch.zeros(D, D).double()
    for b in range(B):
        for t in range(K):
            z, gamma = toy.z()[b, t], toy.gamma()[b, t]
            hardest = max((cosine(z, n, dim=0) for n in toy.negatives[b]), key=lambda c: c.item())
            h = torch.relu(TARGET - (cosine(z, toy.positive[b], dim=0) - hardest))
            w = ETA / K + (1 - ETA) * gamma
            margin_term += w.item() * torch.autograd.grad(h, toy.theta, retain_graph=True)[0]
            router_term += h.item() * torch.autograd.grad(w, toy.theta)[0]
    return margin_term, router_term


def test_undetached_gradient_is_detached_plus_router_term() -> None:
    toy = Toy()
    margin_term, router_term = slow_terms(toy)
    assert router_term.abs().max() > 1e-3  # there is something to tell apart
    (detached,) = torch.autograd.grad(toy.loss(detach=True), toy.theta)
    (undetached,) = torch.autograd.grad(toy.loss(detach=False), toy.theta)
    torch.testing.assert_close(detached, margin_term)
    torch.testing.assert_close(undetached, margin_term + router_term)
    assert toy.loss(detach=True).item() == toy.loss(detach=False).item()


def test_derivative_by_the_weight_is_the_violation() -> None:
    toy = Toy()
    weights = credit.weights(toy.gamma().detach(), ETA).requires_grad_()
    evidence.loss(toy.z(), toy.positive, toy.negatives, weights, TARGET, detach=False).sum().backward()
    h = evidence.violation(evidence.margin(toy.z(), toy.positive, toy.negatives), TARGET)
    torch.testing.assert_close(weights.grad, h.detach())
    assert weights.grad is not None and (weights.grad >= 0).all()


def test_undetached_loss_against_finite_differences() -> None:
    toy = Toy()

    def undetached(theta: Tensor) -> Tensor:
        toy.theta = theta
        return toy.loss(detach=False)

    assert torch.autograd.gradcheck(undetached, (toy.theta,))
