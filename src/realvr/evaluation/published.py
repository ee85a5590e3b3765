"""Numbers printed in the paper, to be set beside measured ones and never mixed with them.

``published.json`` holds the rows of these tables of *Rethinking Latent Visual Reasoning*, by their LaTeX labels:
tab:main-backbone-results, tab:cross-backbone-results, tab:mablation, tab:latent-length-ablation (differences from K = 8
under the names of K), tab:diag-counterfactual, tab:complete-counterfactual (rates, and counts as ``…_count``),
tab:latent-exchange and tab:mass-matched-factorial. ``backbone`` is empty where a table and its section name none.
Known inconsistencies of the tables are listed in docs/evaluation.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from realvr.errors import UserError

COLUMNS: dict[str, str] = {
    "mmvp": "mmvp",
    "blink": "blink",
    "hrbench-4k": "hrbench-4k",
    "hrbench-8k": "hrbench-8k",
    "mme-realworld-lite": "mme-realworld",
}
"""Benchmark -> column of the paper's result tables. Its MME-RealWorld number is over the Lite set."""


@dataclass(frozen=True)
class Row:
    """One row of a table. ``values``: name -> (mean, standard deviation over seeds or None)."""

    table: str
    row: str
    backbone: str
    method: str
    values: dict[str, tuple[float, float | None]]


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


def benchmark_row(name: str) -> Row:
    """The row of the result tables named ``METHOD@BACKBONE``, for instance ReaLVR@Qwen2.5-VL-7B."""
    method, at, backbone = name.partition("@")
    tables = ("tab:main-backbone-results", "tab:cross-backbone-results", "tab:mablation")
    for table in tables if at else ():
        if found := published(table, backbone, method):
            return found[0]
    known = sorted({f"{row.method}@{row.backbone}" for table in tables for row in published(table)})
    raise UserError(f"'{name}' is not a published row; there are {', '.join(known)}")
