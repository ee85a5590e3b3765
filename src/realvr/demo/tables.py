"""The closing tables of a demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from realvr.demo.choice import Column, TableChoice, choice
from realvr.demo.leading import at
from realvr.widgets import DASH


def tables(summary: Mapping[str, Any], width: int = 132) -> list[Group]:
    """The closing tables, each at most ``width`` characters wide where either way round is."""
    return [_table(one, summary, width) for one in choice().tables]


def _table(chosen: TableChoice, summary: Mapping[str, Any], width: int) -> Group:
    """Title, table and legend: a row for each arm or, where that is too wide, a column."""
    quick = " (quick: the numbers mean nothing)" if summary["settings"]["quick"] else ""
    rows = [["", *(column.heading for column in chosen.columns)]]
    for name in chosen.arms:
        rows.append([name, *(_cell(summary["arms"][name], column, chosen.inline) for column in chosen.columns)])
    if _width(rows) > width:
        rows = [list(row) for row in zip(*rows, strict=True)]
    made = Table(box=SIMPLE_HEAD)
    for number, heading in enumerate(rows[0]):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        made.add_row(*row)
    return Group(Text(chosen.title + quick), made, Text(chosen.legend))


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Characters that a table of these cells takes, with the space around them."""
    columns = zip(*rows, strict=True)
    return 2 + sum(3 + max(len(line) for cell in column for line in (cell.split("\n"))) for column in columns)


def _cell(arm: Mapping[str, Any], column: Column, inline: bool) -> str:
    found = next((one for place in column.value if (one := at(arm, place)) is not None), None)
    if found is None or found[column.key] is None:
        return DASH
    value, low, high = (column.form.format(column.scale * number) for number in (found[column.key], *found["ci"]))
    read = found.get(column.read) if column.read else None
    beside = f"{value} [{low}, {high}]" if inline else f"{value}\n[{low}, {high}]"
    return beside + ("" if read is None else f"\n{read:.0f} % read")
