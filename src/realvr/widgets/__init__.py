"""Pieces of a page: cells, tables, figures, notes, switches; `charts` draws the figures, `explorer` shows cases.

Numbers become text here, intervals beside them. Diagnostics and the report build their sections of these; nothing else
of realvr is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup

from realvr.widgets.charts import swatch
from realvr.widgets.explorer import Explorer

DASH = "–"
MINUS = "\u2212"
_NUMBER = re.compile(r"(?P<flag>--\S+\s+)?(?<![^\s(\[,;<>])[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![^\s)\],;:.%])")
"""A number that stands by itself in a text, and the flag of a command before it; no part of a name, date or range."""
FEW_QUESTIONS = 100
FEW_PAIRS = 30


@dataclass(frozen=True)
class Cell:
    """``text`` with a second, smaller line (an interval) below; ``few`` marks a number over a small sample."""

    text: str
    below: str = ""
    few: bool = False
    value: float | None = None
    """Unrounded, for data.json."""


@dataclass(frozen=True)
class Table:
    """The first column names the rows. ``published``: numbers of the paper, to be set apart."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    note: str = ""
    published: bool = False
    part: Literal["table"] = "table"

    @property
    def numbers(self) -> set[int]:
        """Columns that hold numbers, whose heads are aligned with them."""
        return {place for row in self.rows for place, cell in enumerate(row) if not isinstance(cell, str)}

    def as_json(self) -> dict[str, Any]:
        """The same table as data: text, interval and unrounded value of every cell."""
        rows = [[_data(cell) for cell in row] for row in self.rows]
        found = {"caption": self.caption, "header": list(self.header), "rows": rows}
        return found | ({"published": True} if self.published else {})


def _data(cell: Cell | str) -> object:
    if isinstance(cell, str):
        return cell
    return {"text": cell.text, "below": cell.below, "value": cell.value} if cell.value is not None else cell.text


@dataclass(frozen=True)
class Key:
    """One entry of a legend: the number decides colour and marker."""

    number: int
    name: str
    dashed: bool = False

    @property
    def swatch(self) -> Markup:
        """The line or dot beside its words."""
        return swatch(self.number, self.dashed)


@dataclass(frozen=True)
class Figures:
    """Small figures side by side with one legend. ``switch``: entries of the legend show and hide their lines."""

    caption: str
    figures: Sequence[tuple[str, Markup]]
    keys: Sequence[Key] = ()
    switch: bool = False
    note: str = ""
    id: str = ""
    part: Literal["figures"] = "figures"


@dataclass(frozen=True)
class Text:
    """A paragraph; ``kind`` sets it apart. ``link`` is where it leads, relative to the page."""

    text: str
    kind: Literal["plain", "warning", "command", "heading", "code"] = "plain"
    link: str = ""
    part: Literal["text"] = "text"


@dataclass(frozen=True)
class Fold:
    """Parts behind a summary that a reader may open."""

    title: str
    widgets: Sequence[Any]
    published: bool = False
    open: bool = False
    part: Literal["fold"] = "fold"


@dataclass(frozen=True)
class Switch:
    """Panels of which one is shown at a time: (id, label, widgets)."""

    label: str
    panels: Sequence[tuple[str, str, Sequence[Any]]]
    part: Literal["switch"] = "switch"


Widget = Table | Figures | Text | Fold | Switch | Explorer


def tables_of(widgets: Sequence[Widget]) -> Iterator[Table]:
    """All tables among widgets, folded and switched ones included."""
    for part in widgets:
        if isinstance(part, Table):
            yield part
        elif isinstance(part, Fold):
            yield from tables_of(part.widgets)
        elif isinstance(part, Switch):
            for _, _, inside in part.panels:
                yield from tables_of(inside)


@dataclass
class Section:
    """A section of the report. ``id`` is its anchor."""

    id: str
    title: str
    widgets: list[Any] = field(default_factory=list)
    command: str = ""
    """What produces its results, where there are none: such a section is an entry of the last one."""


@dataclass(frozen=True)
class Commands:
    """Sections that have no results, and what produces them: (id, title, command). Only the report has these."""

    entries: Sequence[tuple[str, str, str]]
    part: Literal["commands"] = "commands"


def missing(what: str, command: str) -> list[Text]:
    """What a section says that lacks a part."""
    return [Text(f"{what} are not in these results. This command produces them:"), Text(command, "command")]


def together(sections: Sequence[Section], id: str, title: str) -> list[Section]:
    """Sections with something to show, and one that lists the others with their commands."""
    absent = [(one.id, one.title, one.command) for one in sections if one.command]
    shown = [one for one in sections if not one.command]
    words = Text("These have no results here. The command with each name produces them:")
    return [*shown, Section(id, title, [words, Commands(absent)])] if absent else shown


# ---------------------------------------------------------------------- numbers


def number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """Rounded; a difference that rounds to zero has no sign; a minus as wide as a plus."""
    if value is None:
        return DASH
    rounded = round(value, digits) + 0.0
    text = f"{rounded:+.{digits}f}" if sign and rounded else f"{rounded:.{digits}f}"
    return text.replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """So many significant digits, large and small numbers with an exponent: ``0.25``, ``9.54e−7``."""
    if value is None:
        return DASH
    return re.sub(r"e([+-])0*(?=\d)", r"e\1", f"{value + 0.0:.{digits}g}").replace("e+", "e").replace("-", MINUS)


def minus(text: str) -> str:
    """A text whose numbers have the minus of `number`. Names, paths, and what is behind a flag or in backticks stay."""

    def number(found: re.Match[str]) -> str:
        return found[0] if found["flag"] else found[0].replace("-", MINUS)

    return "`".join(part if place % 2 else _NUMBER.sub(number, part) for place, part in enumerate(text.split("`")))


def interval(pair: Sequence[float | None] | None, digits: int = 1, sign: bool = False) -> str:
    """In brackets; nothing where an end is missing."""
    if pair is None or pair[0] is None or pair[1] is None:
        return ""
    return f"[{number(pair[0], digits, sign)}, {number(pair[1], digits, sign)}]"


def share(found: dict[str, Any], counts: bool = True) -> Cell:
    """A rate of the pair evaluations as a percentage with its interval and count."""
    if found["rate"] is None:
        return Cell(DASH)
    below = interval((100 * found["low"], 100 * found["high"]))
    few = False
    if counts and "count" in found:
        below = f"{below} {found['count']}/{found['of']}"
        few = found["of"] < FEW_PAIRS
    return Cell(number(100 * found["rate"]), below, few, 100 * found["rate"])


def average(found: dict[str, Any], digits: int, sign: bool = True) -> Cell:
    """A mean over pairs with its interval."""
    if found["mean"] is None:
        return Cell(DASH)
    below = interval((found["low"], found["high"]), digits, sign)
    return Cell(number(found["mean"], digits, sign), below, found["pairs"] < FEW_PAIRS, found["mean"])


def with_std(mean: float, std: float | None) -> Cell:
    """A mean over checkpoints or, from the paper, over training seeds."""
    return Cell(number(mean), "" if std is None else f"± {number(std)}", value=mean)
