"""Stage-1 losses against loops written from the paper's text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realvr.maths import objective
from realvr.maths import reconstruction as stage1

D = 4
EXAMPLES = torch.tensor([0, 0, 0, 2, 2, 3])  # example 1 has no region, example 3 has one target


def pairs(n: int = len(EXAMPLES), seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x[0].to(dtype), x[1].to(dtype)


def slow(states: Tensor, targets: Tensor, example: int, per_dimension: bool) -> float:
    """(1/T_v) sum_t ||z_t - v_t||^2, or with the norm replaced by a mean over dimensions."""
    norms = []
    for n, owner in enumerate(EXAMPLES.tolist()):
        if owner == example:
            squares = [(states[n, d].item() - targets[n, d].item()) ** 2 for d in range(D)]
            norms.append(sum(squares) / D if per_dimension else sum(squares))
    return sum(norms) / len(norms) if norms else 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reconstruction_per_example_and_mean(reduction: stage1.Reduction) -> None:
    states, targets = pairs()
    want = [slow(states, targets, e, reduction == "mean") for e in range(4)]
    assert stage1.per_example(states, targets, EXAMPLES, 4, reduction).tolist() == pytest.approx(want)
    got = stage1.reconstruction(states, targets, EXAMPLES, 4, reduction).item()
    assert got == pytest.approx(sum(want) / 3)  # three of the four have targets


def test_the_two_reductions_differ_by_the_width() -> None:
    states, targets = pairs()
    mean, total = (stage1.reconstruction(states, targets, EXAMPLES, 4, r) for r in ("mean", "sum"))
    assert total.item() == pytest.approx(D * mean.item())
    assert stage1.reconstruction(states, targets, EXAMPLES, 4).equal(mean)


def test_no_target_at_all_is_zero_and_connected() -> None:
    states, targets = pairs(0)
    states.requires_grad_()
    loss = stage1.reconstruction(states, targets, torch.zeros(0, dtype=torch.long), 2)
    assert loss.item() == 0.0 and loss.requires_grad
    loss.backward()
    assert stage1.per_example(states, targets, torch.zeros(0, dtype=torch.long), 0).shape == (0,)


def test_accumulated_parts_equal_the_whole() -> None:
    states, targets = pairs()
    whole = stage1.reconstruction(states, targets, EXAMPLES, 4)
    first = stage1.reconstruction(states[:3], targets[:3], EXAMPLES[:3], 2, denominator=3)
    second = stage1.reconstruction(states[3:], targets[3:], EXAMPLES[3:] - 2, 2, denominator=torch.tensor(3))
    torch.testing.assert_close(first + second, whole)


def test_targets_are_constants_and_states_are_not() -> None:
    states, targets = (x.requires_grad_() for x in pairs())
    gradients = torch.autograd.grad(
        stage1.reconstruction(states, targets, EXAMPLES, 4), (states, targets), allow_unused=True
    )
    assert gradients[0] is not None and gradients[1] is None
    assert torch.autograd.gradcheck(lambda s: stage1.reconstruction(s, targets, EXAMPLES, 4, "sum"), (states,))


def test_half_precision_is_computed_in_float32() -> None:
    states, targets = pairs(dtype=torch.bfloat16)
    got = stage1.reconstruction(states, targets, EXAMPLES, 4)
    assert got.dtype == torch.float32
    want = stage1.reconstruction(states.double(), targets.double(), EXAMPLES, 4)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    states, targets = pairs()
    with pytest.raises(ValueError, match="do not fit"):
        stage1.per_example(states, targets[:-1], EXAMPLES, 4)
    with pytest.raises(ValueError, match="do not fit"):
        stage1.per_example(states, targets, EXAMPLES[:-1], 4)
    with pytest.raises(ValueError, match="none of the 3 examples"):
        stage1.per_example(states, targets, EXAMPLES, 3)
    with pytest.raises(ValueError, match="unknown reduction"):
        stage1.per_example(states, targets, EXAMPLES, 4, "max")  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(len(EXAMPLES))))
def test_the_order_of_slots_does_not_matter(seed: int, order: list[int]) -> None:
    states, targets = pairs(seed=seed)
    want = stage1.per_example(states, targets, EXAMPLES, 4)
    torch.testing.assert_close(stage1.per_example(states[order], targets[order], EXAMPLES[order], 4), want)


# Next-token loss


def labelled() -> tuple[Tensor, Tensor]:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return logits, torch.tensor([[4, stage1.IGNORE, 0], [stage1.IGNORE, 6, 2]])


def slow_cross_entropy(logits: Tensor, labels: Tensor) -> list[float]:
    out = []
    for row, label in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if label != -100:
            out.append(math.log(sum(math.exp(x) for x in row)) - row[label])
    return out


def test_cross_entropy_is_the_mean_over_labelled_tokens() -> None:
    logits, labels = labelled()
    want = slow_cross_entropy(logits, labels)
    assert stage1.cross_entropy(logits, labels).item() == pytest.approx(sum(want) / len(want))
    torch.testing.assert_close(
        stage1.cross_entropy(logits, labels), torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    )
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: stage1.cross_entropy(x, labels), (logits,))


def test_next_token_takes_log_probabilities() -> None:
    logits, labels = labelled()
    mask = labels != stage1.IGNORE
    logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(stage1.next_token(logp, mask), stage1.cross_entropy(logits, labels))
    logp[~mask] = math.nan
    torch.testing.assert_close(stage1.next_token(logp, mask), stage1.cross_entropy(logits, labels))


def test_ignored_rows_may_hold_anything() -> None:
    logits, labels = labelled()
    want = stage1.cross_entropy(logits, labels)
    logits[labels == stage1.IGNORE] = math.inf
    logits.requires_grad_()
    got = stage1.cross_entropy(logits, labels)
    assert torch.equal(got, want)
    got.backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_no_label_at_all_is_zero_and_connected() -> None:
    logits, labels = labelled()
    logits.requires_grad_()
    loss = stage1.cross_entropy(logits, torch.full_like(labels, stage1.IGNORE))
    assert loss.item() == 0.0
    loss.backward()
    assert logits.grad is not None and not logits.grad.any()


def test_next_token_parts_equal_the_whole() -> None:
    logits, labels = labelled()
    parts = [stage1.cross_entropy(logits[i], labels[i], denominator=4) for i in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], stage1.cross_entropy(logits, labels))


def test_next_token_is_the_mean_over_all_tokens_or_those_of_the_step() -> None:
    logp = torch.tensor([-1.0, -2.0, -6.0], dtype=torch.float64)
    assert stage1.next_token(logp).item() == pytest.approx(3.0)
    assert stage1.next_token(logp, torch.tensor([True, False, True])).item() == pytest.approx(3.5)
    assert stage1.next_token(logp, denominator=18).item() == pytest.approx(0.5)
    assert stage1.next_token(logp, torch.zeros(3, dtype=torch.bool)).item() == 0.0
    assert stage1.next_token(logp[:0]).item() == 0.0


def test_stage_1_adds_a_tenth_of_the_reconstruction() -> None:
    """As Stage 1 adds them, and by the older name, which warns."""
    ce, rec = torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    assert objective.total({"next_token": (1.0, ce), "reconstruction": (0.1, rec)}).item() == pytest.approx(2.3)
    with pytest.deprecated_call(match="objective.total"):
        assert stage1.stage1(ce, rec).item() == pytest.approx(2.3)
    with pytest.deprecated_call(match="objective.total"):
        assert stage1.stage1(ce, rec, weight=0.0).item() == 2.0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stage1.nothing  # noqa: B018
