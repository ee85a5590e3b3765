"""The catalogue of benchmarks: facts that add up, folders that are understood, a command that prints them."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from realvr.cli import main
from realvr.data.detect import FORMATS
from realvr.errors import UserError
from realvr.evaluation.benchmark import BENCHMARKS, data_path, variant_notes
from realvr.evaluation.settings import EvaluateSettings, written_out
from realvr.evaluation.tasks.blink import PAPER, ROWS, Blink
from realvr.world.splits import SPLITS


def test_the_facts_add_up() -> None:
    assert len(ROWS) == 14 and sum(ROWS.values()) == 1901  # the official validation split
    assert Blink.facts.rows == 697  # the paper's N
    assert {name: BENCHMARKS.get(name).facts.rows for name in ("mmvp", "hrbench-4k", "hrbench-8k", "vstar")} == {
        "vstar": 191,
        "mmvp": 300,
        "hrbench-4k": 800,
        "hrbench-8k": 800,
    }
    for bench in BENCHMARKS:
        citation = bench.facts.citation
        assert bench.reader.name in FORMATS
        published = "@software{" if bench.name == "trails" else "@inproceedings{"  # the world's own task is in no paper
        assert citation.startswith(published) and citation.count("{") == citation.count("}")


def test_a_folder_stands_for_the_file_of_the_benchmark_and_of_no_other(tmp_path: Path) -> None:
    for name in (
        "hr_bench_4k.tsv",
        "hr_bench_8k.tsv",
        "MME_RealWorld.json",
        "MME-RealWorld-Lite.json",
        "notes.txt",
        "test_questions.jsonl",
        "samples.jsonl",
    ):
        (tmp_path / name).write_text("x")
    found = {bench.name: data_path(bench, tmp_path).name for bench in BENCHMARKS if bench.facts.files}
    assert found == {
        "hrbench-4k": "hr_bench_4k.tsv",
        "hrbench-8k": "hr_bench_8k.tsv",
        "mme-realworld": "MME_RealWorld.json",
        "mme-realworld-lite": "MME-RealWorld-Lite.json",
        "vstar": "test_questions.jsonl",
        "trails": "samples.jsonl",
    }
    (tmp_path / "hr_bench_4k.parquet").write_text("x")
    with pytest.raises(UserError, match=r"several files that may be meant \(hr_bench_4k.parquet, hr_bench_4k.tsv\)"):
        data_path(BENCHMARKS.get("hrbench-4k"), tmp_path)
    with pytest.raises(UserError, match="holds no such file; HR-Bench 8K is expected as hr_bench_8k.tsv"):
        (tmp_path / "empty").mkdir()
        data_path(BENCHMARKS.get("hrbench-8k"), tmp_path / "empty")


def test_blink_subtasks_are_chosen_by_name() -> None:
    assert Blink.subtasks("paper") == Blink.facts.tasks == PAPER
    assert len(Blink.subtasks("all")) == 14
    assert Blink.subtasks("jigsaw, IQ test,Jigsaw") == ("Jigsaw", "IQ_Test")
    with pytest.raises(UserError, match="no subtask .Jigsow."):
        Blink.subtasks("Jigsow")


def test_the_command_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmarks"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS.names()) and "--bench mmvp=PATH" in out
    assert main(["benchmarks", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(BENCHMARKS.names())
    assert main(["benchmarks", "mme-realworld"]) == 0
    out = capsys.readouterr().out
    assert "edistribution is forbidden" in out and "--bench mme-realworld=PATH" in out and "@inproceedings" in out
    assert main(["benchmarks", "mmpv"]) == 2
    assert "no benchmark 'mmpv'; did you mean 'mmvp'? (there are blink, hrbench-4k" in capsys.readouterr().err


def test_short_flags_of_benchmarks_stand_for_general_ones(tmp_path: Path) -> None:
    given = [
        "m",
        "--blink-tasks",
        "all",
        "--mmvp_corrected",
        "--limit",
        "3",
        "--blink_tasks=Jigsaw",
        "--no-mmvp-corrected",
    ]
    assert written_out(given) == [
        *("m", "--tasks=blink=all", "--variant=mmvp=corrected", "--limit", "3", "--tasks=blink=Jigsaw"),
    ]
    asked = EvaluateSettings(
        ["m"],
        tmp_path,
        bench=["mini-blink=x", "mmvp=y", "mine=z.jsonl"],
        tasks=["blink=jigsaw", "mine=a, b"],
        variant=["mmvp=corrected"],
    )
    tasks = asked.subtasks()
    assert tasks["mini-blink"] == ("Jigsaw",) and tasks["mine"] == ("a", "b") and "mmvp" not in tasks
    assert asked.variants() == {"mmvp": "corrected"}
    assert variant_notes(asked.variants()) == {"mmvp_corrected": True} and variant_notes({}) == {
        "mmvp_corrected": False
    }
    for field, value, message in (
        ("tasks", "other=x", "--tasks names other, which is no --bench"),
        ("tasks", "blink", "write NAME=SUBTASKS"),
        ("variant", "mmvp=old", "there is no variant 'old' of mmvp; there are corrected"),
        ("variant", "mine=old", "there is no variant 'old'; there are none"),
    ):
        with pytest.raises(UserError, match=message):
            wrong = EvaluateSettings(["m"], tmp_path, bench=["blink=x", "mmvp=y", "mine=z"], **{field: [value]})
            wrong.subtasks(), wrong.variants()


def test_the_stand_ins_are_what_the_world_writes() -> None:
    for bench in BENCHMARKS:
        if bench.stand_in:
            assert SPLITS[bench.stand_in].layout == bench.reader.name
            path = bench.stand_in_path("world")
            patterns = bench.facts.files
            assert not patterns or any(fnmatch(path.name.lower(), pattern) for pattern in patterns)
