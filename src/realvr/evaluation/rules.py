"""What a scoring rule is made of: what the headline averages over, which questions belong together, what stands beside.

Each benchmark has a `Rule` in its own file (`realvr.evaluation.tasks`). A question without an answer stays in every
denominator. All shares are percentages. No torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realvr.evaluation.records import Prediction
from realvr.evaluation.statistics import Bootstrap


def _no_intervals(rows: Sequence[Prediction], sampling: Bootstrap) -> dict[str, list[float]]:
    return {}


@dataclass(frozen=True)
class Rule:
    """``column`` names what the headline averages over; ``stratum`` what the bootstrap keeps fixed."""

    metric: str
    """What the headline is called in tables."""
    details: Callable[[Sequence[Prediction]], dict[str, Any]]
    """Further numbers, ``metrics`` of the summary. A group of questions is ``{"accuracy": …, "n": …}``."""
    column: Callable[[Prediction], str] = lambda row: ""
    stratum: Callable[[Prediction], str] = lambda row: ""
    cycles: bool = False
    """Rows are rotations of the options of fewer questions, which the bootstrap keeps together."""
    group: Callable[[Prediction], str] | None = None
    """Questions of one group count as one in the headline, right only where all of them are."""
    intervals: Callable[[Sequence[Prediction], Bootstrap], dict[str, list[float]]] = _no_intervals
    """Intervals of further numbers: ``X_ci`` in ``metrics`` belongs to ``X``."""
    headline: str = "accuracy over all questions"
    """The headline in words, for the documentation; likewise:"""
    beside: str = ""
    """What ``metrics`` holds."""
    draws: str = "questions"
    """What the bootstrap draws."""


def counted(rule: Rule, rows: Sequence[Prediction]) -> Sequence[Prediction]:
    """The rows that the headline counts: one a question, or one a group and decoding seed."""
    if rule.group is None:
        return rows
    groups: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    for row in rows:
        groups[rule.group(row), row.seed].append(row)
    return [replace(part[0], correct=all(row.correct for row in part)) for part in groups.values()]


def percent(rows: Sequence[Prediction]) -> float:
    """Share of right answers."""
    return 100 * sum(row.correct for row in rows) / len(rows)


def mean(values: Sequence[float]) -> float:
    """Unweighted."""
    return sum(values) / len(values)


def split(rows: Iterable[Prediction], key: Callable[[Prediction], str]) -> dict[str, list[Prediction]]:
    """Rows by key, keys in order."""
    parts: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        parts[key(row)].append(row)
    return {name: parts[name] for name in sorted(parts)}


def shares(parts: Mapping[str, Sequence[Prediction]]) -> dict[str, dict[str, Any]]:
    """Accuracy and number of questions of each part."""
    return {name: {"accuracy": percent(part), "n": len(part)} for name, part in parts.items()}


def _plain(rows: Sequence[Prediction]) -> dict[str, Any]:
    tasks = split(rows, lambda row: row.task)
    return {"accuracy": percent(rows)} | ({"tasks": shares(tasks)} if len(tasks) > 1 else {})


PLAIN = Rule("accuracy", _plain, beside="`tasks` where there are several")
"""For your own question file."""


def cycle_of(row: Prediction) -> str:
    """Which rotation of the options."""
    return row.cycle or ""


def units(rule: Rule, rows: Iterable[Prediction]) -> dict[str, str]:
    """Question id -> the unit that the bootstrap draws.

    Files with option cycles do not say which rows are rotations of one question. They have the same options in another
    order, and the n-th question with those options is the n-th in every cycle.
    """
    first: dict[str, Prediction] = {}
    for row in rows:
        first.setdefault(row.question, row)
    if rule.group is not None:
        return {question: rule.group(row) for question, row in first.items()}
    if not rule.cycles:
        return {question: question for question in first}
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    unit: dict[str, str] = {}
    for question in sorted(first, key=natural):
        row = first[question]
        key = (row.category, *sorted(row.choices))
        unit[question] = "\x1f".join((*key, str(seen[(cycle_of(row), *key)])))
        seen[(cycle_of(row), *key)] += 1
    return unit


def natural(text: str) -> list[tuple[int, int, str]]:
    """Sorting key under which 10 comes after 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", text)]
