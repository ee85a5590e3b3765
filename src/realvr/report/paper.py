"""Numbers of the paper, in tables that are marked as what they are: published, not measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realvr.diagnostics.base import DIAGNOSTICS
from realvr.evaluation.benchmark import BENCHMARKS, title
from realvr.evaluation.published import AVERAGE, Row, mean_columns, published
from realvr.widgets import DASH, Cell, Fold, Section, Table, Text, number, with_std

MARK = "published, not measured here"
_SOURCE = "From the paper; standard deviations over its training seeds where it prints them."


def _cells(row: Row, names: Sequence[str]) -> list[Cell]:
    made = []
    for name in names:
        value = row.values.get(name)
        if value is None:
            made.append(Cell(DASH))
        else:
            made.append(with_std(*value))
    return made


def section() -> Section:
    """All tables of the paper, apart from the results."""
    made = Section("paper", "The paper's numbers")
    made.widgets.append(
        Text(
            "For reference; nothing here was measured. The paper's scores are over the published benchmarks, with its "
            "own models. They stand beside a score of this page only where the same published set was asked; numbers "
            "over drawn pictures, other questions or parts of a set cannot be compared with them."
        )
    )
    made.widgets += [*result_tables(), *sweep_table(), *ablation_tables(), *diagnostic_tables()]
    return made


def beside(benches: Sequence[str]) -> list[Table]:
    """The paper's results on the published sets that were asked; its mean only beside all five."""
    columns = [column for bench in BENCHMARKS if (column := bench.column) and bench.name in benches]
    columns += [AVERAGE] if set(columns) == set(mean_columns()) else []
    header = ["method", "backbone", *map(title, columns)]
    rows: list[list[Cell | str]] = [
        [row.method, row.backbone, *_cells(row, columns)]
        for table in ("main-backbone-results", "cross-backbone-results")
        for row in published(table)
    ]
    return [Table(f"The same sets in the paper, % ({MARK})", header, rows, _SOURCE, published=True)] if columns else []


def _benches(caption: str, rows: Sequence[Row], name: str = "method") -> Table:
    columns = (*mean_columns(), AVERAGE)
    header = [name, *map(title, columns)]
    made: list[list[Cell | str]] = [
        [row.method if name == "method" else row.row, *_cells(row, columns)] for row in rows
    ]
    return Table(f"{caption} ({MARK})", header, made, _SOURCE, published=True)


def result_tables() -> list[Fold]:
    """tab:main-backbone-results, and the other backbones one by one."""
    main = published("main-backbone-results")
    name = main[0].backbone
    folds = [Fold(f"The paper's results on {name} ({MARK})", [_benches(f"{name}, %", main)], published=True)]
    rows = published("cross-backbone-results")
    backbones = dict.fromkeys(row.backbone for row in rows)
    made = [_benches(f"{name}, %", [row for row in rows if row.backbone == name]) for name in backbones]
    return [*folds, Fold(f"The paper's results on other backbones ({MARK})", made, published=True)]


def sweep_table() -> list[Fold]:
    """tab:latent-length-ablation."""
    rows = published("latent-length-ablation")
    budgets = list(rows[0].values)
    made: list[list[Cell | str]] = [
        [title(row.row), *(Cell(number(row.values[k][0], sign=True)) for k in budgets)] for row in rows
    ]
    caption = f"{rows[0].method} on {rows[0].backbone}: difference from K = 8, percentage points ({MARK})"
    table = Table(caption, ["benchmark", *(f"K = {k}" for k in budgets)], made, _SOURCE, published=True)
    return [Fold(f"The paper's latent budgets ({MARK})", [table], published=True)]


def ablation_tables() -> list[Fold]:
    """tab:mablation and tab:mass-matched-factorial."""
    rows = published("mablation")
    made = [
        _benches(f"Ablations on {rows[0].backbone}, %", rows, "variant"),
        _benches("Mass-matched factorial, %", published("mass-matched-factorial"), "variant"),
    ]
    return [Fold(f"The paper's ablations ({MARK})", made, published=True)]


def diagnostic_tables() -> list[Fold]:
    """The paper's tables of every diagnostic that has some."""
    return [
        Fold(f"{kind.title} in the paper ({MARK})", [_marked(table) for table in tables], published=True)
        for kind in DIAGNOSTICS
        if (tables := kind.paper_tables())
    ]


def _marked(table: Table) -> Table:
    return replace(table, caption=f"{table.caption} ({MARK})", note=table.note or _SOURCE, published=True)
