"""Steering from its records: shares of answers by step. Pure functions, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from realvr.answers import equal
from realvr.diagnostics.numbers import mean, rate
from realvr.runs.journal import Record

OUTCOMES = ("new", "old", "neither", "unreadable")


def outcome(record: Record, condition: str = "moved") -> str:
    """What an answer does: it follows the ``new`` place, keeps the ``old`` answer, does ``neither``, or cannot be
    read."""
    extracted = record["extracted"]
    said = extracted[condition] if condition in extracted else record[condition]["extracted"]  # the random direction
    choices = record["choices"]
    if said is None:
        return "unreadable"
    for name in ("new", "old"):
        if equal(said, record[f"{name}_truth"], choices):
            return name
    return "neither"


def summarise_steer(records: Iterable[Record]) -> dict[str, Any]:
    """``steps``: the numbers of each step; ``follows``: one value a question, its share of steps at which the answer
    followed; ``errors``: questions that could not be read."""
    everything = list(records)
    good = [record for record in everything if record["error"] is None]
    moved = [record for record in good if record["skipped"] is None]
    per_question: dict[str, list[float]] = {}
    for record in moved:
        per_question.setdefault(record["id"], []).append(100.0 * (outcome(record) == "new"))
    return {
        "latents": moved[0]["latents"] if moved else 0,
        "questions": len({record["id"] for record in good}),
        "follows": mean([sum(values) / len(values) for values in per_question.values()]),
        "steps": [_step(t, [r for r in good if r["step"] == t]) for t in sorted({r["step"] for r in good})],
        "distances": by_distance(moved, _at_distance),
        "errors": len(everything) - len(good),
    }


def distance_bin(distance: int) -> tuple[int, int]:
    """First and last distance of the group that a distance belongs to: 0, 1, 2, 3-4, 5-8, 9-16 and so on."""
    if distance <= 2:
        return distance, distance
    high = 1 << (distance - 1).bit_length()
    return high // 2 + 1, high


def by_distance(
    records: Sequence[Record], numbers: Callable[[Sequence[Record]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Numbers of the records in each group of distances, ``near`` to ``far``; records without a distance are left
    out."""
    groups: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.get("distance") is not None:
            groups.setdefault(distance_bin(record["distance"]), []).append(record)
    return [{"near": low, "far": high, **numbers(found)} for (low, high), found in sorted(groups.items())]


def by_question(records: Sequence[Record], value: Callable[[Record], float | None], name: str = "id") -> dict[str, Any]:
    """Mean over questions of their mean over records (steps); records without a value are left out."""
    found: dict[str, list[float]] = {}
    for record in records:
        one = value(record)
        if one is not None:
            found.setdefault(record[name], []).append(one)
    return mean([sum(values) / len(values) for values in found.values()])


def _follows(condition: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        known = "random" in record if condition == "random" else condition in record["extracted"]
        return 100.0 * (outcome(record, condition) == "new") if known else None

    return value


def _at_distance(records: Sequence[Record]) -> dict[str, Any]:
    """Percentage of answers that follow, by condition, and of later latents on the new trail."""
    follows = {name: by_question(records, _follows(name)) for name in ("moved", "own_place", "random")}
    return {**follows, "later_moved": by_question(records, lambda r: _share(r["later"]["moved"]))}


def _share(found: Sequence[bool]) -> float | None:
    return 100.0 * sum(found) / len(found) if found else None


def _step(step: int, records: Sequence[Record]) -> dict[str, Any]:
    moved = [record for record in records if record["skipped"] is None]
    placed = [record for record in moved if "own_place" in record["extracted"]]
    drawn = [record for record in moved if "random" in record]  # earlier versions had no such control
    skipped = Counter(record["skipped"] for record in records if record["skipped"] is not None)
    return {
        "step": step,
        "questions": len(moved),
        "moved": _outcomes(moved, "moved"),
        "own_place": _outcomes(placed, "own_place"),
        "free": _outcomes(moved, "free"),
        "later_moved": _later(moved, "moved"),
        "later_own_place": _later(placed, "own_place"),
        "later_free": _later(moved, "free"),
        "unchanged": rate(sum(record["unchanged"] for record in moved), len(moved)),
        "under_way": _outcomes([record for record in moved if not record["ended"]], "moved"),
        "ended": _outcomes([record for record in moved if record["ended"]], "moved"),
        "random": _outcomes(drawn, "random"),
        "later_random": mean([share for r in drawn if (share := _share(r["random"]["later"])) is not None]),
        "skipped": dict(sorted(skipped.items())),
    }


def _outcomes(records: Sequence[Record], condition: str) -> dict[str, Any]:
    """The share of each outcome."""
    counts = Counter(outcome(record, condition) for record in records)
    return {name: rate(counts[name], len(records)) for name in OUTCOMES}


def _later(records: Sequence[Record], condition: str) -> dict[str, Any]:
    """Percentage of the latents behind the step that are where they should be; a question is one value."""
    shares = [_share(record["later"][condition]) for record in records]
    return mean([share for share in shares if share is not None])
