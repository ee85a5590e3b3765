"""Means over pairs of examples, and what each example has to do with them: the intervals of such a mean.

A mean over pairs is no mean of independent values: every example is in its own row and in that of each partner, and an
odd one moves all of them. Resampling the row means a_i alone, as if the partners were fixed, gives intervals of about
half the width. With c_ij the value of a pair and a_i its mean over the partners of i, the mean T = mean_i a_i moves by

    n dT/dm_i = a_i - T + sum over the j that have i as a partner of (c_ij - a_j) / (partners of j)

when example i is given a little more weight m_i (the infinitesimal jackknife; of a U-statistic, twice a_i - T). The
*shares* here are T plus that: their mean is T, and resampling them has the spread of T. The paper states neither
intervals nor how it would get them; these are ours.

c_ij is the product of unit vectors u_i . u_j, so that sums over partners are sums of vectors: no n x n matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def same_shares(rows_N: Floats) -> Floats:
    """Shares (N, …) of N >= 2 examples that are compared with each other, from their row means a_i (N, …)."""
    count = len(rows_N)
    return np.asarray(2 * rows_N - (rows_N.sum(0) - rows_N) / (count - 1))


class OtherGroups:
    """Mean product of u_i with the examples of *other groups*: groups are added first, then asked for their shares.

    All arrays end in D; what stands before it, such as positions, is kept apart. ``count`` is n over all groups.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._whole: Floats = np.zeros(())
        self._weighted: Floats = np.zeros(())
        self._own: Floats = np.zeros(())

    def add(self, sum_D: Floats, size: int) -> None:
        """A group of ``size`` examples whose unit vectors have this sum."""
        weight = 1 / (self.count - size)
        self._whole = self._whole + sum_D
        self._weighted = self._weighted + weight * sum_D
        self._own = self._own + weight * _dot(sum_D, sum_D)

    @property
    def mean(self) -> Floats:
        """T of all examples (…)."""
        return (_dot(self._weighted, self._whole) - self._own) / self.count

    def shares(self, unit_MD: Floats, sum_D: Floats, size: int) -> Floats:
        """Of examples (M, …, D) of one group, up to a constant (…) that `settled` takes away."""
        weight, others_D = 1 / (self.count - size), self._whole - sum_D
        own = weight * _dot(unit_MD, others_D)
        as_partner = _dot(unit_MD, self._weighted - weight * sum_D)
        return np.asarray(own + as_partner + weight**2 * _dot(sum_D, others_D))

    def settled(self, sums_C: Floats, sizes_C: Floats | None = None) -> Floats:
        """From the shares of all examples: values (C, …) whose mean is T, to be resampled. Examples that come together,
        such as questions on one picture, are one value: ``sums`` of their shares and ``sizes``; else one of each."""
        sizes = np.ones(len(sums_C)) if sizes_C is None else np.asarray(sizes_C, dtype=np.float64)
        each = sizes.reshape(-1, *[1] * (sums_C.ndim - 1))
        return np.asarray(self.mean + len(sums_C) / sizes.sum() * (sums_C - each * sums_C.sum(0) / sizes.sum()))


def _dot(left_D: Floats, right_D: Floats) -> Floats:
    return np.asarray((left_D * right_D).sum(-1))
