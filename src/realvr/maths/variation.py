"""Position-wise variation of latents (fig:slot-variance-map). The paper draws it and states no formula; these are ours.

With u = z / |z|, the variation at a position is the mean cosine distance between two different examples,

    V_t = mean over i != j of 1 - u_{i,t} . u_{j,t},

which has no bias from small groups, so that it compares across all examples and across the few questions on one
picture. From sums S_t over the examples it takes one pass: example i has 1 - (u_{i,t} . (S_t - O_{i,t})) / m_i, with
O_{i,t} the sum over those that it is not compared with (itself among them) and m_i the number of the others.

The gap is that of the position that varies most: max_t V_t - mean_t V_t.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def unit(vectors: Floats) -> Floats:
    """Vectors (…, D) of length one; a zero stays zero."""
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, norm, out=np.zeros_like(vectors), where=norm > 0)


def distances(unit_BKD: Floats, others_BKD: Floats, count: int) -> Floats:
    """(B, K): mean cosine distance of each unit vector to ``count`` others, of which ``others`` is the sum."""
    return np.asarray(1 - (unit_BKD * others_BKD).sum(-1) / count)


def within(unit_NKD: Floats) -> Floats:
    """(N, K): mean cosine distance of each of N >= 2 examples to the N - 1 others; the mean over N is V_t."""
    return distances(unit_NKD, unit_NKD.sum(0, keepdims=True) - unit_NKD, len(unit_NKD) - 1)


def gaps(variation_RK: Floats) -> Floats:
    """max_t V_t - mean_t V_t over the last axis."""
    return np.asarray(variation_RK.max(-1) - variation_RK.mean(-1))
