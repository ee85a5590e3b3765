"""Attention as a measurement: mass on a region of the image, and how much more it is than on the rest.

Implements ``s_l(R)`` and ``rho_l`` (app:diag-target-region) and the density of fig:design-question-switch, whose mean
over the image is 1. All take attention that the softmax has already seen; nothing here is trained.

Departures from the paper, and what it leaves open:

* "Same-area background windows outside it" are the translates of the region itself on the token grid, shape and all,
  that share no token with it. The expectation is taken over all of them, without sampling. A region that leaves no such
  window has no ratio.
* ``eps`` is 1e-8: far below any attention that a window gets, so that it matters only where the background gets none.
* A layer that puts no attention on region and background alike (a sliding window that has passed the image) has no
  ratio; the formula would call it 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realvr.maths.precision import at_least_float32, masked, safe_divide

EPSILON = 1e-8


def token_attention(rows: Tensor, queries: Tensor) -> Tensor:
    """Mean over heads and query positions J of the attention to each of N tokens: the part of ``s_l`` before the sum.

    ``rows`` are (L, B, R, N), or (L, B, H, R, N) with heads; ``queries`` (B, R) marks the rows that count. Gives
    (L, B, N), and zeros for an example without a query.
    """
    if rows.dim() not in (4, 5):
        raise ValueError(f"attention rows are (L, B, H, R, N) or (L, B, R, N), not of shape {tuple(rows.shape)}")
    mean_LBRN = at_least_float32(rows) if rows.dim() == 4 else at_least_float32(rows).mean(2)
    if tuple(queries.shape) != tuple(mean_LBRN.shape[1:3]):
        raise ValueError(f"queries {tuple(queries.shape)} do not fit attention rows {tuple(rows.shape)}")
    chosen = queries.bool()
    return safe_divide(masked(mean_LBRN, chosen[..., None]).sum(-2), chosen.sum(-1)[:, None])


def region_mass(attention: Tensor, region: Tensor) -> Tensor:
    """``s_l(R)`` (…): attention (…, N) summed over the tokens of a region (N,), each counted by its weight."""
    return (at_least_float32(attention) * region.to(attention.device, attention.dtype)).sum(-1)


def background(region_YX: Tensor, avoid_YX: Tensor | None = None) -> tuple[Tensor, int]:
    """``E_B`` as weights (Y, X) of the tokens, and how many windows there are.

    The windows are all translates of the region within the grid that share no token with it, nor with ``avoid_YX``. As
    ``s_l`` is linear, its expectation over them is its value on these weights: the share of windows that hold the
    token. Without a window, or a region, all weights are zero.
    """
    region = region_YX.bool()
    taken = region if avoid_YX is None else region | avoid_YX.bool()
    weights = torch.zeros(region.shape, dtype=torch.float64)
    if not bool(region.any()):
        return weights, 0
    rows, columns = (region.any(axis).nonzero()[:, 0] for axis in (1, 0))
    shape = region[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = shape.shape
    count = 0
    for top in range(region.shape[0] - height + 1):
        for left in range(region.shape[1] - width + 1):
            place = (slice(top, top + height), slice(left, left + width))
            if not bool((taken[place] & shape).any()):
                weights[place] += shape
                count += 1
    return weights / max(count, 1), count


def enrichment(target: Tensor, around: Tensor, eps: float = EPSILON) -> Tensor:
    """``rho_l = s_l(M) / (E_B[s_l(B)] + eps)``; NaN where neither gets any attention."""
    target, around = at_least_float32(target), at_least_float32(around)
    neither = (target == 0) & (around == 0)
    return torch.where(neither, torch.full_like(target, torch.nan), target / (around + eps))


def density(attention: Tensor) -> Tensor:
    """Attention (…, N) over the tokens of an image divided by its mean: 1 everywhere if it is uniform. NaN without any
    attention."""
    values = at_least_float32(attention)
    mean = values.mean(-1, keepdim=True)
    return torch.where(mean > 0, values / torch.where(mean > 0, mean, 1.0), torch.full_like(values, torch.nan))
