"""How each benchmark scores: what the headline averages over, which questions belong together, and what else it prints.

| benchmark | headline | beside it |
|---|---|---|
| mmvp | accuracy over all questions | accuracy over pairs, both right |
| blink | unweighted mean over the subtasks present | accuracy over all questions |
| hrbench-4k, hrbench-8k | accuracy per option cycle, then the mean over the cycles | the same for single and cross |
| mme-realworld, mme-realworld-lite | accuracy over all questions | per task and subtask; Avg-C, their mean |
| vstar | accuracy over all questions | per category |
| any other | accuracy over all questions | per task, where there are several |

A question without an answer stays in every denominator. All shares are percentages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realvr.evaluation.catalog import MINI, base_name
from realvr.evaluation.records import Prediction

FIVE: tuple[tuple[str, ...], ...] = (
    ("mmvp",),
    ("blink",),
    ("hrbench-4k",),
    ("hrbench-8k",),
    ("mme-realworld-lite", "mme-realworld"),
)
"""The tasks of the five-task mean. The paper's fifth is the Lite set, which is taken where both are there."""


def in_order(names: Iterable[str]) -> list[str]:
    """Benchmarks as they are shown: the five (or their stand-ins) first, then the others by name."""
    order = [name for names in FIVE for name in names]

    def place(name: str) -> tuple[int, str]:
        base = base_name(name)
        return (order.index(base) if base in order else len(order), name)

    return sorted(names, key=place)


def five_tasks(present: Iterable[str]) -> list[str] | None:
    """Names of the five tasks where all are there: the benchmarks themselves, else the world's five."""
    there = set(present)
    for prefix in ("", MINI):
        chosen = [next((prefix + name for name in names if prefix + name in there), None) for names in FIVE]
        if None not in chosen:
            return [name for name in chosen if name is not None]
    return None


def five_title(tasks: Iterable[str]) -> str:
    """What the mean over five tasks is called."""
    return "mini five-task mean" if any(name.startswith(MINI) for name in tasks) else "five-task mean"


@dataclass(frozen=True)
class Rule:
    """``column`` names what the headline averages over; ``stratum`` what the bootstrap keeps fixed."""

    metric: str
    details: Callable[[Sequence[Prediction]], dict[str, Any]]
    column: Callable[[Prediction], str] = lambda row: ""
    stratum: Callable[[Prediction], str] = lambda row: ""
    cycles: bool = False
    """Rows are rotations of the options of fewer questions, which the bootstrap keeps together."""


def percent(rows: Sequence[Prediction]) -> float:
    """Share of right answers."""
    return 100 * sum(row.correct for row in rows) / len(rows)


def split(rows: Iterable[Prediction], key: Callable[[Prediction], str]) -> dict[str, list[Prediction]]:
    """Rows by key, keys in order."""
    parts: dict[str, list[Prediction]] = defaultdict(list)
    for row in rows:
        parts[key(row)].append(row)
    return {name: parts[name] for name in sorted(parts)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shares(parts: Mapping[str, Sequence[Prediction]]) -> dict[str, dict[str, Any]]:
    return {name: {"accuracy": percent(part), "n": len(part)} for name, part in parts.items()}


def pairs(rows: Iterable[Prediction]) -> dict[tuple[str, int], list[Prediction]]:
    """Complete pairs, by (pair, decoding seed)."""
    found: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    for row in rows:
        if row.pair is not None:
            found[row.pair, row.seed].append(row)
    return {key: found[key] for key in sorted(found) if len(found[key]) == 2}


def _mmvp(rows: Sequence[Prediction]) -> dict[str, Any]:
    both = [all(row.correct for row in pair) for pair in pairs(rows).values()]
    return {"single": percent(rows), "pair": 100 * _mean(both) if both else None, "pairs": len(both)}


def _blink(rows: Sequence[Prediction]) -> dict[str, Any]:
    subtasks = split(rows, subtask_of_blink)
    return {
        "macro": _mean([percent(part) for part in subtasks.values()]),
        "micro": percent(rows),
        "subtasks": _shares(subtasks),
    }


def _hrbench(rows: Sequence[Prediction]) -> dict[str, Any]:
    cycles = {
        cycle: {"all": percent(part)}
        | {name: percent(some) for name, some in split(part, lambda r: r.category).items()}
        for cycle, part in split(rows, cycle_of).items()
    }
    names = ["all", *sorted({name for cycle in cycles.values() for name in cycle} - {"all"})]
    means = {name: _mean([cycle[name] for cycle in cycles.values() if name in cycle]) for name in names}
    return {**means, "cycles": cycles}


def _mme(rows: Sequence[Prediction]) -> dict[str, Any]:
    def name(row: Prediction) -> str:
        return f"{row.task}/{row.tags.get('subtask') or row.category}"

    def over_subtasks(some: Sequence[Prediction]) -> float:
        return _mean([percent(part) for part in split(some, name).values()])

    tasks = split(rows, lambda row: row.task)
    return {
        "micro": percent(rows),
        "avg_c": over_subtasks(rows),
        "tasks": {
            task: {"accuracy": percent(part), "avg_c": over_subtasks(part), "n": len(part)}
            for task, part in tasks.items()
        },
        "subtasks": _shares(split(rows, name)),
    }


def _vstar(rows: Sequence[Prediction]) -> dict[str, Any]:
    return {"accuracy": percent(rows), "categories": _shares(split(rows, lambda row: row.category))}


def _plain(rows: Sequence[Prediction]) -> dict[str, Any]:
    tasks = split(rows, lambda row: row.task)
    return {"accuracy": percent(rows)} | ({"tasks": _shares(tasks)} if len(tasks) > 1 else {})


def subtask_of_blink(row: Prediction) -> str:
    """The BLINK reader puts the subtask into ``task``."""
    return row.task


def cycle_of(row: Prediction) -> str:
    """Which rotation of the options."""
    return row.cycle or ""


_HRBENCH = Rule("mean over option cycles", _hrbench, column=cycle_of, cycles=True)
_MME = Rule("accuracy", _mme)
RULES: dict[str, Rule] = {
    "mmvp": Rule("single accuracy", _mmvp),
    "blink": Rule("mean over subtasks", _blink, column=subtask_of_blink, stratum=subtask_of_blink),
    "hrbench-4k": _HRBENCH,
    "hrbench-8k": _HRBENCH,
    "mme-realworld": _MME,
    "mme-realworld-lite": _MME,
    "vstar": Rule("accuracy", _vstar),
}
_ANY = Rule("accuracy", _plain)


def rule_of(bench: str) -> Rule:
    """The benchmark's rule by its name, also for the world's stand-in; plain accuracy for any other name."""
    return RULES.get(base_name(bench), _ANY)


def units(rule: Rule, rows: Iterable[Prediction]) -> dict[str, str]:
    """Question id -> the unit that the bootstrap draws.

    HR-Bench files do not say which rows are rotations of one question. They have the same options in another order, and
    the n-th question with those options is the n-th in every cycle.
    """
    first: dict[str, Prediction] = {}
    for row in rows:
        first.setdefault(row.question, row)
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
