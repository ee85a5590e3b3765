"""Rates with their counts and 95 % intervals, for evaluations on pairs. Numpy only."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.evaluation.statistics import interval

_Z = 1.959963984540054  # two-sided 95 % of a normal distribution
RESAMPLES = 2000
_AT_ONCE = 2**22
"""Numbers that are drawn at once, unless one draw has more: 32 MB."""
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
    low, high = interval(resampled(array, np.random.default_rng(_SEED)))
    return {"mean": float(array.mean()), "low": low, "high": high, "pairs": len(array)}


def resampled(array: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Means (R, …) of draws with replacement from (n, …)."""
    sizes = parts_of(array.size)
    return np.concatenate([array[rng.integers(0, len(array), (size, len(array)))].mean(1) for size in sizes])


def parts_of(size: int) -> list[int]:
    """How many of the `RESAMPLES` draws of ``size`` numbers each are made at once."""
    several = max(1, _AT_ONCE // size)
    return [min(several, RESAMPLES - start) for start in range(0, RESAMPLES, several)]


def difference(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Mean of one group minus mean of another, with a bootstrap interval that resamples each; None where one is
    empty. ``pairs`` counts both."""
    if not first or not second:
        return {"mean": None, "low": None, "high": None, "pairs": len(first) + len(second)}
    rng, groups = np.random.default_rng(_SEED), [np.asarray(group, dtype=np.float64) for group in (first, second)]
    low, high = interval(resampled(groups[0], rng) - resampled(groups[1], rng))
    between = float(groups[0].mean() - groups[1].mean())
    return {"mean": between, "low": low, "high": high, "pairs": len(first) + len(second)}


def macro_mean(means: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Unweighted mean over edits that have one (`mean`); its interval is from theirs, since edits are independent."""
    known = [one for one in means if one["mean"] is not None]
    if not known:
        return {"mean": None, "low": None, "high": None, "pairs": 0}
    middle = sum(one["mean"] for one in known) / len(known)
    down, up = (math.sqrt(sum((one[end] - one["mean"]) ** 2 for one in known)) / len(known) for end in ("low", "high"))
    return {"mean": middle, "low": middle - down, "high": middle + up, "pairs": sum(one["pairs"] for one in known)}


def short(value: float) -> float:
    """Six significant digits: what a record keeps of a number."""
    return float(f"{value:.6g}")


def hashed(text: str) -> int:
    """A number for a text such as an id, the same in every process. Half a surrogate pair, as JSON may hold it, has no
    UTF-8 and is escaped."""
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> dict[str, Any]:
    """Ratio of two means over the same pairs, with its bootstrap interval; None without a pair or with nothing below.

    Not the mean of ratios: a pair weighs by what it has below.
    """
    below, above = np.asarray(bottoms, dtype=np.float64), np.asarray(tops, dtype=np.float64)
    if not len(above) or not below.sum() > 0:
        return {"mean": None, "low": None, "high": None, "pairs": len(above)}
    rng = np.random.default_rng(_SEED)
    both, alike = np.stack([above, below], axis=1), np.full(len(above), 1 / len(above))
    # How often each pair is drawn: n draws with replacement are a multinomial count.
    sums_R2 = np.concatenate([rng.multinomial(len(above), alike, size) @ both for size in parts_of(len(above))])
    drawn = sums_R2[:, 0] / np.where(sums_R2[:, 1] > 0, sums_R2[:, 1], np.nan)
    low, high = interval(drawn[np.isfinite(drawn)])
    return {"mean": float(above.sum() / below.sum()), "low": low, "high": high, "pairs": len(above)}


def columns(rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Mean of each column of one row per question, such as a value for each latent. Rows may differ in length."""
    most = max((len(row) for row in rows), default=0)
    return [mean([row[place] for row in rows if place < len(row)]) for place in range(most)]


def by_number(text: str) -> tuple[float, str]:
    """To sort values of a tag: numbers by value, other texts behind them."""
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


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
