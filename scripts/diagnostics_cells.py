"""Cells of the tables that set the paper's numbers beside ours (diagnostics_table.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realvr.evaluation.published import published

DRAWN = "drawn, no number"
NONE = "not printed"
OURS = "measured: `mini`"
EDITS = {
    "turn_on_trail": "turn on trail",
    "turn_beside": "turn beside",
    "recolor_end": "recolor end",
    "swap_circles": "swap circles",
}

Step = str | int | tuple[tuple[str, Any], ...]
"""Key of a dict, place in a list, or the fields of the wanted member of a list."""


@dataclass(frozen=True)
class Ask:
    """A measured number: test, model, and where it stands in NAME.json."""

    test: str
    path: tuple[Step, ...]
    digits: int = 3
    model: str = "mini"
    scale: float = 1.0
    sign: bool = False
    n: tuple[Step, ...] = ()
    """Where n stands, for a plain number."""
    setting: tuple[str, str] | None = None
    """Only from a run with this setting."""
    counts: bool = False
    """Whether the count behind a rate is shown, as the paper does."""

    @property
    def key(self) -> str:
        steps = (step if isinstance(step, str | int) else ", ".join(f"{k}={v}" for k, v in step) for step in self.path)
        return f"{self.model}, {self.test}: " + " > ".join(map(str, steps))

    def fits(self, settings: Mapping[str, Any]) -> bool:
        return self.setting is None or settings.get(self.setting[0]) == self.setting[1]

    @staticmethod
    def find(summary: Any, path: tuple[Step, ...]) -> Any:
        for step in path:
            if isinstance(step, tuple):
                summary = next((one for one in summary if all(one[k] == v for k, v in step)), None)
            elif isinstance(step, int):
                summary = summary[step] if step < len(summary) else None
            else:
                summary = summary.get(step)
            if summary is None:
                return None
        return summary

    def shown(self, value: float) -> str:
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value * self.scale:{'+' if self.sign else ''}.{self.digits}f}".replace("-", "−")


Cell = str | Ask


@dataclass(frozen=True)
class Grid:
    header: tuple[str, ...]
    rows: list[list[Cell]]
    n: bool = True
    """Whether n is shown; False where a column or the text has it."""


@dataclass(frozen=True)
class Part:
    """What stands under the labels of one float or panel."""

    labels: tuple[str, ...]
    about: str
    grids: list[Grid] = field(default_factory=list)


def paper(label: str, row: str, column: str, digits: int, sign: bool = False, method: str | None = None) -> str:
    """A number of the paper as it prints it."""
    (found,) = [one for one in published(label, method=method) if one.row == row]
    if column not in found.values:
        return NONE
    mean, std = found.values[column]
    text = f"{mean:{'+' if sign else ''},.{digits}f}".replace("-", "−")
    counted = found.values.get(f"{column}_count")
    text += f" ({counted[0]:,.0f})" if counted else ""
    return text + (f" ± {std:.{digits}f}" if std is not None else "")


def drawn(rows: Sequence[list[Cell]]) -> Grid:
    return Grid(("number", "published", OURS), [[name, DRAWN, ask] for name, ask in rows])
