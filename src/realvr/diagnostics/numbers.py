"""Rates with their counts and 95 % intervals, for evaluations on pairs. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from realvr.evaluation.statistics import interval

_Z = 1.959963984540054  # two-sided 95 % of a normal distribution
RESAMPLES = 2000
_SEED = 0

Rate = dict[str, Any]
"""``count``, ``of``, ``rate``, ``low``, ``high``; the last three are None where ``of`` is 0."""


def rate(count: int, of: int) -> Rate:
    """A share with its Wilson interval."""
    if of == 0:
        return {"count": count, "of": of, "rate": None, "low": None, "high": None}
    share = count / of
    centre = share + _Z**2 / (2 * of)
    half = _Z * math.sqrt(share * (1 - share) / of + _Z**2 / (4 * of * of))
    scale = 1 + _Z**2 / of
    # At 0 and 1 the formula gives the end of the range up to rounding: say it exactly.
    low = 0.0 if count == 0 else (centre - half) / scale
    high = 1.0 if count == of else (centre + half) / scale
    return {"count": count, "of": of, "rate": share, "low": low, "high": high}


def macro(rates: Sequence[Rate]) -> dict[str, Any]:
    """Unweighted mean over edits that have a rate (``edits`` says how many), with a bootstrap interval that resamples
    the pairs of each edit on its own."""
    known = [one for one in rates if one["of"]]
    if not known:
        return {"edits": 0, "rate": None, "low": None, "high": None}
    rng = np.random.default_rng(_SEED)
    # Resampling n zeros and ones with replacement is a binomial draw of their sum.
    drawn = np.mean([rng.binomial(one["of"], one["rate"], RESAMPLES) / one["of"] for one in known], axis=0)
    low, high = interval(drawn)
    mean = sum(one["rate"] for one in known) / len(known)
    return {"edits": len(known), "rate": mean, "low": low, "high": high}


def mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean of one value per pair with its bootstrap interval over pairs; None where there is no value."""
    if not values:
        return {"mean": None, "low": None, "high": None, "pairs": 0}
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    several = max(1, 2**22 // len(array))  # resamples drawn at once: 32 MB of indices
    sizes = [min(several, RESAMPLES - start) for start in range(0, RESAMPLES, several)]
    drawn = np.concatenate([array[rng.integers(0, len(array), (size, len(array)))].mean(1) for size in sizes])
    low, high = interval(drawn)
    return {"mean": float(array.mean()), "low": low, "high": high, "pairs": len(array)}


def percent(found: dict[str, Any], counts: bool = True) -> str:
    """``73.1 (323)``, or a dash."""
    if found["rate"] is None:
        return "–"
    return f"{100 * found['rate']:.1f}" + (f" ({found['count']})" if counts and "count" in found else "")


def controls(pairs: int, missing: Iterable[dict[str, str]]) -> dict[str, Any]:
    """How many of the pairs that were read lack the unrelated control, by reason, with the first case of each."""
    reasons: dict[str, dict[str, Any]] = {}
    for one in missing:
        found = reasons.setdefault(one["reason"], {"pairs": 0, "first": one["detail"]})
        found["pairs"] += 1
    return {"pairs": pairs, "without": sum(found["pairs"] for found in reasons.values()), "reasons": reasons}


def controls_line(found: dict[str, Any] | None) -> str | None:
    """A sentence about the pairs without a control; None where there is none."""
    if not found or not found["without"]:
        return None
    reasons = [
        f"{one['pairs']} because {reason}" + (f" (first: {one['first']})" if one["first"] else "")
        for reason, one in found["reasons"].items()
    ]
    verb = "has" if found["without"] == 1 else "have"
    return f"{found['without']} of {found['pairs']} pairs {verb} no unrelated control: {'; '.join(reasons)}"
