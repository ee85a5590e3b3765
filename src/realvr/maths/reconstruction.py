"""Stage 1: visual reconstruction under teacher forcing, and the next-token loss.

Implements eq:lvr_rec (sec:prelim_vanilla_objective) and the next-token loss named there. ``objective.total`` adds them.

Departures from the paper, and what it leaves open:

* eq:lvr_rec sums the squared error over the hidden dimension; tab:hp-sft calls the loss MSE with weight 0.1. They
  differ by the factor D. ``reduction="mean"`` follows the table and is the default; ``"sum"`` is the equation.
* The mean runs over an example's T_v targets, then over the examples that have targets. Rows without an ROI have no
  target and no say in the reconstruction term.
* The paper does not say how the next-token loss is averaged: over all response tokens. For both means a ``denominator``
  replaces this call's count by that of the whole optimizer step, so that accumulation changes nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from realvr.maths import deprecated
from realvr.maths.precision import at_least_float32, masked, safe_divide

Reduction = Literal["mean", "sum"]


def per_example(
    states_ND: Tensor, targets_ND: Tensor, example_N: Tensor, examples: int, reduction: Reduction = "mean"
) -> Tensor:
    """Reconstruction loss of each example (E,); 0 for an example without targets.

    ``states_ND`` are the hidden states one position before the slots, ``targets_ND`` the visual tokens they should
    equal (constants), ``example_N`` the number of the example, 0 to ``examples`` - 1, to which each of the N slots
    belongs: rows may be packed or padded, only the slots arrive here.
    """
    if states_ND.shape != targets_ND.shape or example_N.shape != states_ND.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (states_ND, targets_ND, example_N))
        raise ValueError(f"states, targets and example numbers do not fit: {shapes}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"unknown reduction {reduction!r}: choose 'mean' (as the table) or 'sum' (as the equation)")
    square = (at_least_float32(states_ND) - at_least_float32(targets_ND).detach()).square()
    error_N = square.mean(-1) if reduction == "mean" else square.sum(-1)
    # A comparison instead of index_add: the same bits on every run, also on a GPU.
    member_EN = _members(example_N, examples)
    return safe_divide(masked(error_N, member_EN).sum(-1), member_EN.sum(-1))


def reconstruction(
    states_ND: Tensor,
    targets_ND: Tensor,
    example_N: Tensor,
    examples: int,
    reduction: Reduction = "mean",
    denominator: Tensor | float | None = None,
) -> Tensor:
    """``L_rec``, a scalar: mean of ``per_example`` over the examples with targets; 0, connected, if there are none."""
    losses_E = per_example(states_ND, targets_ND, example_N, examples, reduction)
    if denominator is None:
        denominator = _members(example_N, examples).any(-1).sum()
    return safe_divide(losses_E.sum(), denominator)


def next_token(logp: Tensor, mask: Tensor | None = None, denominator: Tensor | float | None = None) -> Tensor:
    """Next-token loss, a scalar: minus the mean log-probability (..., S) over the tokens in ``mask`` (default: all)."""
    logp = at_least_float32(logp)
    kept = logp if mask is None else masked(logp, mask)
    if denominator is None:
        denominator = logp.numel() if mask is None else mask.bool().sum()
    return safe_divide(-kept.sum(), denominator)


def _members(example_N: Tensor, examples: int) -> Tensor:
    """Which slots belong to which example: (E, N), bool."""
    # Not on a GPU, where the host would wait for the answer.
    if not example_N.is_cuda and ((example_N < 0) | (example_N >= examples)).any():
        raise ValueError(f"a slot belongs to none of the {examples} examples")
    return example_N == torch.arange(examples, device=example_N.device)[:, None]


def __getattr__(name: str) -> object:
    return deprecated.find("reconstruction", name)
