"""Several training seeds of one model as one arm: mean and standard deviation (tab:mass-matched-factorial). No torch.

Results whose names differ only in a trailing seed (``realvr-seed0``, ``realvr-seed1``; also ``_seed0``, ``-s0``) are
seeds of one arm. A number of an arm is the mean over its seeds with the sample standard deviation (n - 1), as the paper
prints them; each seed counts once, however many pairs it was measured on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realvr.diagnostics.parts import Shown
from realvr.widgets import DASH, Cell, Table, with_std

_SEED = re.compile(r"[-_.](?:seed[-_]?|s)\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Arm:
    """One model, or several seeds of it."""

    name: str
    results: tuple[Shown, ...]

    @property
    def number(self) -> int:
        """Decides its color."""
        return self.results[0].number

    @property
    def label(self) -> str:
        """For a legend."""
        return self.name if len(self.results) == 1 else f"{self.name} ({len(self.results)} seeds)"

    def across(self, value: Callable[[Any], float | None]) -> dict[str, Any]:
        """A number of its summaries over seeds."""
        return across([value(one.summary) for one in self.results])


def arms(results: Sequence[Shown]) -> list[Arm]:
    """Results grouped by name without the seed; one that stands alone keeps its whole name."""
    groups: dict[str, list[Shown]] = {}
    for one in results:
        groups.setdefault(_SEED.sub("", one.name), []).append(one)
    return [Arm(name if len(found) > 1 else found[0].name, tuple(found)) for name, found in groups.items()]


def across(values: Sequence[float | None]) -> dict[str, Any]:
    """``mean``, ``std`` (None of a single seed) and ``seeds``, over the seeds that have a value."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "std": None, "seeds": 0}
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1)) if len(known) > 1 else None
    return {"mean": mean, "std": std, "seeds": len(known)}


def seeds_table(
    caption: str, results: Sequence[Shown], columns: Mapping[str, Callable[[Any], float | None]]
) -> list[Table]:
    """A row for each arm with several seeds; no table where there is none. ``columns``: heading to the number."""
    several = [arm for arm in arms(results) if len(arm.results) > 1]
    rows: list[list[Cell | str]] = []
    for arm in several:
        found = [arm.across(value) for value in columns.values()]
        cells = [Cell(DASH) if one["mean"] is None else with_std(one["mean"], one["std"]) for one in found]
        rows.append([arm.name, str(len(arm.results)), *cells])
    note = "Mean ± sample standard deviation over training seeds; names that differ only in their seed are one arm."
    return [Table(caption, ["arm", "seeds", *columns], rows, note)] if rows else []
