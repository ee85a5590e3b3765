"""The catalogue of benchmarks: facts that add up, folders that are understood, a command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realvr.cli import main
from realvr.data.detect import FORMATS
from realvr.errors import UserError
from realvr.evaluation.catalog import BLINK_ROWS, CATALOG, PAPER_BLINK, blink_tasks, data_path


def test_the_facts_add_up() -> None:
    assert len(BLINK_ROWS) == 14 and sum(BLINK_ROWS.values()) == 1901  # the official validation split
    assert CATALOG["blink"].rows == 697  # the paper's N
    assert {name: CATALOG[name].rows for name in ("mmvp", "hrbench-4k", "hrbench-8k", "vstar")} == {
        "vstar": 191,
        "mmvp": 300,
        "hrbench-4k": 800,
        "hrbench-8k": 800,
    }
    for name, bench in CATALOG.items():
        assert bench.format in FORMATS and bench.name == name
        assert bench.citation.startswith("@inproceedings{") and bench.citation.count("{") == bench.citation.count("}")


def test_a_folder_stands_for_the_file_of_the_benchmark_and_of_no_other(tmp_path: Path) -> None:
    for name in (
        "hr_bench_4k.tsv",
        "hr_bench_8k.tsv",
        "MME_RealWorld.json",
        "MME-RealWorld-Lite.json",
        "notes.txt",
        "test_questions.jsonl",
    ):
        (tmp_path / name).write_text("x")
    found = {name: data_path(CATALOG[name], tmp_path).name for name in CATALOG if CATALOG[name].files}
    assert found == {
        "hrbench-4k": "hr_bench_4k.tsv",
        "hrbench-8k": "hr_bench_8k.tsv",
        "mme-realworld": "MME_RealWorld.json",
        "mme-realworld-lite": "MME-RealWorld-Lite.json",
        "vstar": "test_questions.jsonl",
    }
    (tmp_path / "hr_bench_4k.parquet").write_text("x")
    with pytest.raises(UserError, match=r"several files that may be meant \(hr_bench_4k.parquet, hr_bench_4k.tsv\)"):
        data_path(CATALOG["hrbench-4k"], tmp_path)
    with pytest.raises(UserError, match="holds no such file; HR-Bench 8K is expected as hr_bench_8k.tsv"):
        (tmp_path / "empty").mkdir()
        data_path(CATALOG["hrbench-8k"], tmp_path / "empty")


def test_blink_subtasks_are_chosen_by_name() -> None:
    assert blink_tasks(None) == blink_tasks("paper") == PAPER_BLINK
    assert len(blink_tasks("all")) == 14
    assert blink_tasks("jigsaw, IQ test,Jigsaw") == ("Jigsaw", "IQ_Test")
    with pytest.raises(UserError, match="no subtask .Jigsow."):
        blink_tasks("Jigsow")


def test_the_command_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmarks"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOG) and "--bench mmvp=PATH" in out
    assert main(["benchmarks", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(CATALOG)
    assert main(["benchmarks", "mme-realworld"]) == 0
    out = capsys.readouterr().out
    assert "edistribution is forbidden" in out and "--bench mme-realworld=PATH" in out and "@inproceedings" in out
    assert main(["benchmarks", "mmpv"]) == 2
    assert "no benchmark 'mmpv'; there are mmvp, blink" in capsys.readouterr().err
