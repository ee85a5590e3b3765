"""Gradients of a trunk's keys and values, computed for all steps of a span together.

Each latent step attends to the whole trunk with one query in each row. Flash attention returns gradients of all keys
and values for each of them: as much memory as the trunk, filled by every step and added up in the format of the model.
Here the backward pass of a step stores only its queries and the gradients that belong to them, a few rows of each
layer. When the span is done, the sums over all steps are two products of these, in 32 bits.

Letters: B rows, H heads of keys and values, R queries of all steps that read the same head, T columns of the trunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Queries:
    """Of one layer's attention to a trunk, with what its backward pass was given. Output and log-sum-exp may cover more
    than the trunk."""

    query_BHRd: Tensor
    grad_BHRd: Tensor
    out_BHRd: Tensor
    lse_BHR: Tensor
    real: Tensor | None
    """Columns of the trunk that they see, (B, T) or for each of them (B, R, T); None: all."""
    scaling: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, gradients, output and log-sum-exp."""
        return self.query_BHRd, self.grad_BHRd, self.out_BHRd, self.lse_BHR


class LaterGradients:
    """Queries that wait for the gradients of their trunk, by layer: the address of its keys."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Queries]] = {}

    def add(self, key: Tensor, queries: Queries) -> None:
        """Those of one step behind ``key``."""
        self._waiting.setdefault(key.data_ptr(), []).append(queries)

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting = {}

    def of(self, key: Tensor) -> Queries | None:
        """Those of all steps behind ``key``, side by side in tensors of their own; None where there are none."""
        each = self._waiting.get(key.data_ptr())
        return None if each is None else _together(each)


def _together(each: Sequence[Queries]) -> Queries:
    query, grad, out, lse = (torch.cat(parts, dim=2) for parts in zip(*(one.tensors for one in each), strict=True))
    return Queries(query, grad, out, lse, _seen(each), each[0].scaling)


def _seen(each: Sequence[Queries]) -> Tensor | None:
    """What queries of different steps see: the same, or with a sliding window each something else."""
    real = each[0].real
    if all(one.real is real for one in each):
        return real
    masks = [one.real for one in each if one.real is not None]
    seen = [torch.ones_like(masks[0]) if one.real is None else one.real for one in each]
    counts = [one.query_BHRd.shape[2] for one in each]
    return torch.cat([x[:, None].expand(-1, count, -1) for x, count in zip(seen, counts, strict=True)], dim=1)


@torch.no_grad()
def multiplied(found: Queries, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values (B, H, T, d). Columns that no query sees have zeros."""
    wide = torch.promote_types(key.dtype, torch.float32)
    query, grad, out, lse = (x.to(wide) for x in found.tensors)
    scores = query @ key.to(wide).mT * found.scaling - lse[..., None]
    hidden = None
    if found.real is not None:
        hidden = ~(found.real[:, None, None] if found.real.ndim == 2 else found.real[:, None])
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.exp_()
    of_value = (weights.mT @ grad).to(value.dtype)
    of_weights = grad @ value.to(wide).mT - (grad * out).sum(-1, keepdim=True)
    of_scores = of_weights.mul_(weights).mul_(found.scaling)
    if hidden is not None:
        of_scores.masked_fill_(hidden, 0)  # a hidden infinity times a weight of 0 is NaN
    return (of_scores.mT @ query).to(key.dtype), of_value
