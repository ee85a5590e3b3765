"""``realvr diagnose MODEL --tests …``: several diagnostics on several models, a kill, two processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tyro

import outside
from outside import contents, records
from pair_cases import world_samples
from realvr.cli import main
from realvr.cli.diagnose import SuiteCommand, as_suite
from realvr.data.export import write as export
from realvr.diagnostics import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.data import Source, read_data
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.diagnostics.suite import Suite, model_name, run_suite
from realvr.errors import UserError
from stage_runs import with_markers, world, write


@pytest.fixture(scope="module")
def model(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_markers(build_tiny("qwen2.5-vl"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "samples.jsonl"
    export(world_samples(2), "jsonl", path)
    return path


def settings(model: object, data: Path, out: Path, **more: Any) -> DiagnoseSettings:
    return DiagnoseSettings(str(model), data, out, device="cpu", max_new=8, **more)


def test_two_models_side_by_side(model: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    args = ["diagnose", model, "--against", "mini-direct", model, "--data", pairs, "--out", out, "--limit", 2]
    assert (
        main(
            [*map(str, args), "--tests", "walk,distances", "--device", "cpu", "--max-new", "8", "--set", "walk.by=kind"]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert f"note: tiny-2: {model}" in shown.err and "note: mini-direct: mini-direct" not in shown.err
    assert "walk skipped: mini-direct has no latent span (K = 0)" in shown.err
    assert "realvr report" in shown.out and "skipped" in shown.out
    overview = json.loads((out / "diagnose.json").read_text())
    assert list(overview["models"]) == ["tiny", "mini-direct", "tiny-2"]
    assert [overview["tests"]["walk"][name]["status"] for name in overview["models"]] == [
        "measured",
        "skipped",
        "measured",
    ]
    assert overview["tests"]["walk"]["tiny"]["examples"] == 2
    assert overview["tests"]["distances"]["mini-direct"]["examples"] == 8, "pairs are limited edit by edit"
    assert json.loads((out / "tiny" / "walk.json").read_text())["settings"]["by"] == "kind"
    assert (out / "tiny" / "walk.jsonl").read_text() == (out / "tiny-2" / "walk.jsonl").read_text()
    table = (out / "walk.md").read_text()
    assert "| tiny |" in table and "| tiny-2 |" in table and "mini-direct" not in table
    assert "mini-direct" in overview["verdicts"]["mini-direct"] and "not decided" in overview["verdicts"]["tiny"]
    assert "controls was not measured" in json.loads((out / "tiny" / "verdict.json").read_text())["used"]["reason"]
    before = contents(out)
    run_suite(Suite(settings(model, pairs, out, limit=2), ("distances",), ("mini-direct", str(model))))
    assert contents(out) == before, "a part of the tests, again, changes nothing"


def test_a_run_that_measures_nothing_keeps_the_times_of_the_one_that_did(
    model: Path, pairs: Path, tmp_path: Path
) -> None:
    suite = Suite(settings(model, pairs, tmp_path / "out", limit=2), ("walk",))
    run_suite(suite)
    file, journal = tmp_path / "out" / "diagnose.json", tmp_path / "out" / "walk.jsonl"
    record = json.loads(file.read_text())
    record["tests"]["walk"] |= {"seconds": 1234.5, "peak_gib": 6.5}
    file.write_text(json.dumps(record))
    overview = run_suite(suite)
    assert overview is not None
    assert overview["tests"]["walk"]["tiny"] == json.loads(file.read_text())["tests"]["walk"] == record["tests"]["walk"]
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    overview = run_suite(suite)
    assert overview is not None
    measured = overview["tests"]["walk"]["tiny"]
    assert measured["seconds"] < 1000 and measured["peak_gib"] is None and measured["examples"] == 2


def test_tests_on_samples_take_the_originals_edits_in_turn(pairs: Path, tmp_path: Path) -> None:
    source, walk = Source(pairs), DIAGNOSTICS.get("walk")()
    taken = source.take(walk, 4).items
    assert [sample.tags["view"] for sample in source.samples] == ["original"] * 8
    assert len({sample.tags["edit"] for sample in taken}) == 4
    assert [one.id for one in source.take(walk, 6).items[:4]] == [one.id for one in taken]
    single = Source(write(world(4), tmp_path))
    assert len(single.samples) == 4 and not single.pairs


def test_one_diagnostic_alone_asks_about_what_a_suite_does(
    model: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command for one test repeats what the suite measured: the first original of each edit, then the second."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    originals = [row for row in rows if row["tags"]["view"] == "original"]
    edits = list(dict.fromkeys(row["tags"]["edit"] for row in originals))
    by_edit = [[row["id"] for row in originals if row["tags"]["edit"] == edit] for edit in edits]
    turns = [one[place] for place in range(2) for one in by_edit]
    kinds = [kind for kind in DIAGNOSTICS if not kind.needs.pairs]
    assert len(kinds) > 15
    for kind in kinds:
        for limit in (3, 6, None):
            read = read_data(kind(), settings(model, pairs, tmp_path, limit=limit))
            assert [one.id for one in read.items] == turns[:limit], kind.name
            assert read.digest == Source(pairs).take(kind(), limit).digest
    assert read.lines == ["8 pairs: of each only the original picture is asked about, edits in turn"]

    run_suite(Suite(settings(model, pairs, tmp_path / "suite", limit=3), ("walk",)))
    alone = ["diagnose", "walk", model, pairs, "--limit", 3, "--out", tmp_path / "alone", "--device", "cpu"]
    assert main([*map(str, alone), "--max-new", "8"]) == 0
    assert "8 pairs: of each only the original" in capsys.readouterr().err
    records = [(tmp_path / name / "walk.jsonl").read_text() for name in ("suite", "alone")]
    assert records[0] == records[1] and records[0].count("\n") == 3


def test_data_without_boxes_or_pairs_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) | {"boxes": []} for line in write(world(3), tmp_path).read_text().splitlines()]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = settings(model, tmp_path / "plain.jsonl", tmp_path / "out")
    overview = run_suite(Suite(run, ("walk", "distances")))
    assert overview is not None
    assert "none of its 3 samples has evidence boxes" in overview["tests"]["walk"]["tiny"]["reason"]
    assert "no counterfactual pairs" in overview["tests"]["distances"]["tiny"]["reason"]
    assert "walk skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tests", "options", "message"),
    [
        (("walks",), {}, "walks"),
        ((), {}, "--tests is empty"),
        (("walk",), {"steer": {"at": "2"}}, "--set steer: this diagnostic is not among --tests"),
        (("walk",), {"walk": {"buy": "x"}}, "diagnostic walk: buy: no such setting"),
    ],
)
def test_mistakes_are_found_before_anything_is_read(
    tests: tuple[str, ...], options: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run_suite(Suite(settings("nowhere", tmp_path / "nothing", tmp_path / "out"), tests, (), options))


def test_set_needs_a_name_and_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["diagnose", "mini", "--data", "x", "--out", str(tmp_path), "--set", "at=2"]
    assert main(args) == 2 and "write NAME.SETTING=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("kind", list(DIAGNOSTICS), ids=lambda kind: kind.name)
def test_every_test_says_how_many_it_takes(kind: type[Diagnostic]) -> None:
    """Of pairs there are four edits, so that the usual number would be four times too many for a CPU."""
    own = kind.mro()[: kind.mro().index(Diagnostic)]
    assert any("examples" in vars(one) for one in own)
    assert 0 < kind.examples[0] <= kind.examples[1]
    assert not kind.needs.pairs or 4 * kind.examples[0] <= 200


def chosen(*args: str) -> Suite:
    """As the command line reads it."""
    given = as_suite(["mini", "--data", "x", "--out", "y", *args])
    return tyro.cli(SuiteCommand, args=given).suite()


def test_options_can_be_repeated_and_take_several_values() -> None:
    args = ["--set", "walk.by=kind", "--set", "steer.at=2", "controls.seed=3", "--set=controls.dummy=x"]
    suite = chosen(*args, "--against", "a", "b", "--against", "c")
    assert suite.options == {"walk": {"by": "kind"}, "steer": {"at": "2"}, "controls": {"seed": "3", "dummy": "x"}}
    assert suite.against == ("a", "b", "c")


def test_settings_with_several_values_have_commas() -> None:
    args = ["--tests", "controls,counterfactual", "--set", "controls.conditions=noise, another"]
    controls, pairs = chosen(*args, "--set", "counterfactual.protocol=separate").diagnostics()
    if controls.name != "controls":
        controls, pairs = pairs, controls
    assert controls.settings.conditions == ("free", "another", "noise")
    assert pairs.settings.protocol == ("separate",)
    with pytest.raises(UserError, match="there is no 'nose'"):
        chosen("--tests", "controls", "--set", "controls.conditions=another,nose").diagnostics()


@pytest.mark.parametrize("words", [("--latents", "evidence"), ("--latents=evidence",)])
def test_as_many_latents_as_the_evidence_has(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = chosen(*words, "--tests", "similarity,walk")
    assert suite.run.latents is None and suite.options == {"similarity": {"length": "evidence"}}
    assert [one.settings.length for one in suite.diagnostics() if one.name == "similarity"] == ["evidence"]
    assert chosen("--latents", "4").run.latents == 4
    args = ["diagnose", "mini", "--data", str(tmp_path / "nothing"), "--out", str(tmp_path / "out"), *words]
    assert main(args) == 2 and "nothing" in capsys.readouterr().err, "only the data is missing"


@pytest.mark.parametrize("args", [["mini", "--help"], ["mini", "-h"], ["mini", "--out", "x", "--help"]])
def test_help_of_a_suite(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", *args])
    shown = capsys.readouterr().out
    assert (
        stopped.value.code == 0
        and "usage: realvr diagnose MODEL" in shown
        and all(name in shown for name in ("--set", "--card", "--limit", "--against"))
    )


def test_what_a_suite_lacks_is_named_and_its_help_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "mini", "--out", "x"])
    assert "--data" in capsys.readouterr().err
    assert main(["diagnose", "--help"]) == 0
    assert "realvr diagnose MODEL --help" in capsys.readouterr().out
    assert main(["diagnose", "wlak"]) == 2 and "did you mean 'walk'" in capsys.readouterr().err


def test_names_of_models() -> None:
    names = {"mini": "mini", "runs/rl/final": "rl", "org/model-7b": "model-7b", "/": "model", "a b/best": "a-b"}
    assert {path: model_name(path) for path in names} == names


@pytest.mark.slow
def test_all_tests_on_two_processes_killed_again_and_again_equal_one_process(tmp_path: Path) -> None:
    """Every diagnostic that pairs of trails can serve: journals, summaries, tables and figures to the byte. The other
    two are in test_suite_switch.py."""
    data = tmp_path / "data"
    outside.run("world", "make", data, "--split", "trails-pairs", "--count", 3, "--workers", 1, plugin=None)
    args = ["diagnose", "mini", "--data", data / "trails-pairs" / "samples.jsonl", "--limit", 3, "--batch", 2]
    args += ["--device", "cpu", "--max-new", 16, "--second-model", "mini-short"]
    outside.run(*args, "--out", tmp_path / "whole", plugin=None, seconds=600)
    cut = tmp_path / "cut"
    for share in (0.1, 0.5):  # the killed parent takes its processes along
        process = outside.start(*args, "--out", cut, "--processes", 2, plugin=None)
        process.until(lambda share=share: records(cut) > share * records(tmp_path / "whole"), 300)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was over before it was killed"
    outside.run(*args, "--out", cut, "--processes", 2, plugin=None, seconds=600)
    whole = contents(tmp_path / "whole")
    measured = json.loads((tmp_path / "whole" / "diagnose.json").read_text())["tests"]
    assert set(measured) == set(DIAGNOSTICS.names())
    skipped = {name for name, one in measured.items() if one["status"] != "measured"}
    assert skipped == {"task-structure", "question-switch"}
    found = contents(cut)
    assert set(found) == set(whole)
    assert [name for name in whole if found[name] != whole[name]] == []
