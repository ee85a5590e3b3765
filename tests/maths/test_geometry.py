"""Covariances batch by batch, rank, whitening and least squares, against numpy on the whole matrix."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from realvr.maths import geometry
from realvr.maths.geometry import Moments


def cloud(rows: int, width: int, seed: int = 0, far: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, width)) @ rng.normal(size=(width, width)) + far


def moments(rows: np.ndarray, cuts: list[int]) -> Moments:
    found = Moments()
    for part in np.split(rows, cuts):
        found.add(torch.from_numpy(part))
    return found


@pytest.mark.parametrize("cuts", [[], [1], [0, 7, 7, 30], list(range(1, 60))])
def test_batches_of_any_cut_give_the_covariance_of_the_whole_matrix(cuts: list[int]) -> None:
    """Far from the origin, where sums of squares would lose the digits."""
    rows = cloud(60, 5, far=1e6)
    found = moments(rows, cuts)
    assert found.count == 60
    np.testing.assert_allclose(found.mean_D, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.covariance_DD, np.cov(rows.T), rtol=1e-7)


def test_merged_processes_equal_one_and_the_same_cut_gives_the_same_bits() -> None:
    rows = cloud(40, 6)
    halves = [moments(rows[:16], [8]), moments(rows[16:], [3])]
    merged = Moments().merge(halves[0]).merge(halves[1])
    np.testing.assert_allclose(merged.covariance_DD, np.cov(rows.T), rtol=1e-12)
    assert torch.equal(moments(rows, [8, 16]).covariance_DD, moments(rows, [8, 16]).covariance_DD)
    np.testing.assert_allclose(halves[0].covariance_DD, np.cov(rows[:16].T), rtol=1e-12)  # not changed by the merge


def test_moments_of_two_kinds_of_rows_and_rows_that_do_not_fit() -> None:
    left, right = cloud(30, 3), cloud(30, 4, seed=1)
    found = Moments()
    for part in (slice(0, 11), slice(11, 30)):
        found.add(torch.from_numpy(left[part]), torch.from_numpy(right[part]))
    np.testing.assert_allclose(found.covariance_DD, np.cov(left.T, right.T)[:3, 3:], rtol=1e-12)
    with pytest.raises(ValueError, match="do not belong together"):
        found.add(torch.zeros(2, 3), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="moments of"):
        found.merge(Moments().add(torch.zeros(2, 5)))
    with pytest.raises(ValueError, match="no rows"):
        _ = Moments().mean_D


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows() -> None:
    """Ten times the rows of a wide matrix in the memory of one batch and the covariance."""
    code = """
