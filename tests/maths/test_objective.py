"""The weighted sum of a stage's terms."""

from __future__ import annotations

import pytest
import torch

from realvr.maths import objective


def test_the_objective_is_the_weighted_sum() -> None:
    """eq:realvr_difference: policy loss plus lambda times the evidence loss, and its gradient."""
    policy = torch.tensor(-0.25, dtype=torch.float64, requires_grad=True)
    evidence = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    loss = objective.total({"policy": (1.0, policy), "evidence": (0.2, evidence)})
    assert loss.item() == pytest.approx(-0.25 + 0.2 * 1.5)
    assert torch.autograd.grad(loss, (policy, evidence)) == (torch.tensor(1.0), torch.tensor(0.2, dtype=torch.float64))


def test_terms_in_half_precision_are_added_in_float32() -> None:
    terms = {str(i): (1.0, torch.tensor(1 + 2**-7, dtype=torch.bfloat16)) for i in range(4)}
    loss = objective.total(terms)
    assert loss.dtype == torch.float32 and loss.item() == 4 * (1 + 2**-7)


def test_an_objective_without_terms_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one term"):
        objective.total({})
