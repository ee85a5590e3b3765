"""Where supervision goes: readouts of the correct and wrong answers, selective credit, weights.

Implements ``r_t(y)``, ``r_t^-`` and ``gamma_t`` (sec:method_readout_gate), the remainder ``gamma_0``
(app:bootstrap-remainder), ``w_t`` and ``w_0`` (sec:method_objective, app:bootstrap-allocation), ``q_t`` of
eq:mass-matched-routing (app:mass-matched-factorial) and "raw attention" of tab:mablation.

Departures from the paper, and what it leaves open:

* Nothing here stops a gradient. ``sg(w_t)`` stands where the paper writes it, in the losses of ``evidence``; the
  undetached ablation needs the same functions with gradients.
* Layers whose attention cannot reach the latents (a sliding window that has passed them) count in the mean with
  zeros: the paper averages over decoder layers, without exceptions.
* Without a wrong answer the contrast is zero, but raw attention still routes by ``r_t^+``: it uses no wrong answer.
* ``normalised`` is ours and off by default. Attention from an answer to K slots, averaged over layers and heads, is a
  few percent, and the contrast of two such readouts far less: ``gamma`` may be too small to move ``w_t`` off its floor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realvr.maths.precision import at_least_float32, masked, safe_divide


def readout(rows: Tensor, content: Tensor) -> Tensor:
    """``r_t(y)``: mean attention to each latent slot over layers, heads and the content positions of an answer.

    ``rows`` are post-softmax attention from R query rows to the K slots, (L, B, H, R, K), or (L, B, R, K) if the mean
    over heads is already taken (as ``Probe.stack`` gives them). ``content`` marks the content rows: (B, R) gives (B,
    K); for several answers side by side, (B, Y, R) gives (B, Y, K). No renormalisation: the result sums to at most 1
    over K. An answer without a content row gets zeros; it should have been dropped before.
    """
    if rows.dim() not in (4, 5):
        raise ValueError(f"attention rows are (L, B, H, R, K) or (L, B, R, K), not of shape {tuple(rows.shape)}")
    mean_BRK = at_least_float32(rows).mean(0) if rows.dim() == 4 else at_least_float32(rows).mean((0, 2))
    if (content.shape[0], content.shape[-1]) != tuple(mean_BRK.shape[:2]) or content.dim() not in (2, 3):
        raise ValueError(f"content {tuple(content.shape)} does not fit attention rows {tuple(rows.shape)}")
    content_BYR = content.bool() if content.dim() == 3 else content.bool()[:, None]
    total_BYK = masked(mean_BRK[:, None], content_BYR[..., None]).sum(-2)
    r_BYK = safe_divide(total_BYK, content_BYR.sum(-1, keepdim=True))
    return r_BYK if content.dim() == 3 else r_BYK[:, 0]


def own_rows(content_BYS: Tensor) -> Tensor:
    """Content rows (B, Y, Y * S) of each of Y answers that stand side by side as branches, (B, Y, S): its own only."""
    own_YY = torch.eye(content_BYS.shape[1], dtype=torch.bool, device=content_BYS.device)
    return (content_BYS.bool()[:, None] & own_YY[None, :, :, None]).flatten(2)


def mean_wrong(r_pos_BK: Tensor, r_wrong_BYK: Tensor, valid_BY: Tensor) -> Tensor:
    """``r_t^-`` (B, K): mean readout of the valid wrong answers (B, Y, K); ``r_t^+`` where none is valid: no credit."""
    valid = valid_BY.bool()
    total_BK = masked(at_least_float32(r_wrong_BYK), valid[..., None]).sum(1)
    mean_BK = safe_divide(total_BK, valid.sum(1)[:, None])
    return torch.where(valid.any(1)[:, None], mean_BK, at_least_float32(r_pos_BK))


def selective(r_pos_BK: Tensor, r_neg_BK: Tensor) -> Tensor:
    """``gamma_t = [r_t^+ - r_t^-]+`` (B, K), with subgradient 0 at equality."""
    return torch.relu(at_least_float32(r_pos_BK) - at_least_float32(r_neg_BK))


def raw(r_pos_BK: Tensor) -> Tensor:
    """Credit of the raw-attention ablation: ``gamma_t = r_t^+`` (B, K), with or without wrong answers."""
    return at_least_float32(r_pos_BK)


def normalised(gamma_BK: Tensor) -> Tensor:
    """``gamma_t / sum_s gamma_s`` (B, K), and 1 / K in an example without credit. Ours.

    Each example then has the credit mass 1, and its weights sum to 1 whatever ``eta`` is, as those of uniform routing.
    """
    gamma = at_least_float32(gamma_BK)
    total_B1 = gamma.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, safe_divide(gamma, total_B1), torch.full_like(gamma, _share(1.0, gamma)))


def unassigned(gamma_BK: Tensor) -> Tensor:
    """``gamma_0 = 1 - sum_t gamma_t`` (B,): mass that no slot received. For the records only."""
    return 1 - at_least_float32(gamma_BK).sum(-1)


def weights(gamma_BK: Tensor, eta: float) -> Tensor:
    """``w_t = eta / K + (1 - eta) gamma_t`` (B, K)."""
    return _share(eta, gamma_BK) + (1 - eta) * at_least_float32(gamma_BK)


def unassigned_weight(gamma_BK: Tensor, eta: float) -> Tensor:
    """``w_0 = (1 - eta) gamma_0`` (B,): what is missing from ``sum_t w_t = 1``. For the records only."""
    _share(eta, gamma_BK)
    return (1 - eta) * unassigned(gamma_BK)


def movable(gamma_BK: Tensor, eta: float) -> Tensor:
    """``(1 - eta) sum_t gamma_t / (eta + (1 - eta) sum_t gamma_t)`` (B,): the share of an example's total weight that
    follows the credit; the rest is the uniform baseline. 0 without any weight. Ours; for the records only."""
    total_B = weights(gamma_BK, eta).sum(-1)
    return safe_divide((1 - eta) * at_least_float32(gamma_BK).sum(-1), total_B)


def spread(w_BK: Tensor) -> Tensor:
    """How far weights are from uniform (B,): half of ``sum_t |w_t / sum_s w_s - 1 / K|``. 0: all the same, or all zero;
    ``1 - 1 / K``: all on one slot. For the records only."""
    w = at_least_float32(w_BK)
    total_B1 = w.sum(-1, keepdim=True)
    return masked((safe_divide(w, total_B1) - _share(1.0, w)).abs().sum(-1) / 2, total_B1[..., 0] > 0)


def mass_matched(gamma_BK: Tensor, eta: float) -> Tensor:
    """``q_t^C = w_t / sum_s w_s`` (B, K): contrast routing with mass 1 in every example.

    Undefined at ``eta = 0``, where an example without credit has no mass to normalise.
    """
    if eta == 0:
        raise ValueError("mass-matched routing needs eta > 0: an example without credit would have no mass")
    w_BK = weights(gamma_BK, eta)
    return w_BK / w_BK.sum(-1, keepdim=True)


def mass_matched_uniform(gamma_BK: Tensor) -> Tensor:
    """``q_t^U = 1 / K`` (B, K), in the shape of the credit that it ignores."""
    return torch.full_like(at_least_float32(gamma_BK), _share(1.0, gamma_BK))


def _share(eta: float, gamma_BK: Tensor) -> float:
    """``eta / K``, for an ``eta`` and a K that make sense."""
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie in [0, 1], not {eta}")
    if gamma_BK.shape[-1] == 0:
        raise ValueError("no latent slots: with K = 0 there is nothing to weight")
    return eta / gamma_BK.shape[-1]
