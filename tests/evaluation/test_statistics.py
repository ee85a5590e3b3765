"""Intervals and tests against scipy, the normal approximation and a plain bootstrap over indices."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optional import need_package
from realvr.evaluation.statistics import Tally, bootstrap, column_mean, interval, mcnemar, mean_std


def tally(right: list[float]) -> Tally:
    column = np.array(right, dtype=float)[:, None]
    return Tally(column, np.ones_like(column))


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == 2 / 32
    assert mcnemar(1, 3) == 2 * (1 + 4) / 16
    assert mcnemar(2, 2) == 1.0
    assert mcnemar(3, 1) == mcnemar(1, 3)


def test_mcnemar_is_the_binomial_test() -> None:
    need_package("scipy")
    from scipy import stats

    for b, c in [(1, 9), (12, 30), (177, 212), (1500, 1300), (4000, 4001)]:
        assert mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c, 0.5).pvalue, rel=1e-9)


def test_mean_std() -> None:
    assert mean_std([1.0, 2.0, 4.0]) == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)))
    assert mean_std([5.0]) == (5.0, None)


def test_interval_near_the_normal_one() -> None:
    n, p = 400, 0.3
    low, high = interval(bootstrap([tally([1.0] * 120 + [0.0] * 280)], resamples=20000)[0])
    half = 1.96 * math.sqrt(p * (1 - p) / n)
    assert low == pytest.approx(p - half, abs=0.004)
    assert high == pytest.approx(p + half, abs=0.004)


def test_coverage_of_the_interval() -> None:
    """Of 300 samples, about 95 % of the intervals hold the true share."""
    rng = np.random.default_rng(0)
    hits = 0
    for number in range(300):
        low, high = interval(bootstrap([tally(list(rng.random(200) < 0.7))], resamples=500, seed=(number,))[0])
        hits += low <= 0.7 <= high
    assert 272 <= hits <= 297


def test_clusters_strata_and_pairs_against_drawing_indices() -> None:
    """The draw over distinct rows has the distribution of a draw over units: same mean and deviation."""
    rng = np.random.default_rng(1)
    strata = np.array([0] * 30 + [1] * 50)
    asked = np.zeros((80, 2))
    asked[strata == 0, 0] = asked[strata == 1, 1] = 4
    first = rng.binomial(asked.astype(int), 0.6).astype(float)
    second = np.minimum(asked, first + rng.binomial(1, 0.3, asked.shape) * (asked > 0))
    one, two = bootstrap([Tally(first, asked), Tally(second, asked)], list(strata), resamples=20000)
    slow = []
    for _ in range(4000):
        drawn = np.concatenate([rng.choice(np.flatnonzero(strata == s), (strata == s).sum()) for s in (0, 1)])
        slow.append([np.mean(x[drawn].sum(0) / asked[drawn].sum(0)) for x in (first, second)])
    plain = np.array(slow)
    for fast, exact in ((one, plain[:, 0]), (two - one, plain[:, 1] - plain[:, 0])):
        assert fast.mean() == pytest.approx(exact.mean(), abs=0.003)
        assert fast.std() == pytest.approx(exact.std(), rel=0.06)


def test_clusters_widen_the_interval() -> None:
    """Four identical rows of one question are one observation, not four."""
    rng = np.random.default_rng(2)
    right = (rng.random(100) < 0.5).astype(float)
    together = bootstrap([Tally(4 * right[:, None], np.full((100, 1), 4.0))], resamples=5000)[0].std()
    apart = bootstrap([tally(list(np.repeat(right, 4)))], resamples=5000)[0].std()
    assert together == pytest.approx(2 * apart, rel=0.08)


def test_seed_and_order() -> None:
    one = bootstrap([tally([1, 0, 0, 1, 1])], resamples=50, seed=(3, 4))
    assert np.array_equal(one, bootstrap([tally([0, 1, 1, 1, 0])], resamples=50, seed=(3, 4)))
    assert not np.array_equal(one, bootstrap([tally([0, 1, 1, 1, 0])], resamples=50, seed=(3, 5)))


def test_columns_without_questions_are_left_out() -> None:
    assert column_mean(np.array([1.0, 0.0, 3.0]), np.array([2.0, 0.0, 3.0])) == pytest.approx(0.75)
    assert np.isnan(column_mean(np.zeros(2), np.zeros(2)))