import resource, torch
from realvr.maths.geometry import Moments
torch.set_num_threads(1)
found, generator = Moments(), torch.Generator().manual_seed(0)
for number in range(1, 41):
    found.add(torch.randn(512, 256, generator=generator))
    if number in (4, 40):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    few, many = map(int, run.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    assert (many - few) * unit < 36 * 512 * 256 * 4 / 2


def test_rank_and_participation_ratio_of_a_planted_cloud() -> None:
    """Five directions of equal variance in forty dimensions, and hardly anything else."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(40, 5)))[0]
    rows = rng.normal(size=(4000, 5)) @ basis.T + 1e-6 * rng.normal(size=(4000, 40)) + 3
    values = geometry.variances(moments(rows, [100, 1500]).covariance_DD)
    assert [geometry.rank_at(values, share) for share in (0.9, 0.95, 0.99)] == [5, 5, 5]
    assert geometry.participation_ratio(values) == pytest.approx(5, rel=0.02)


def test_rank_counts_the_directions_by_hand() -> None:
    values = torch.tensor([9.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    assert [geometry.rank_at(values, share) for share in (0.9, 0.95, 0.951, 0.99, 1.0)] == [1, 2, 3, 3, 3]
    assert geometry.participation_ratio(values) == pytest.approx(100 / 81.5)
    nothing = geometry.variances(moments(np.ones((3, 4)), []).covariance_DD)
    assert geometry.rank_at(nothing, 0.9) == 0 and geometry.participation_ratio(nothing) == 0
    even = torch.ones(10, dtype=torch.float64) / 10  # shares that float addition just misses
    assert geometry.rank_at(even, 0.9) == 9 and geometry.participation_ratio(even) == pytest.approx(10)


def test_whitening_is_that_of_a_direct_eigendecomposition() -> None:
    rows = cloud(200, 6)
    covariance = np.cov(rows.T)
    values, vectors = np.linalg.eigh(covariance)
    right = vectors @ np.diag(values**-0.5) @ vectors.T
    found = geometry.whitener(moments(rows, [50]).covariance_DD).numpy()
    np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.cov(((rows - rows.mean(0)) @ found).T), np.eye(6), atol=1e-9)


def test_directions_without_variance_are_left_out_of_the_whitening() -> None:
    rows = np.concatenate([cloud(50, 3), np.full((50, 2), 7.0)], axis=1)
    found = geometry.whitener(moments(rows, []).covariance_DD)
    assert torch.isfinite(found).all() and float(found[3:].abs().max()) < 1e-9
    np.testing.assert_allclose(np.cov(((rows - rows.mean(0)) @ found.numpy()).T)[:3, :3], np.eye(3), atol=1e-9)


def test_shrinkage_is_the_rule_and_makes_a_covariance_invertible() -> None:
    """The OAS amount written out for a small case; much for few rows, hardly any for many."""
    rows = cloud(8, 30)
    few = moments(rows, [])
    amount = geometry.shrinkage(few.covariance_DD, few.count)
    c, n, d = np.cov(rows.T), 8, 30
    right = ((1 - 2 / d) * np.trace(c @ c) + np.trace(c) ** 2) / (
        (n + 1 - 2 / d) * (np.trace(c @ c) - np.trace(c) ** 2 / d)
    )
    assert amount == pytest.approx(min(1, right)) and 0 < amount <= 1
    found = geometry.shrunk(few.covariance_DD, amount)
    np.testing.assert_allclose(found, (1 - amount) * c + amount * np.trace(c) / d * np.eye(d), atol=1e-9)
    assert np.linalg.eigvalsh(found.numpy()).min() > 0 and float(found.trace()) == pytest.approx(np.trace(c))
    many = moments(cloud(20000, 30), [])
    assert geometry.shrinkage(many.covariance_DD, many.count) < 0.01 < amount
    assert geometry.shrinkage(torch.eye(4, dtype=torch.float64), 10) == 1.0


def test_residuals_are_those_of_least_squares() -> None:
    context, z = cloud(80, 4), cloud(80, 5, seed=2)
    z += context @ cloud(4, 5, seed=3) + 2
    own, cross = Moments(), Moments()
    for part in (slice(0, 33), slice(33, 80)):
        own.add(torch.from_numpy(context[part]))
        cross.add(torch.from_numpy(context[part]), torch.from_numpy(z[part]))
    b = geometry.coefficients(own.covariance_DD, cross.covariance_DD).numpy()
    design = np.concatenate([np.ones((80, 1)), context], axis=1)
    right = z - design @ np.linalg.lstsq(design, z, rcond=None)[0]
    np.testing.assert_allclose(z - z.mean(0) - (context - context.mean(0)) @ b, right, atol=1e-9)


def test_cosines_of_a_trajectory_by_hand() -> None:
    z = torch.tensor([[1.0, 0], [2, 0], [0, 3], [-1, 0]])
    assert geometry.adjacent(z) == pytest.approx((1 + 0 + 0) / 3)
    assert geometry.off_diagonal(z) == pytest.approx((2 * (1 + 0 - 1 + 0 - 1 + 0) / 12, 1.0))
    assert geometry.pairwise([z[0], z[1], z[2]]) == pytest.approx(1 / 3)
    assert geometry.adjacent(z[:1]) is None and geometry.off_diagonal(z[:1]) is None
    assert geometry.pairwise([z[0]]) is None
    assert geometry.adjacent(torch.zeros(2, 3)) == 0
