"""The paper's five-task mean, and the order in which benchmarks are shown. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from realvr.evaluation.benchmark import BENCHMARKS, MINI, base_name
from realvr.evaluation.published import mean_columns


def in_order(names: Iterable[str]) -> list[str]:
    """Benchmarks as they are shown: those of the five-task mean (or their stand-ins) first, then the others by name."""
    order = [bench.name for bench in BENCHMARKS if bench.slot in mean_columns()]

    def place(name: str) -> tuple[int, str]:
        base = base_name(name)
        return (order.index(base) if base in order else len(order), name)

    return sorted(names, key=place)


def five_tasks(present: Iterable[str]) -> list[str] | None:
    """Names of the five tasks where all are there: the benchmarks themselves, else the world's five."""
    there = set(present)
    slots = [[bench.name for bench in BENCHMARKS if bench.slot == column] for column in mean_columns()]
    for prefix in ("", MINI):
        chosen = [next((prefix + name for name in names if prefix + name in there), None) for names in slots]
        if None not in chosen:
            return [name for name in chosen if name is not None]
    return None


def five_title(tasks: Iterable[str]) -> str:
    """What the mean over five tasks is called."""
    return "mini five-task mean" if any(name.startswith(MINI) for name in tasks) else "five-task mean"
