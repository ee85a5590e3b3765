"""Latent health from its records: means over questions. Pure functions, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import TypedDict

from realvr.diagnostics.numbers import by_number, mean, rate
from realvr.diagnostics.results import Mean, Rate
from realvr.runs.journal import Record
from realvr.runs.records import Text

ENOUGH = 0.95
"""Share of the gain that the smallest k must reach."""
NO_GAIN = 1e-3
"""Nats; a smaller gain is rounding, of which no share means anything."""
MODELS_DIFFER = "no_drift"
"""Field of a record: why latents are not compared with those of the second model."""


class Credit(TypedDict):
    """Credit over one kind of wrong answers."""

    questions: int
    with_wrong: int
    """Questions that have a wrong answer."""
    gamma: Mean
    gamma_with_wrong: Mean
    movable: Mean
    movable_with_wrong: Mean


class Drift(TypedDict):
    """Against the second model; ``reason``: why there is none."""

    reason: Text
    latents: int
    cosine: Mean
    relative: Mean


class Step(TypedDict):
    """One latent. ``gain``: log-probability with z_1 … z_t restored, minus with none."""

    step: int
    norm: Mean
    ratio: Mean
    adjacent: Mean
    readout: Mean
    drift: Mean
    gain: Mean


class Group(TypedDict):
    """The gain of questions with one value of a tag."""

    questions: int
    gain: Mean
    k95: Mean
    without_gain: int


class Health(TypedDict):
    """``health.json``."""

    latents: int
    questions: int
    errors: int
    eta: float
    group: int
    seed: int
    norm: Mean
    ratio: Mean
    adjacent: Mean
    gain: Mean
    k95: Mean
    k95_shares: dict[Text, Rate]
    """Share of questions by their smallest k; ``none``: without gain."""
    k95_of_mean: int | None
    without_gain: int
    readout_mass: Mean
    sampled: Credit
    options: Credit
    drift: Drift
    steps: list[Step]
    by: Text
    groups: dict[Text, Group]


def smallest_k(logp: Sequence[float]) -> int | None:
    """The first k with 95 % of the gain ``logp[K] - logp[0]``; None where there is no gain."""
    gain = logp[-1] - logp[0]
    if gain <= NO_GAIN:
        return None
    return next(k for k, value in enumerate(logp) if value - logp[0] >= ENOUGH * gain)


def summarise_health(records: Iterable[Record], eta: float, group: int, seed: int, by: str = "") -> dict[str, Any]:
    """Means over questions of the mean over their latents; ``steps`` has each latent."""
    everything = list(records)
    good = [record for record in everything if record["error"] is None]
    latents = max((record["latents"] for record in good), default=0)
    values = sorted({record["group"] for record in good} - {""}, key=by_number)
    curve = [math.fsum(record["logp"][k] for record in good) / len(good) for k in range(latents + 1)] if good else []
    return {
        "latents": latents,
        "errors": len(everything) - len(good),
        "eta": eta,
        "group": group,
        "seed": seed,
        "norm": _over(good, lambda record: record["norm"]),
        "ratio": _over(good, lambda record: record["ratio"]),
        "adjacent": _over(good, lambda record: record["adjacent"]),
        **_gain(good),
        "k95_shares": _shares(good, latents),
        "k95_of_mean": smallest_k(curve) if curve else None,
        "readout_mass": mean([math.fsum(record["readout"]) for record in good]),
        "sampled": _credit([record["sampled"] for record in good]),
        "options": _credit([record["options"] for record in good if record["options"] is not None]),
        "drift": _drift(good),
        "steps": [_step(good, t) for t in range(latents)],
        "by": by,
        "groups": {value: _gain([record for record in good if record["group"] == value]) for value in values},
    }


def _gain(records: Sequence[Record]) -> dict[str, Any]:
    """What the latents add to the log-probability of the right answer, and how many are enough."""
    enough = [float(k) for record in records if (k := smallest_k(record["logp"])) is not None]
    return {
        "questions": len(records),
        "gain": mean([record["logp"][-1] - record["logp"][0] for record in records]),
        "k95": mean(enough),
        "without_gain": len(records) - len(enough),
    }


def _shares(records: Sequence[Record], latents: int) -> dict[str, Any]:
    """Of questions, by their smallest k."""
    counts = Counter(smallest_k(record["logp"]) for record in records)
    names: dict[int | None, str] = {k: str(k) for k in range(1, latents + 1)} | {None: "none"}
    return {name: rate(counts[k], len(records)) for k, name in names.items()}


def _over(records: Sequence[Record], of: Callable[[Record], Sequence[float] | None]) -> dict[str, Any]:
    """Mean over questions of the mean over what each has."""
    found = [values for record in records if (values := of(record))]
    return mean([math.fsum(values) / len(values) for values in found])


def _credit(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wrong = [one for one in found if one["wrong"]]
    return {
        "questions": len(found),
        "with_wrong": len(wrong),
        "gamma": mean([math.fsum(one["gamma"]) for one in found]),
        "gamma_with_wrong": mean([math.fsum(one["gamma"]) for one in wrong]),
        "movable": mean([one["movable"] for one in found]),
        "movable_with_wrong": mean([one["movable"] for one in wrong]),
    }


def _drift(records: Sequence[Record]) -> dict[str, Any]:
    compared = [record for record in records if record["drift"] is not None]
    reasons = sorted({record[MODELS_DIFFER] for record in records if record[MODELS_DIFFER]})
    nothing = "the second model can read none of the questions" if records else "no question could be read"
    return {
        "reason": "" if compared else reasons[0] if reasons else nothing,
        "latents": max((len(record["drift"]["cosine"]) for record in compared), default=0),
        "cosine": _over(compared, lambda record: record["drift"]["cosine"]),
        "relative": _over(compared, lambda record: record["drift"]["relative"]),
    }


def _step(records: Sequence[Record], t: int) -> dict[str, Any]:
    def of(values: Iterable[Sequence[float] | None]) -> dict[str, Any]:
        return mean([one[t] for one in values if one is not None and t < len(one)])

    return {
        "step": t + 1,
        "norm": of(record["norm"] for record in records),
        "ratio": of(record["ratio"] for record in records),
        "adjacent": of(record["adjacent"] for record in records),
        "readout": of(record["readout"] for record in records),
        "drift": of(record["drift"] and record["drift"]["cosine"] for record in records),
        "gain": mean([record["logp"][t + 1] - record["logp"][0] for record in records if t < record["latents"]]),
    }
