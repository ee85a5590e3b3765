"""Position-wise variation against loops over all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from realvr.maths.variation import distances, gaps, unit, within


def test_within_is_the_mean_over_all_pairs() -> None:
    z = np.random.default_rng(0).normal(size=(5, 3, 4))
    found = within(unit(z))
    for t in range(3):
        for i in range(5):
            others = [j for j in range(5) if j != i]
            cosines = [z[i, t] @ z[j, t] / np.linalg.norm(z[i, t]) / np.linalg.norm(z[j, t]) for j in others]
            assert found[i, t] == pytest.approx(1 - np.mean(cosines))


def test_equal_latents_do_not_vary_and_opposite_ones_vary_most() -> None:
    same = unit(np.ones((4, 2, 3)) * np.array([1, 2, 3, 4])[:, None, None])  # other lengths, one direction
    assert within(same) == pytest.approx(np.zeros((4, 2)))
    assert within(unit(np.array([[[1.0, 0]], [[-1.0, 0]]]))) == pytest.approx(np.full((2, 1), 2.0))


def test_small_groups_have_no_bias() -> None:
    """Vectors around one direction: pairs of two examples vary, on average, as much as fifty do. A distance to the
    group's own mean would be half as large."""
    rng = np.random.default_rng(1)
    centre = np.array([3.0, 0, 0, 0])
    large = within(unit(centre + rng.normal(size=(2000, 1, 4)))).mean()
    small = np.mean([within(unit(centre + rng.normal(size=(2, 1, 4)))).mean() for _ in range(2000)])
    assert small == pytest.approx(large, rel=0.06)


def test_distances_to_a_sum_of_others_and_a_zero() -> None:
    u = unit(np.array([[[1.0, 0.0]], [[0.0, 0.0]]]))
    assert (u[1] == 0).all()
    assert distances(u, np.array([[[1.0, 1.0]]]), 2).tolist() == [[0.5], [1.0]]


def test_gap_is_the_largest_minus_the_mean() -> None:
    assert float(gaps(np.array([0.1, 0.4, 0.1]))) == pytest.approx(0.2)
    assert gaps(np.array([[0.3, 0.3], [0.0, 1.0]])).tolist() == pytest.approx([0.0, 0.5])
