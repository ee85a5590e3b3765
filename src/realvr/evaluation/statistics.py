"""Uncertainty of scores: bootstrap intervals, paired differences, McNemar's test. numpy only.

Every score of an evaluation is a mean over columns (subtasks, option cycles, decoding seeds; often just one) of the
share of right answers in the column. The bootstrap draws units with replacement: a question with all its rows (the four
cycles of HR-Bench, several decoding seeds), or a pair.

Shape suffixes: U units, C columns, R resamples, P patterns, T tallies, X everything that is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bootstrap:
    """Settings of the bootstrap."""

    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Tally:
    """Right answers and questions asked, per unit and column: both (U, C)."""

    right_UC: Array
    asked_UC: Array

    def score(self) -> float:
        """Mean over the columns of right / asked; columns in which nothing was asked are left out."""
        return float(column_mean(self.right_UC.sum(0), self.asked_UC.sum(0)))


def column_mean(right: Array, asked: Array) -> Array:
    """(..., C) sums -> (...) mean share over the columns with anything asked; nan where there is none."""
    present = asked > 0
    share = np.divide(right, asked, out=np.zeros_like(right), where=present)
    columns = present.sum(-1)
    return np.divide(share.sum(-1), columns, out=np.full(columns.shape, np.nan), where=columns > 0)


def bootstrap(
    tallies: Sequence[Tally],
    strata_U: Sequence[int] | None = None,
    *,
    resamples: int = 2000,
    seed: Sequence[int] = (0,),
) -> Array:
    """Resampled scores (T, R) of tallies over the same units: one draw of the units serves all of them.

    Units are drawn within their stratum. Units with equal rows are interchangeable, so the draw is over the distinct
    rows of a stratum with their frequencies: the same distribution as drawing indices, at a fraction of the cost, and
    independent of the order of the units.
    """
    wide_UX = np.concatenate([part for tally in tallies for part in (tally.right_UC, tally.asked_UC)], axis=1)
    labels_U = np.zeros(len(wide_UX), dtype=np.int64) if strata_U is None else np.asarray(strata_U)
    rng = np.random.default_rng(list(seed))
    sums_RX = np.zeros((resamples, wide_UX.shape[1]))
    for label in np.unique(labels_U):
        rows = wide_UX[labels_U == label]
        patterns_PX, times_P = np.unique(rows, axis=0, return_counts=True)
        drawn_RP = rng.multinomial(len(rows), times_P / len(rows), size=resamples)
        sums_RX += drawn_RP @ patterns_PX
    scores, at = [], 0
    for tally in tallies:
        columns = tally.right_UC.shape[1]
        scores.append(column_mean(sums_RX[:, at : at + columns], sums_RX[:, at + columns : at + 2 * columns]))
        at += 2 * columns
    return np.stack(scores)


def interval(replicates: Array, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled scores (R,)."""
    low, high = np.nanquantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test from the questions that only one of two models answers correctly.

    The binomial test with chance 1/2, in whole numbers, so that nothing is rounded before the last division.
    """
    trials, fewer = only_first + only_second, min(only_first, only_second)
    term = tail = 1
    for k in range(fewer):
        term = term * (trials - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**trials)


def displayed(value: float) -> float:
    """As tables show a score: one decimal, and no negative zero."""
    return round(value, 1) + 0.0


def gain(first: float, second: float) -> float:
    """``second - first`` by the paper's rule: the difference of the means as displayed, with one decimal."""
    return displayed(displayed(second) - displayed(first))


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (ddof = 1); None for the latter where there is one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
