"""Bootstrap intervals of many questions: the same draws in parts as at once, and memory that does not grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from realvr.diagnostics import numbers
from realvr.diagnostics.numbers import RESAMPLES, ratio
from realvr.diagnostics.ranking_summary import _positions, spearman

MANY = 200


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_AT_ONCE", 2**16)  # 512 kB: what would take 20,000 questions is seen with 200


def test_a_ratio_drawn_in_parts_is_the_ratio_drawn_at_once() -> None:
    rng = np.random.default_rng(1)
    above, below = rng.random(MANY), rng.random(MANY) + 0.1
    assert len(numbers.parts_of(MANY)) > 2 and sum(numbers.parts_of(MANY)) == RESAMPLES
    counts = np.random.default_rng(0).multinomial(MANY, np.full(MANY, 1 / MANY), RESAMPLES)
    low, high = np.quantile((counts @ above) / (counts @ below), [0.025, 0.975])
    found = ratio(above.tolist(), below.tolist())
    assert found["mean"] == pytest.approx(above.mean() / below.mean())
    assert (found["low"], found["high"]) == pytest.approx((low, high), rel=1e-9) and found["pairs"] == MANY


def test_positions_drawn_in_parts_are_those_drawn_at_once() -> None:
    rng = np.random.default_rng(2)
    scores = rng.random((MANY, 4)) + 0.02 * np.arange(4)
    losses = rng.random((MANY, 4)) - 0.01 * np.arange(4)
    again = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = again.integers(0, MANY, MANY)
        drawn.append(spearman(scores[chosen].mean(0), losses[chosen].mean(0)))
    found = _positions(scores.tolist(), losses.tolist())
    assert found["rho"] == spearman(scores.mean(0), losses.mean(0)) and found["pairs"] == MANY
    assert (found["low"], found["high"]) == pytest.approx(np.quantile(np.array(drawn), [0.025, 0.975]), abs=1e-9)


def _ratio(count: int) -> object:
    return ratio([1.0] * count, [2.0] * count)


def _ranked(count: int) -> object:
    return _positions([[0.1, 0.2]] * count, [[0.3, 0.1]] * count)


@pytest.mark.parametrize("summary", [_ratio, _ranked])
def test_memory_does_not_grow_with_the_questions(summary: Callable[[int], Any]) -> None:
    peaks = []
    for count in (500, 1500):  # all counts of the second at once are 24 MB
        tracemalloc.start()
        try:
            summary(count)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] and peaks[1] < 4 * 2**20
