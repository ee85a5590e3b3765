"""Geometry of many vectors: cosines within a trajectory, covariances that are added up batch by batch, effective rank,
whitening, least squares on a context.

Implements the columns of tab:diag-similarity and tab:diag-rank. The paper has no displays for them; what it leaves open
is stated here:

* Covariances are centred and divided by n - 1. They are added up in float64 by Chan's rule, so that no more than D x D
  numbers and one batch are alive, whatever the number of rows.
* Rank at p: the smallest number of principal directions whose variances sum to at least p of the total. The
  participation ratio is (sum l)^2 / sum l^2 of the eigenvalues l.
* Whitening is z -> W (z - mean) with W the symmetric inverse square root of the covariance. Directions without variance
  are left out.
* With fewer rows than dimensions a covariance has no inverse. It is then shrunk toward a multiple of the identity,
  (1 - a) C + a tr(C)/D I, with a by the oracle-approximating rule (OAS) of a Gaussian sample. The same shrunk
  covariance makes least squares on a context a ridge regression.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realvr.maths.evidence import unit

_SMALL = 1e-12
"""Eigenvalues below this part of the largest are rounding."""


class Moments:
    """Count, means and co-scatter of rows (x, y) that come in batches; of one kind of row, y = x.

    `merge` is exact up to rounding whatever the cut of the batches, and gives the same bits for the same cut.
    """

    def __init__(self) -> None:
        self.count = 0
        self.left_D: Tensor | None = None
        self.right_D: Tensor | None = None
        self.scatter_DD: Tensor | None = None

    def add(self, left_ND: Tensor, right_ND: Tensor | None = None) -> Moments:
        """Count these rows too."""
        left = left_ND.double()
        right = left if right_ND is None else right_ND.double()
        if left.ndim != 2 or len(left) != len(right):
            raise ValueError(f"rows {tuple(left.shape)} and {tuple(right.shape)} do not belong together")
        if not len(left):
            return self
        batch = Moments()
        batch.count, batch.left_D, batch.right_D = len(left), left.mean(0), right.mean(0)
        batch.scatter_DD = (left - batch.left_D).T @ (right - batch.right_D)
        return self.merge(batch)

    def merge(self, other: Moments) -> Moments:
        """Count the rows of other moments too."""
        if other.left_D is None or other.right_D is None or other.scatter_DD is None:
            return self
        if self.left_D is None or self.right_D is None or self.scatter_DD is None:
            self.count, self.left_D, self.right_D = other.count, other.left_D.clone(), other.right_D.clone()
            self.scatter_DD = other.scatter_DD.clone()
            return self
        if self.scatter_DD.shape != other.scatter_DD.shape:
            raise ValueError(f"moments of {tuple(self.scatter_DD.shape)} and {tuple(other.scatter_DD.shape)}")
        count = self.count + other.count
        left, right = other.left_D - self.left_D, other.right_D - self.right_D
        self.scatter_DD += other.scatter_DD
        self.scatter_DD.addr_(left, right, alpha=self.count * other.count / count)
        self.left_D += left * (other.count / count)
        self.right_D += right * (other.count / count)
        self.count = count
        return self

    @property
    def mean_D(self) -> Tensor:
        """Of x."""
        if self.left_D is None:
            raise ValueError("no rows were added")
        return self.left_D

    @property
    def covariance_DD(self) -> Tensor:
        """Of x and y; zeros of a single row."""
        if self.scatter_DD is None:
            raise ValueError("no rows were added")
        return self.scatter_DD / max(1, self.count - 1)


def variances(covariance_DD: Tensor) -> Tensor:
    """Variances (D,) along the principal directions, the largest first; rounding below zero is zero."""
    return torch.linalg.eigvalsh(covariance_DD).flip(0).clamp(min=0)


def rank_at(variances_D: Tensor, share: float) -> int:
    """The fewest principal directions with at least this share of the variance; 0 where nothing varies."""
    total = variances_D.sum()
    if total <= 0:
        return 0
    reached = variances_D.cumsum(0) >= share * total * (1 - _SMALL)
    return int(reached.long().argmax()) + 1


def participation_ratio(variances_D: Tensor) -> float:
    """(sum l)^2 / sum l^2: D where all directions vary alike, 1 on a line, 0 where nothing varies."""
    square = variances_D.square().sum()
    return float(variances_D.sum() ** 2 / square) if square > 0 else 0.0


def shrinkage(covariance_DD: Tensor, count: int) -> float:
    """The oracle-approximating amount (OAS), between 0 and 1, for a covariance of ``count`` rows."""
    width = len(covariance_DD)
    square, total = float(covariance_DD.square().sum()), float(covariance_DD.trace()) ** 2
    above = (1 - 2 / width) * square + total
    below = (count + 1 - 2 / width) * (square - total / width)
    return 1.0 if below <= 0 else min(1.0, above / below)


def shrunk(covariance_DD: Tensor, amount: float) -> Tensor:
    """(1 - a) C + a tr(C)/D I."""
    width = len(covariance_DD)
    identity = torch.eye(width, dtype=covariance_DD.dtype, device=covariance_DD.device)
    return (1 - amount) * covariance_DD + amount * covariance_DD.trace() / width * identity


def whitener(covariance_DD: Tensor) -> Tensor:
    """Symmetric inverse square root (D, D); directions without variance map to zero."""
    values, vectors = torch.linalg.eigh(covariance_DD)
    kept = values > _SMALL * values[-1].clamp(min=0)
    scale = torch.where(kept, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), torch.zeros_like(values))
    return (vectors * scale) @ vectors.T


def coefficients(context_CC: Tensor, cross_CD: Tensor) -> Tensor:
    """Least squares of y on x from their covariances: B (C, D) with y ~ mean + (x - mean) B, of the smallest norm."""
    values, vectors = torch.linalg.eigh(context_CC)
    kept = values > _SMALL * values[-1].clamp(min=0)
    scale = torch.where(kept, 1 / torch.where(kept, values, torch.ones_like(values)), torch.zeros_like(values))
    return (vectors * scale) @ (vectors.T @ cross_CD)


def cosines(z_KD: Tensor) -> Tensor:
    """Cosines (K, K) of a trajectory in float64; 0 with a zero vector."""
    directions = unit(z_KD.double())
    return (directions @ directions.T).clamp(-1, 1)


def adjacent(z_KD: Tensor) -> float | None:
    """Mean cosine of neighbours z_t, z_t+1; None of fewer than two."""
    return float(cosines(z_KD).diagonal(1).mean()) if len(z_KD) > 1 else None


def off_diagonal(z_KD: Tensor) -> tuple[float, float] | None:
    """Mean and maximum of the cosines of different positions; None of fewer than two."""
    if len(z_KD) < 2:
        return None
    found = cosines(z_KD)[~torch.eye(len(z_KD), dtype=torch.bool, device=z_KD.device)]
    return float(found.mean()), float(found.max())


def pairwise(vectors_RD: Sequence[Tensor]) -> float | None:
    """Mean cosine over all pairs of vectors (D,); None of fewer than two."""
    found = off_diagonal(torch.stack(list(vectors_RD))) if len(vectors_RD) > 1 else None
    return None if found is None else found[0]
