"""Steering from its records: shares of answers by step. Pure functions, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from realvr.answers import equal
from realvr.diagnostics.numbers import mean, rate
from realvr.runs.journal import Record

OUTCOMES = ("new", "old", "neither", "unreadable")


def outcome(record: Record, condition: str = "moved") -> str:
    """What an answer does: it follows the ``new`` place, keeps the ``old`` answer, does ``neither``, or cannot be
    read."""
    said, choices = record["extracted"][condition], record["choices"]
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
        "errors": len(everything) - len(good),
    }


def _step(step: int, records: Sequence[Record]) -> dict[str, Any]:
    moved = [record for record in records if record["skipped"] is None]
    placed = [record for record in moved if "own_place" in record["extracted"]]
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
        "skipped": dict(sorted(skipped.items())),
    }


def _outcomes(records: Sequence[Record], condition: str) -> dict[str, Any]:
    """The share of each outcome."""
    counts = Counter(outcome(record, condition) for record in records)
    return {name: rate(counts[name], len(records)) for name in OUTCOMES}


def _later(records: Sequence[Record], condition: str) -> dict[str, Any]:
    """Percentage of the latents behind the step that are where they should be; a question is one value."""
    shares = [record["later"][condition] for record in records if record["later"][condition]]
    return mean([100.0 * sum(found) / len(found) for found in shares])
