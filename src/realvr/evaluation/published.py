"""Numbers printed in the paper, to be set beside measured ones and never mixed with them.

``published.json`` holds the rows of these tables of *Rethinking Latent Visual Reasoning*, by their LaTeX labels:
tab:main-backbone-results, tab:cross-backbone-results, tab:mablation, tab:latent-length-ablation (differences from K = 8
under the names of K), tab:diag-counterfactual, tab:complete-counterfactual (rates, and counts as ``…_count``),
tab:latent-exchange, tab:mass-matched-factorial and the other tables of app:diagnostics (tab:diag-…, one label a panel).
Figures (fig:…) have the numbers of their captions and of the text around them. ``backbone`` is empty where a table and
its section name none.
Known inconsistencies of the tables are listed in docs/evaluation.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from realvr.errors import UserError
from realvr.evaluation.benchmark import BENCHMARKS, Value

AVERAGE = "average"
"""Column of the five-task mean in the result tables."""
_RESULTS = ("tab:main-backbone-results", "tab:cross-backbone-results", "tab:mablation")


@dataclass(frozen=True)
class Row:
    """One row of a table. ``values``: name -> (mean, standard deviation over seeds or None)."""

    table: str
    row: str
    backbone: str
    method: str
    values: dict[str, Value]
    own: dict[str, Value] = field(default_factory=dict)
    """By benchmark: what the benchmarks themselves know to be published (`Benchmark.published`)."""


@cache
def _rows() -> tuple[Row, ...]:
    raw = json.loads(files("realvr.evaluation").joinpath("published.json").read_text(encoding="utf-8"))
    return tuple(
        Row(
            entry["table"],
            entry["row"],
            entry["backbone"],
            entry["method"],
            {name: (mean, std) for name, (mean, std) in entry["values"].items()},
        )
        for entry in raw
    )


def published(table: str | None = None, backbone: str | None = None, method: str | None = None) -> list[Row]:
    """Rows of the paper, optionally of one table (label with or without ``tab:``), backbone or method."""
    return [
        row
        for row in _rows()
        if (table is None or row.table.removeprefix("tab:") == table.removeprefix("tab:"))
        and (backbone is None or row.backbone.lower() == backbone.lower())
        and (method is None or row.method.lower() == method.lower())
    ]


@cache
def mean_columns() -> tuple[str, ...]:
    """Columns of the result tables over which the five-task mean is taken, in the paper's order."""
    return tuple(name for name in published(_RESULTS[0])[0].values if name != AVERAGE)


def benchmark_row(name: str) -> Row:
    """The row of the result tables named ``METHOD@BACKBONE``, for instance ReaLVR@Qwen2.5-VL-7B, with what benchmarks
    themselves know about it (`Benchmark.published`)."""
    method, at, backbone = name.partition("@")
    rows = [row for table in _RESULTS for row in published(table, backbone, method)] if at else []
    own = {
        bench.name: value
        for bench in BENCHMARKS
        for known, value in bench.published.items()
        if known.lower() == name.lower()
    }
    if rows:
        return replace(rows[0], own=own)
    if own:
        return Row("published with the benchmark", name, backbone, method, {}, own)
    known = {f"{row.method}@{row.backbone}" for table in _RESULTS for row in published(table)}
    known |= {row for bench in BENCHMARKS for row in bench.published}
    raise UserError(f"'{name}' is not a published row; there are {', '.join(sorted(known))}")


def value_of(row: Row, bench: str) -> Value | None:
    """The number of a row that was measured on the set of this benchmark."""
    if bench not in BENCHMARKS:
        return None
    return row.values.get(BENCHMARKS.get(bench).column) or row.own.get(bench)
