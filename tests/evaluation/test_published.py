"""The stored numbers against the paper's own source, and against themselves."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from realvr.errors import UserError
from realvr.evaluation.published import Row, benchmark_row, published

FIVE = ("mmvp", "blink", "hrbench-4k", "hrbench-8k", "mme-realworld")
ROWS = {
    "tab:main-backbone-results": 9,
    "tab:cross-backbone-results": 16,
    "tab:mablation": 8,
    "tab:latent-length-ablation": 5,
    "tab:diag-counterfactual": 4,
    "tab:complete-counterfactual": 12,
    "tab:latent-exchange": 16,
    "tab:mass-matched-factorial": 4,
}
RATES = ("original_accuracy", "edited_accuracy", "prediction_change", "strict_paired_correct_flip", "false_flip")


def means(row: Row) -> dict[str, float]:
    return {name: mean for name, (mean, _) in row.values.items()}


@pytest.fixture(scope="module")
def tex() -> str:
    named = os.environ.get("REALVR_SHARED")
    shared = Path(named) if named else Path(__file__).resolve().parents[3] / "shared"
    file = shared / "paper" / "realvr.tex"
    if not file.is_file():
        pytest.skip(f"no source of the paper at {file}; set REALVR_SHARED to the folder that holds paper/")
    return file.read_text(encoding="utf-8")


def table_rows(tex: str, label: str) -> list[list[float]]:
    """Numbers of each line of the table's last tabular that holds any score, in order of appearance."""
    begin = tex.rindex("\\begin{table", 0, tex.index(f"\\label{{{label}}}"))
    block = tex[begin : tex.index("\\end{table", begin)]
    body = block[block.rindex("\\begin{tabular") :]
    body = body[body.index("\\midrule") : body.index("\\bottomrule")]
    # A line break inside \shortstack is not the end of a row.
    body = re.sub(r"\\shortstack\{((?:[^{}]|\{[^{}]*\})*)\}", lambda m: m[1].replace("\\\\", " "), body)
    rows = []
    for line in body.split("\\\\"):
        for macro in ("multirow", "multicolumn", "methodlabel", "mainsectionrow", "texttt", "rowcolor", "cellcolor"):
            line = re.sub(rf"\\{macro}(?:\{{[^{{}}]*\}})+", " ", line)
        line = re.sub(r"\\(?:addlinespace|cmidrule)\S*|\(\$[^$]*\$\)|\$\\eta=\d\$", " ", line)
        line = line.replace("\\phantom{+}", "").replace("\\pm", " ")
        found = [float(text) for text in re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?", line)]
        if len(found) > 1:
            rows.append(found)
    return rows


def stored(row: Row) -> list[float]:
    """The same row as the paper prints it."""
    values = row.values
    if row.table == "tab:complete-counterfactual":
        rates = [n for n in values if not n.endswith("_count") and n not in ("changed", "unchanged")]
        pairs = [value for name in rates for value in (values[name][0], values[f"{name}_count"][0])]
        return [values["changed"][0], values["unchanged"][0], *pairs]
    flat = [x for mean, std in values.values() for x in (mean, std) if x is not None]
    if row.table == "tab:latent-exchange":
        return [float(row.row.split("k=")[1]), *flat]
    return flat


@pytest.mark.parametrize("label", ROWS)
def test_numbers_are_those_of_the_paper(tex: str, label: str) -> None:
    printed = table_rows(tex, label)
    ours = [stored(row) for row in published(label)]
    assert len(ours) == ROWS[label]
    assert ours == printed


DIAGNOSTICS = {  # label -> which tabular of its float, number of rows
    "tab:diag-raw-similarity": (0, 2),
    "tab:diag-context-normalized": (1, 6),
    "tab:diag-rcs": (0, 7),
    "tab:diag-rank": (1, 8),
    "tab:diag-teacher-forcing": (0, 4),
    "tab:diag-credit-residual": (0, 4),
    "tab:diag-task-structure": (0, 4),
}


def panel_numbers(tex: str, label: str, panel: int) -> list[float]:
    """All numbers of one of the float's tabulars, in order of appearance."""
    begin = tex.rindex("\\begin{table", 0, tex.index(f"\\label{{{label}}}"))
    block = tex[begin : tex.index("\\end{table}", begin)]
    body = block.split("\\begin{tabular")[panel + 1]
    body = body[body.index("\\midrule") : body.index("\\bottomrule")]
    body = (
        re.sub(r"\\multirow\[t\]\{4\}|\\texttt\{[^{}]*\}|top-1|at 8K", " ", body).replace("{,}", "").replace("--", " ")
    )
    return [float(text) for text in re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?", body)]


@pytest.mark.parametrize("label", DIAGNOSTICS)
def test_numbers_of_diagnostics_are_those_of_the_paper(tex: str, label: str) -> None:
    panel, count = DIAGNOSTICS[label]
    rows = published(label)
    named = {"tab:diag-raw-similarity", "tab:diag-rcs", "tab:diag-teacher-forcing"}  # their rows have numbers in names
    ours = [
        number
        for row in rows
        for number in ([float(n) for n in re.findall(r"\d+(?:\.\d+)?", row.row)] if label in named else [])
        + list(means(row).values())
    ]
    assert len(rows) == count and ours == panel_numbers(tex, label, panel)


def test_numbers_of_figures_stand_beside_their_labels(tex: str) -> None:
    """In the caption or in a paragraph that refers to the figure."""
    rows = [row for row in published() if row.table.startswith("fig:")]
    assert len({row.table for row in rows}) == 5
    for row in rows:
        around = " ".join(part for part in re.split(r"\n\s*\n", tex) if f"{{{row.table}}}" in part)
        found = {float(n) for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", around)}
        assert row.method in around and set(means(row).values()) <= found, row


def test_methods_and_backbones_stand_in_the_paper(tex: str) -> None:
    for row in published("main-backbone-results") + published("cross-backbone-results"):
        assert row.backbone in tex
        assert row.method in tex


def test_averages_are_means_of_five() -> None:
    checked = 0
    for row in published():
        values = means(row)
        if "average" in values:
            assert values["average"] == pytest.approx(sum(values[name] for name in FIVE) / 5, abs=0.0501), row
            checked += 1
    assert checked == 9 + 13 + 8 + 4


def test_sweep_and_oracle() -> None:
    rows = {row.row: means(row) for row in published("latent-length-ablation")}
    total = rows.pop("mean")
    for k, mean in total.items():
        assert mean == pytest.approx(sum(row[k] for row in rows.values()) / 4, abs=0.0501)
    assert sum(max(row.values()) for row in rows.values()) / 4 == pytest.approx(1.1)


def test_counts_give_the_rates() -> None:
    for row in published("complete-counterfactual"):
        values = means(row)
        assert values["changed"] + values["unchanged"] == 512
        for name in RATES:
            of = values["unchanged" if name == "false_flip" else "changed"]
            assert values[name] == pytest.approx(100 * values[f"{name}_count"] / of, abs=0.0501), (row, name)
        assert values["parse_coverage"] == pytest.approx(100 * values["parse_coverage_count"] / 1024, abs=0.0501)
        flips = values["strict_paired_correct_flip_count"]
        assert flips <= min(values[f"{name}_count"] for name in RATES[:3])
        assert flips >= values["original_accuracy_count"] + values["edited_accuracy_count"] - values["changed"]


def test_finding_rows() -> None:
    assert means(benchmark_row("realvr@qwen2.5-vl-7b"))["average"] == 63.7
    assert benchmark_row("ReaLVR@Qwen3-VL-235B").values.keys() == {"mmvp", "blink", "mme-realworld"}
    assert len(published("tab:main-backbone-results")) == len(published("main-backbone-results")) == 9
    for name in ("ReaLVR", "x@y"):
        with pytest.raises(UserError, match="ReaLVR@Gemma-3-12B"):
            benchmark_row(name)
