"""Numbers of the paper, in tables that are marked as what they are: published, not measured here."""

from __future__ import annotations

from collections.abc import Sequence

from realvr.evaluation.benchmark import BENCHMARKS, title
from realvr.evaluation.published import AVERAGE, Row, mean_columns, published
from realvr.widgets import DASH, Cell, Fold, Section, Table, Text, number, with_std

MARK = "published, not measured here"
_SOURCE = "From the paper; standard deviations over its training seeds where it prints them."


def _cells(row: Row, names: Sequence[str], digits: int = 1) -> list[Cell]:
    made = []
    for name in names:
        value = row.values.get(name)
        if value is None:
            made.append(Cell(DASH))
        else:
            made.append(with_std(*value) if digits == 1 else Cell(number(value[0], digits), value=value[0]))
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
    made.widgets += [*result_tables(), *sweep_table(), *ablation_tables(), *counterfactual_tables(), *exchange_tables()]
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
    folds = [
        Fold(
            f"The paper's results on Qwen2.5-VL-7B ({MARK})",
            [_benches("Qwen2.5-VL-7B, %", published("main-backbone-results"))],
            published=True,
        )
    ]
    rows = published("cross-backbone-results")
    backbones = dict.fromkeys(row.backbone for row in rows)
    made = [_benches(f"{name}, %", [row for row in rows if row.backbone == name]) for name in backbones]
    return [*folds, Fold(f"The paper's results on other backbones ({MARK})", made, published=True)]


def sweep_table() -> list[Fold]:
    rows = published("latent-length-ablation")
    budgets = list(rows[0].values)
    made: list[list[Cell | str]] = [
        [title(row.row), *(Cell(number(row.values[k][0], sign=True)) for k in budgets)] for row in rows
    ]
    caption = f"ReaLVR on Qwen2.5-VL-7B: difference from K = 8, percentage points ({MARK})"
    table = Table(caption, ["benchmark", *(f"K = {k}" for k in budgets)], made, _SOURCE, published=True)
    return [Fold(f"The paper's latent budgets ({MARK})", [table], published=True)]


def ablation_tables() -> list[Fold]:
    """tab:mablation and tab:mass-matched-factorial."""
    made = [
        _benches("Ablations on Qwen2.5-VL-7B, %", published("mablation"), "variant"),
        _benches("Mass-matched factorial, %", published("mass-matched-factorial"), "variant"),
    ]
    return [Fold(f"The paper's ablations ({MARK})", made, published=True)]


def counterfactual_tables() -> list[Fold]:
    names = {
        "original_accuracy": "A₀",
        "edited_accuracy": "A₁",
        "prediction_change": "change",
        "strict_paired_correct_flip": "strict flip",
        "false_flip": "false flip",
    }
    rows: list[list[Cell | str]] = [
        [
            row.method,
            row.row,
            f"{row.values['changed'][0]:.0f} / {row.values['unchanged'][0]:.0f}",
            *_cells(row, list(names)),
        ]
        for row in published("complete-counterfactual")
    ]
    header = ["method", "edit", "|C| / |U|", *names.values()]
    table = Table(f"Paired counterfactual behaviour, % ({MARK})", header, rows, _SOURCE, published=True)
    distances = {"latent_distance": "latent distance", "final_distance": "final distance"}
    moved: list[list[Cell | str]] = [
        [row.method, row.row, *_cells(row, list(distances), 6)] for row in published("diag-counterfactual")
    ]
    second = Table(f"Distances ({MARK})", ["method", "edit", *distances.values()], moved, _SOURCE, published=True)
    return [Fold(f"The paper's counterfactual pairs ({MARK})", [table, second], published=True)]


def exchange_tables() -> list[Fold]:
    rows: list[list[Cell | str]] = [
        [
            row.method,
            row.row,
            *(Cell(number(row.values[key][0], digits, sign=True)) for key, digits in _EXCHANGE.items()),
        ]
        for row in published("latent-exchange")
    ]
    header = ["method", "positions", "donor-answer lift (points)", "donor-margin shift (nats)"]
    table = Table(f"Latent exchange ({MARK})", header, rows, _SOURCE, published=True)
    return [Fold(f"The paper's latent exchange ({MARK})", [table], published=True)]


_EXCHANGE = {"donor_answer_lift": 1, "donor_margin_shift": 2}
