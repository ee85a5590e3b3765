"""Means over pairs: shares against the weighted mean written out, and their intervals against simulated data."""

from __future__ import annotations

import numpy as np
import pytest

from realvr.diagnostics.numbers import mean
from realvr.maths.pairs import OtherGroups, same_shares
from realvr.maths.variation import unit

GROUPS = np.array([0, 0, 1, 2, 2, 2, 3])


def weighted(cosine: np.ndarray, partners: np.ndarray, weights: np.ndarray) -> float:
    """The mean over examples of the mean over their partners, every example with a weight."""
    each = [(weights[own] * cosine[i, own]).sum() / weights[own].sum() for i, own in enumerate(partners)]
    return float((weights * each).sum() / weights.sum())


def moved(cosine: np.ndarray, partners: np.ndarray) -> np.ndarray:
    """The mean plus n times what it gains with a little more weight on each example, by central differences."""
    count, step = len(cosine), 1e-5
    ends = [
        [weighted(cosine, partners, np.ones(count) + way * step * (np.arange(count) == i)) for way in (1, -1)]
        for i in range(count)
    ]
    middle = weighted(cosine, partners, np.ones(count))
    return np.array([middle + count * (up - down) / (2 * step) for up, down in ends])


def of_others(u: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """As the diagnostics do it: groups one after the other, twice."""
    found = OtherGroups(len(u))
    members = [u[groups == group] for group in np.unique(groups)]
    for own in members:
        found.add(own.sum(0), len(own))
    shares = np.concatenate([found.shares(own, own.sum(0), len(own)) for own in members])
    return found.settled(shares)


def test_shares_are_what_an_example_adds_to_the_mean() -> None:
    u = unit(np.random.default_rng(0).normal(size=(7, 4)) + 1)
    cosine, other = u @ u.T, np.not_equal.outer(GROUPS, GROUPS)
    found = of_others(u, GROUPS)
    assert found == pytest.approx(moved(cosine, other), abs=1e-6)
    assert found.mean() == pytest.approx(weighted(cosine, other, np.ones(7)))
    alike = ~np.eye(7, dtype=bool)
    rows = (cosine.sum(1) - 1) / 6
    assert same_shares(rows) == pytest.approx(moved(cosine, alike), abs=1e-6)
    assert same_shares(rows).mean() == pytest.approx(rows.mean())


def test_positions_are_apart_and_examples_that_come_together_are_one_value() -> None:
    u = unit(np.random.default_rng(1).normal(size=(7, 3, 4)))
    whole = np.stack([of_others(u[:, t], GROUPS) for t in range(3)], axis=1)
    assert of_others(u, GROUPS) == pytest.approx(whole)
    found = OtherGroups(7)
    sizes = np.bincount(GROUPS)
    for group in range(4):
        found.add(u[group == GROUPS].sum(0), sizes[group])
    parts = [found.shares(u[g == GROUPS], u[g == GROUPS].sum(0), sizes[g]).sum(0) for g in range(4)]
    together = found.settled(np.stack(parts), sizes)
    assert together.mean(0) == pytest.approx(found.mean) and together.shape == (4, 3)
    own = np.stack([whole[group == GROUPS].sum(0) for group in range(4)])
    assert together - found.mean == pytest.approx((own - sizes[:, None] * found.mean) * 4 / 7)


@pytest.mark.parametrize("kind", ["one group", "others"])
def test_intervals_cover_the_mean_of_a_population(kind: str) -> None:
    """Many samples of one population, whose mean over pairs is known: |E u|^2. Row means alone would cover half."""
    rng, count, centre = np.random.default_rng(2), 40, np.array([1.0, 0.5, 0.0])
    truth = float(np.square(unit(rng.normal(size=(400_000, 3)) * 0.8 + centre).mean(0)).sum())
    groups = np.arange(count) // 2 if kind == "others" else np.zeros(count)
    found, estimates, inside = [], [], 0
    for _ in range(200):
        u = unit(rng.normal(size=(count, 3)) * 0.8 + centre)
        shares = of_others(u, groups) if kind == "others" else same_shares(((u @ u.T).sum(1) - 1) / (count - 1))
        told = mean(shares.tolist())
        inside += told["low"] < truth < told["high"]
        estimates.append(told["mean"])
        found.append(shares.std() / count**0.5)
    assert np.mean(found) == pytest.approx(np.std(estimates), rel=0.12)
    assert 0.90 <= inside / 200 <= 0.99
