"""Residual injection from its records: curves over alpha and the best alpha. Pure functions, no torch.

The two directions of a pair and the seeds of its random directions are not independent, so a pair is one value (their
mean) and intervals resample pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from realvr.answers import equal
from realvr.diagnostics.numbers import hashed, mean, rate
from realvr.runs.journal import Record

MEASURES = {
    "lift": "toward the other view's right answer",
    "toward": "toward the other view's prediction",
    "margin": "margin of the other view's answer",
}
LEAST = 4
"""Pairs that a choice of alpha and its report need."""
_Values = dict[str, float]
"""One number a pair."""


def summarise_residual(records: Iterable[Record]) -> dict[str, Any]:
    """``inject`` and ``random``: the curves; ``minus_random``: their paired difference; ``best``: by measure;
    ``edits``: the curves of each edit; ``relative_step``: the norm of the step to the other view over that of the
    latent."""
    everything = list(records)
    good = [record for record in everything if record["error"] is None]
    edits = dict.fromkeys(record["edit"] for record in good)
    steps = [_relative_step(record) for record in good]
    return {
        "latents": good[0]["latents"] if good else 0,
        "seeds": len(_sides(good[0])[0]["random"]) if good else 0,
        **_curves(good),
        "relative_step": mean([step for step in steps if step is not None]),
        "best": {key: _best(good, key) for key in MEASURES},
        "edits": {edit: _curves([record for record in good if record["edit"] == edit]) for edit in edits},
        "errors": len(everything) - len(good),
    }


def _sides(record: Record) -> list[dict[str, Any]]:
    return list(record["directions"].values())


def _relative_step(record: Record) -> float | None:
    """Mean over slots and directions of |z' - z| / |z|."""
    ratios = [
        step / norm
        for side in _sides(record)
        for step, norm in zip(side["step"], side["norm"], strict=True)
        if norm > 0
    ]
    return sum(ratios) / len(ratios) if ratios else None


def _branches(side: Mapping[str, Any], name: str) -> list[Mapping[str, list[Any]]]:
    return [side["inject"]] if name == "inject" else list(side["random"])


def _curves(records: Sequence[Record]) -> dict[str, Any]:
    alphas = records[0]["alphas"] if records else []
    found = {name: [_point(records, name, place) for place in range(len(alphas))] for name in ("inject", "random")}
    between = [
        {"alpha": alpha} | {key: _minus(records, key, place) for key in MEASURES}
        for place, alpha in enumerate(alphas)
        if place
    ]
    return {"pairs": len(records), **found, "minus_random": between}


def _point(records: Sequence[Record], name: str, place: int) -> dict[str, Any]:
    def share(test: str) -> dict[str, Any]:
        told = [
            (branch["extracted"][place], side.get(test), record["choices"])
            for record in records
            for side in _sides(record)
            for branch in _branches(side, name)
        ]
        counted = sum(said is not None if not test else bool(equal(said, right, of)) for said, right, of in told)
        return rate(counted, len(told))

    return {
        "alpha": records[0]["alphas"][place],
        **{key: mean(list(values(records, name, key, place).values())) for key in MEASURES},
        "donor": share("donor_truth"),
        "recipient": share("recipient_truth"),
        "parsed": share(""),
    }


def values(records: Sequence[Record], name: str, key: str, place: int) -> _Values:
    """One value a pair: the change from alpha = 0 to the alpha at ``place``, mean over directions and seeds."""
    found = {}
    for record in records:
        sides = _sides(record)
        # What the model says of the other view is what the other direction says at alpha = 0.
        others = [side["inject"]["extracted"][0] for side in reversed(sides)]
        if key == "toward" and None in others:
            continue
        changes = [
            _change(branch, key, place, side["donor_truth"] if key == "lift" else other, record["choices"])
            for side, other in zip(sides, others, strict=True)
            for branch in _branches(side, name)
        ]
        found[record["pair"]] = sum(changes) / len(changes)
    return found


def _change(branch: Mapping[str, list[Any]], key: str, place: int, goal: str, choices: Sequence[str]) -> float:
    if key == "margin":
        return float(branch["margin"][place] - branch["margin"][0])
    reached = [bool(equal(branch["extracted"][at], goal, choices)) for at in (place, 0)]
    return 100.0 * (reached[0] - reached[1])


def _minus(records: Sequence[Record], key: str, place: int) -> dict[str, Any]:
    injected, random = (values(records, name, key, place) for name in ("inject", "random"))
    return mean([injected[pair] - random[pair] for pair in injected])


def halves(pairs: Iterable[str]) -> tuple[set[str], set[str]]:
    """Pairs on which alpha is chosen, and those on which it is reported: by the hash of their ids."""
    order = sorted(pairs, key=lambda name: (hashed(name), name))
    return set(order[: len(order) // 2]), set(order[len(order) // 2 :])


def _best(records: Sequence[Record], key: str) -> dict[str, Any]:
    places = range(1, len(records[0]["alphas"])) if records else range(0)
    curves = {records[0]["alphas"][place]: values(records, "inject", key, place) for place in places}
    known = next(iter(curves.values()), {})
    if not known:
        return {"alpha": None, "value": mean([]), "chosen_on": 0, "reason": "no pair has a value", "same_pairs": None}
    everywhere = _largest(curves, set(known))
    same = {"alpha": everywhere, "value": mean(list(curves[everywhere].values()))}
    if len(known) < LEAST:
        reason = f"{len(known)} pairs are too few to choose on one half: {LEAST} are needed"
        return {"alpha": None, "value": mean([]), "chosen_on": 0, "reason": reason, "same_pairs": same}
    choosing, reporting = halves(known)
    alpha = _largest(curves, choosing)
    value = mean([curves[alpha][pair] for pair in curves[alpha] if pair in reporting])
    return {"alpha": alpha, "value": value, "chosen_on": len(choosing), "reason": None, "same_pairs": same}


def _largest(curves: Mapping[float, _Values], pairs: set[str]) -> float:
    """The alpha with the largest mean over these pairs; of equals the smallest."""
    means = {alpha: sum(found[pair] for pair in sorted(pairs)) / len(pairs) for alpha, found in curves.items()}
    return min(means, key=lambda alpha: (-means[alpha], alpha))
