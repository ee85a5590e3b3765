"""What one diagnostic shows of one case in the case browser: bars over the latents, maps over the picture, a matrix,
facts in words. `Diagnostic.panel` makes a `Panel` of a saved record; the page draws it beside the picture.

Everything becomes JSON values. A part that a page could not draw (other lengths, NaN, no name) is a `ValueError` where
it is made. Maps of a large grid and of many layers are made smaller for the page, which says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

View = Literal["original", "edited"]
Values = Sequence[float | None]
"""Numbers; None where there is none (never NaN)."""
Grid = Sequence[Values]
"""Rows of cells over one picture: the visual tokens, tiles side by side, a thumbnail left out."""
MOST_NUMBERS = 20_000
"""Numbers of one overlay on the page, about 150 kB."""
MOST_LAYERS, MOST_SIDE = 12, 24
SIZES = ((MOST_LAYERS, MOST_SIDE), (6, 24), (6, 16), (4, 16), (4, 12), (2, 12), (2, 8))
"""Most layers, and most rows and columns of a grid, of an overlay on the page: the first with few enough numbers. Finer
grids are averaged; of more layers as many are taken evenly, the first and the last among them."""


@dataclass(frozen=True)
class Series:
    """One number for each latent z_1 … z_K, such as its readout, credit or utility."""

    name: str
    values: Values
    unit: str = ""
    """What the numbers count: ``nats``, ``share of attention``. Series of one unit share a scale."""
    about: str = ""
    """What it is, in a sentence."""


@dataclass(frozen=True)
class Bars:
    """Series drawn as bars, one row each, one column for each latent (or for each of ``labels``)."""

    series: Sequence[Series]
    labels: Sequence[str] = ()
    """Names of the columns where they are not the latents."""
    view: View | None = None
    """Picture that it belongs to, where the record is of a pair; else it follows from the record's id."""
    kind: ClassVar[str] = "bars"

    def __post_init__(self) -> None:
        lengths = {len(one.values) for one in self.series}
        _check(bool(self.series) and all(one.name for one in self.series), "bars need series, each with a name")
        _check(len(lengths) == 1 and lengths != {0}, f"series of one figure have one length, not {sorted(lengths)}")
        _check(not self.labels or {len(self.labels)} == lengths, "bars need a label for every value, or none at all")
        for one in self.series:
            _numbers(one.values, one.name)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        series = [
            {"name": one.name, "values": list(one.values), "unit": one.unit, "about": one.about} for one in self.series
        ]
        return {"kind": self.kind, "labels": list(self.labels), "series": series}


@dataclass(frozen=True)
class Map:
    """One map of an overlay: what ``query`` puts on each cell in ``layer``, a grid for every picture of the prompt."""

    query: int | str
    """A latent (1 … K), or a word: ``answer``."""
    layer: int | str
    """A layer by the number that the record has, or a word: ``mean``."""
    grids: Sequence[Grid]


@dataclass(frozen=True)
class Overlay:
    """Maps over the picture. A reader chooses the latent (or the answer) and the layer."""

    name: str
    """``attention``, ``saliency``."""
    maps: Sequence[Map]
    unit: str = ""
    """What a cell's number is: ``share of attention``."""
    about: str = ""
    low: float = 0.0
    high: float | None = None
    """The ends of the colour scale. By default every map has its own largest value at the end; the page prints both."""
    view: View | None = None
    note: str = ""
    """What was made smaller for the page; see `fitted`."""
    kind: ClassVar[str] = "overlay"

    def __post_init__(self) -> None:
        _check(bool(self.name and self.maps), "an overlay needs a name and at least one map")
        _check(
            self.high is None or self.high > self.low, f"{self.name}: the scale ends at {self.high}, below its start"
        )
        keys = [(one.query, one.layer) for one in self.maps]
        _check(len(set(keys)) == len(keys), f"{self.name}: two maps of one latent and layer")
        shapes = {tuple((len(grid), len(grid[0]) if grid else 0) for grid in one.grids) for one in self.maps}
        _check(
            len(shapes) == 1 and () not in shapes, f"{self.name}: every map needs the same grids, a grid per picture"
        )
        _check(all(rows and columns for rows, columns in next(iter(shapes))), f"{self.name}: a grid without cells")
        for one in self.maps:
            for grid in one.grids:
                _rectangle(grid, len(grid[0]), self.name)

    def fitted(self) -> Overlay:
        """The same for a page, with at most `MOST_NUMBERS` numbers where the smallest of `SIZES` reaches that."""
        layers = sorted({one.layer for one in self.maps if isinstance(one.layer, int)})
        for most, side in SIZES:
            kept = set(_evenly(layers, most))
            maps = [one for one in self.maps if isinstance(one.layer, str) or one.layer in kept]
            cells = sum(min(len(grid), side) * min(len(grid[0]), side) for grid in self.maps[0].grids)
            if len(maps) * cells <= MOST_NUMBERS:
                break
        notes = [f"{len(kept)} of {len(layers)} layers"] if len(kept) < len(layers) else []
        sides = [(len(grid), len(grid[0])) for grid in self.maps[0].grids]
        if any(max(one) > side for one in sides):
            maps = [replace(one, grids=[pooled(grid, side) for grid in one.grids]) for one in maps]
            notes.append("cells averaged from " + ", ".join(f"{rows} x {columns}" for rows, columns in sides))
        return replace(self, maps=maps, note="; ".join([*([self.note] if self.note else []), *notes]))

    def as_json(self) -> dict[str, Any]:
        """For the page: queries, layers, and the maps by their places in both."""
        made = self.fitted()
        queries = list(dict.fromkeys(one.query for one in made.maps))
        layers = list(dict.fromkeys(one.layer for one in made.maps))
        maps = [
            [queries.index(one.query), layers.index(one.layer), [_rows(grid) for grid in one.grids]]
            for one in made.maps
        ]
        about = {"unit": self.unit, "about": self.about, "low": self.low, "high": self.high, "note": made.note}
        return {"kind": self.kind, "name": self.name, "queries": queries, "layers": layers, "maps": maps, **about}


