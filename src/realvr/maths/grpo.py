"""The policy part of Stage 2: group advantages, the clipped objective, the KL penalty.

Implements ``A_i``, ``J_clip`` and ``L_KL^text`` of eq:lvr_s2 (sec:prelim_vanilla_objective); the paper names them and
leaves their form to GRPO.

Departures from the paper, and what it leaves open:

* Advantages divide by std + 1e-4 with ddof=1. A group without variance, and a group of one, get exactly zero.
* The objective is written with the bound inside the exponential, ``A * exp(min(log ratio, log(1 + eps)))`` for A >= 0
  and ``A * exp(max(log ratio, log(1 - eps)))`` for A < 0. That equals ``min(ratio * A, clip(ratio) * A)``, but a
  ratio that overflows where it is clipped anyway costs no NaN in the gradient.
* KL is the k3 estimator, exp(d) - d - 1 with d = log ref - log policy, per token and reduced like the objective.
* ``normalizer`` is additive over micro-batches and ranks: sum it over the whole optimizer step and pass it to
  ``loss``, and accumulating 2 x B equals 1 x 2B for every reduction. ``bnpo`` and uneven ranks would differ
  otherwise.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from realvr.maths.precision import at_least_float32, masked, safe_divide

Reduction = Literal["grpo", "dr_grpo", "bnpo"]
"""``grpo``: mean over tokens, then over sequences. ``bnpo``: mean over all tokens. ``dr_grpo``: sum over tokens
divided by sequences times the longest length allowed, so that no sequence's length matters."""


def varied(rewards_PG: Tensor) -> Tensor:
    """Groups (P,) in which not all rewards are equal; those with a reward that is not finite count among them."""
    if rewards_PG.shape[-1] == 0:
        raise ValueError("a group without completions has no rewards")
    highest = rewards_PG.amax(-1)
    return (highest != rewards_PG.amin(-1)) | ~highest.isfinite()


def advantages(rewards_PG: Tensor, eps: float = 1e-4, *, scale: bool = True) -> Tensor:
    """Group-relative advantages (P, G): (r - mean) / (std + eps) within each of P prompts, constants of the graph.

    ``scale=False`` leaves the division out, as Dr. GRPO proposes.
    """
    some = varied(rewards_PG)
    rewards = at_least_float32(rewards_PG.detach())
    centred = rewards - rewards.mean(-1, keepdim=True)
    if scale:
        # By hand: torch's std of one element warns and is NaN.
        variance = centred.square().sum(-1, keepdim=True) / max(rewards.shape[-1] - 1, 1)
        centred = centred / (variance.sqrt() + eps)
    return masked(centred, some[..., None])


def token_objective(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float = 0.2, clip_high: float | None = None
) -> Tensor:
    """Clipped objective of each token (..., S), to be maximised; log-probabilities (..., S), advantages (...)."""
    low, high = _bounds(clip, clip_high)
    log_ratio = at_least_float32(logp) - at_least_float32(old_logp).detach()
    advantage = at_least_float32(advantages).detach()[..., None]
    bounded = torch.where(advantage >= 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    return advantage * bounded.exp()


def token_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) at each token (..., S): exp(d) - d - 1 with d = ref - policy."""
    d = at_least_float32(ref_logp).detach() - at_least_float32(logp)
    return torch.expm1(d) - d  # exp(d) - 1 would cancel to nothing for small d


def normalizer(mask: Tensor, reduction: Reduction, max_length: int | None = None) -> Tensor:
    """What ``reduce`` divides by for a mask (..., S): sequences, tokens, or sequences * ``max_length``. Additive."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"unknown reduction {reduction!r}: choose one of {', '.join(get_args(Reduction))}")
    if reduction == "bnpo":
        return mask.bool().sum()
    sequences = torch.full((), mask.shape[:-1].numel(), device=mask.device)
    if reduction == "grpo":
        return sequences
    if max_length is None or max_length < 1:
        raise ValueError("the dr_grpo reduction divides by max_length, the most tokens a completion may have")
    return sequences * max_length


def reduce(
    values: Tensor,
    mask: Tensor,
    reduction: Reduction = "grpo",
    *,
    max_length: int | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Scalar from token values (..., S) at the real tokens ``mask`` (..., S).

    ``denominator`` replaces the ``normalizer`` of this call by that of the whole optimizer step. No real token gives 0.
    """
    own = normalizer(mask, reduction, max_length)
    kept = masked(at_least_float32(values), mask)
    if reduction == "grpo":
        kept = safe_divide(kept.sum(-1), mask.bool().sum(-1))
    return safe_divide(kept.sum(), own if denominator is None else denominator)


def loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    reduction: Reduction = "grpo",
    max_length: int | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Stage-2 policy loss, a scalar: ``-J_clip + beta * KL`` over the generated text tokens.

    ``logp`` (current), ``old_logp`` (recorded at rollout), ``ref_logp`` (Stage-1 policy, needed if ``beta`` > 0) and
    the mask of generated tokens are (..., S), usually (B, G, S); advantages are (...). All log-probabilities at the
    sampling temperature. What stands at masked tokens does not matter, be it NaN.
    """
    logp, old_logp = masked(at_least_float32(logp), mask), masked(at_least_float32(old_logp), mask)
    per_token = -token_objective(logp, old_logp, advantages, clip, clip_high)
    if beta != 0:
        if ref_logp is None:
            raise ValueError("beta > 0 needs the reference policy's log-probabilities")
        per_token = per_token + beta * token_kl(logp, masked(at_least_float32(ref_logp), mask))
    return reduce(per_token, mask, reduction, max_length=max_length, denominator=denominator)


@torch.no_grad()
def clip_fraction(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
) -> Tensor:
    """Share of the real tokens whose gradient the clip removes: ratio beyond the bound its advantage pushes towards."""
    low, high = _bounds(clip, clip_high)
    log_ratio = masked(at_least_float32(logp), mask) - masked(at_least_float32(old_logp), mask)
    sign = advantages[..., None]
    clipped = ((log_ratio < low) & (sign < 0)) | ((log_ratio > high) & (sign > 0))
    return reduce(clipped, mask, "bnpo")


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    """Bounds of the log-ratio."""
    high = clip if clip_high is None else clip_high
    if not 0 <= clip < 1 or high < 0:
        raise ValueError(f"the clip range must satisfy 0 <= low < 1 and high >= 0, not {clip} and {high}")
    return math.log1p(-clip), math.log1p(high)
