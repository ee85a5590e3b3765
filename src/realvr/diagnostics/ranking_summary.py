"""The numbers of diagnostic ``ranking`` from its records. Numpy only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from realvr.diagnostics import results
from realvr.diagnostics.numbers import columns, mean, parts_of, rate
from realvr.evaluation.statistics import interval
from realvr.runs.journal import Record
from realvr.runs.records import Text

RANKED = ("contrast", "attention")
"""Orders by readout: γ_t, and the raw readout of the right answer."""
ORDERS = (*RANKED, "random", "utility")
SHOWN = 60
"""Questions whose latents are points of the scatter."""

Array = NDArray[np.float64]


class Rho(TypedDict):
    """Spearman's rank correlation with its bootstrap interval over ``pairs`` questions."""

    rho: float | None
    low: float | None
    high: float | None
    pairs: int


class Correlation(TypedDict):
    """Of a score of the latents with the loss where one is replaced."""

    within: results.Mean
    """Spearman's correlation over the K latents of a question, mean over questions where both vary."""
    positions: Rho
    """The same over the K positions, of means over questions."""


class Summary(TypedDict):
    """``ranking.json``. Lists have one entry a latent; those of ``losses`` one for each k = 0 … K."""

    questions: int
    latents: int
    replacement: Text
    seeds: int
    skipped: dict[Text, int]
    wrong_answers: results.Mean
    correct: list[results.Mean]
    incorrect: list[results.Mean]
    contrast: list[results.Mean]
    correct_mass: results.Mean
    contrast_mass: results.Mean
    zero_contrast: results.Mean
    """Share of a question's latents whose contrast is zero."""
    single: list[results.Mean]
    losses: dict[Text, list[results.Mean]]
    over_random: dict[Text, results.Mean]
    correlation: dict[Text, Correlation]
    top: dict[Text, results.Rate]
    """Questions whose first latent of an order is the one with the largest loss."""
    top_on_last: dict[Text, results.Rate]
    """Trails: questions whose first latent of an order is on the last box."""
    share_on_last: results.Mean
    """Trails: share of the latents that are on the last box, chance of the one above."""
    points: list[list[float]]
    """Latent t, contrast, loss: of the first questions."""


def summarise_ranking(records: Sequence[Record], replacement: str, seeds: int) -> dict[str, Any]:
    """All numbers; means over questions with bootstrap intervals over them."""
    read = [record for record in records if record["error"] is None]
    good = [record for record in read if record["skipped"] is None]
    latents = max((record["latents"] for record in good), default=0)
    losses = {name: [curve(record, name) for record in good] for name in ORDERS}
    trails = [record for record in good if record["boxes"] is not None and record["boxes"] <= record["latents"]]
    scores = {"contrast": "contrast", "attention": "correct"}
    return {
        "questions": len(good),
        "latents": latents,
        "replacement": replacement,
        "seeds": seeds,
        "skipped": dict(Counter(record["skipped"] for record in read if record["skipped"] is not None)),
        "wrong_answers": mean([record["wrong"] for record in good]),
        **{name: columns([record[name] for record in good]) for name in ("correct", "incorrect", "contrast", "single")},
        **{f"{name}_mass": mean([math.fsum(record[name]) for record in good]) for name in ("correct", "contrast")},
        "zero_contrast": mean([record["contrast"].count(0.0) / record["latents"] for record in good]),
        "losses": {name: columns(rows) for name, rows in losses.items()},
        "over_random": {
            name: mean([_over(row, other) for row, other in zip(rows, losses["random"], strict=True) if len(row) > 2])
            for name, rows in losses.items()
            if name != "random"
        },
        "correlation": {name: _correlation(good, score) for name, score in scores.items()},
        "top": {name: rate(sum(one["order"][name][0] == _largest(one) for one in good), len(good)) for name in RANKED},
        "top_on_last": {
            name: rate(sum(one["order"][name][0] >= one["boxes"] for one in trails), len(trails)) for name in RANKED
        },
        "share_on_last": mean([(one["latents"] - one["boxes"] + 1) / one["latents"] for one in trails]),
        "points": [
            [t + 1, one["contrast"][t], one["single"][t]] for one in good[:SHOWN] for t in range(one["latents"])
        ],
    }


def curve(record: Record, name: str) -> list[float]:
    """Losses of one question by k; at random, their mean over the seeds."""
    if name != "random":
        found: list[float] = record["losses"][name]
        return found
    return [math.fsum(values) / len(values) for values in zip(*record["random"], strict=True)]


def _over(row: Sequence[float], random: Sequence[float]) -> float:
    """Mean over 0 < k < K of the loss above that of random orders: at both ends there is nothing to choose."""
    return math.fsum(a - b for a, b in zip(row[1:-1], random[1:-1], strict=True)) / (len(row) - 2)


def _largest(record: Record) -> int:
    """The latent, from 1, whose replacement costs most."""
    single = record["single"]
    return max(range(len(single)), key=lambda t: (single[t], -t)) + 1


def _correlation(records: Sequence[Record], score: str) -> dict[str, Any]:
    each = [spearman(record[score], record["single"]) for record in records]
    return {
        "within": mean([value for value in each if value is not None]),
        "positions": _positions([record[score] for record in records], [record["single"] for record in records]),
    }


def _positions(scores: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of the means of each position; questions are drawn again for the interval."""
    count = len(scores)
    if not count or len({len(row) for row in scores}) > 1:
        return {"rho": None, "low": None, "high": None, "pairs": count}
    x_NK, y_NK = np.asarray(scores, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    rho = spearman(x_NK.mean(0), y_NK.mean(0))
    rng = np.random.default_rng(0)
    both_NK = np.concatenate([x_NK, y_NK], axis=1)
    sums_RK = np.concatenate([_times(rng, size, count) @ both_NK for size in parts_of(count)])
    drawn_R = correlations(*np.split(sums_RK, 2, axis=1))
    known = drawn_R[~np.isnan(drawn_R)]
    low, high = interval(known) if rho is not None and known.size else (None, None)
    return {"rho": rho, "low": low, "high": high, "pairs": count}


def _times(rng: np.random.Generator, size: int, count: int) -> Array:
    """(size, count) how often each question is drawn."""
    times: Array = np.empty((size, count))
    for row in times:
        row[:] = np.bincount(rng.integers(0, count, count), minlength=count)
    return times


def spearman(x: Sequence[float] | Array, y: Sequence[float] | Array) -> float | None:
    """Correlation of the ranks, equal values sharing their mean rank; None where either does not vary."""
    found = float(correlations(np.asarray([x], dtype=np.float64), np.asarray([y], dtype=np.float64))[0])
    return None if math.isnan(found) else found


def correlations(x_RK: Array, y_RK: Array) -> Array:
    """Spearman's correlation of each of R rows; NaN where it is not defined."""
    a_RK, b_RK = (ranks - ranks.mean(1, keepdims=True) for ranks in (_ranks(x_RK), _ranks(y_RK)))
    size_R = np.sqrt((a_RK**2).sum(1) * (b_RK**2).sum(1))
    return np.divide((a_RK * b_RK).sum(1), size_R, out=np.full(len(size_R), np.nan), where=size_R > 0)


def _ranks(x_RK: Array) -> Array:
    below_RK = (x_RK[:, None] < x_RK[:, :, None]).sum(2)
    equal_RK = (x_RK[:, None] == x_RK[:, :, None]).sum(2)
    ranks_RK: Array = below_RK + (equal_RK + 1) / 2
    return ranks_RK