@dataclass(frozen=True)
class Matrix:
    """A map of token pairs: rows by columns with their labels. Several of one name differ in ``layer``."""

    name: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Values]
    unit: str = ""
    about: str = ""
    layer: int | str = "mean"
    low: float = 0.0
    high: float | None = None
    view: View | None = None
    kind: ClassVar[str] = "matrix"

    def __post_init__(self) -> None:
        _check(bool(self.name and self.rows and self.columns), "a matrix needs a name, rows and columns")
        _check(len(self.values) == len(self.rows), f"{self.name}: {len(self.values)} rows, {len(self.rows)} labels")
        _check(
            self.high is None or self.high > self.low, f"{self.name}: the scale ends at {self.high}, below its start"
        )
        _rectangle(self.values, len(self.columns), self.name)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        found = {
            "name": self.name,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": _rows(self.values),
        }
        about = {"unit": self.unit, "about": self.about, "layer": self.layer, "low": self.low, "high": self.high}
        return {"kind": self.kind, **found, **about}


@dataclass(frozen=True)
class Facts:
    """Rows of text: a name and what there is to say, or a table with a ``header``."""

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    view: View | None = None
    kind: ClassVar[str] = "facts"

    def __post_init__(self) -> None:
        lengths = {len(row) for row in (*self.rows, *([self.header] if self.header else []))}
        _check(bool(self.rows) and len(lengths) == 1 and lengths != {0}, "facts need rows of one length")
        words = [cell for row in (*self.rows, self.header) for cell in row]
        _check(all(isinstance(cell, str) for cell in words), "facts are text: write numbers as they are to be read")

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"kind": self.kind, "header": list(self.header), "rows": [list(row) for row in self.rows]}


Part = Bars | Overlay | Matrix | Facts


@dataclass(frozen=True)
class Panel:
    """What a diagnostic shows of one record, below its own title."""

    parts: Sequence[Part]
    note: str = ""
    """A sentence below."""
    title: str = field(default="", kw_only=True)
    """By default the diagnostic's."""

    def __post_init__(self) -> None:
        _check(bool(self.parts) and all(isinstance(one, Part) for one in self.parts), "a panel needs parts")

    def of(self, view: View | None) -> Panel | None:
        """Its parts of one picture, or of the case as a whole."""
        parts = [one for one in self.parts if one.view == view]
        return replace(self, parts=parts) if parts else None

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"title": self.title, "note": self.note, "parts": [one.as_json() for one in self.parts]}


@dataclass(frozen=True)
class Measured:
    """What one diagnostic has of a page's cases: panels by the id of a sample or pair."""

    name: str
    title: str
    about: str = ""
    """What it asks, in a sentence."""
    panels: Mapping[str, Sequence[Panel]] = field(default_factory=dict)
    missing: str = ""
    """Why it has none at all, where it was run."""

    def of(self, case: str, views: Sequence[str]) -> dict[str, Any]:
        """Its panels of one case, for the page: those of each view, in which those of a whole pair are repeated."""
        whole = [] if case in views else self.panels.get(case, ())
        found = []
        for place, view in enumerate(views):
            own = [*self.panels.get(view, ())]
            names: tuple[View | None, ...] = (None, "edited" if place else "original")
            own += [part for panel in whole for name in names if (part := panel.of(name)) is not None]
            found.append([panel.as_json() for panel in own])
        return {"name": self.name, "title": self.title, "about": self.about, "missing": self.missing, "views": found}


def pooled(grid: Grid, most: int = MOST_SIDE) -> list[list[float | None]]:
    """A grid of at most ``most`` rows and columns: means over blocks of cells, which may differ in size by one."""
    down, across = (_blocks(length, most) for length in (len(grid), len(grid[0])))
    return [[_mean(grid[y][x] for y in range(*rows) for x in range(*columns)) for columns in across] for rows in down]


def short(value: float) -> float:
    """Six significant digits, as records have them."""
    return float(f"{value:.6g}")


def _blocks(length: int, most: int) -> list[tuple[int, int]]:
    count = min(length, most)
    return [(place * length // count, (place + 1) * length // count) for place in range(count)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return short(math.fsum(known) / len(known)) if known else None


def _evenly(values: Sequence[int], most: int) -> list[int]:
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _rows(values: Sequence[Values]) -> list[list[float | None]]:
    return [list(row) for row in values]


def _rectangle(values: Sequence[Values], columns: int, name: str) -> None:
    _check(all(len(row) == columns for row in values), f"{name}: rows of different length")
    for row in values:
        _numbers(row, name)


def _numbers(values: Values, name: str) -> None:
    fine = all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
        for value in values
    )
    _check(fine, f"{name}: values are finite numbers, or None where there is none")


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
