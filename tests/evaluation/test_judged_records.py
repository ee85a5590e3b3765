"""Parser and judge stand in every record of an evaluation; records of earlier versions, which lack them, still work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval_cases import Oracle, lines, load_all, make_world
from realvr.answers import JUDGE
from realvr.errors import UserError
from realvr.evaluation.finished import summarise_run
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.runs.files import write_json

SETTINGS = EvalSettings(ablation=False)


@pytest.fixture
def run(tmp_path: Path) -> tuple[dict[str, Path], Path]:
    world = make_world(tmp_path / "world")
    evaluate(Oracle(), load_all(world), tmp_path / "run", SETTINGS)
    return world, tmp_path / "run"


def forget(out: Path) -> None:
    """The files as an earlier version wrote them."""
    rows = lines(out)
    for row in rows:
        del row["parser"], row["judge"]
    (out / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = json.loads((out / "eval.json").read_text())
    del record["answers"]
    write_json(out / "eval.json", record)


def test_parser_and_judge_stand_in_every_record(run: tuple[dict[str, Path], Path]) -> None:
    _, out = run
    assert {(row["parser"], row["judge"]) for row in lines(out)} == {("strict/1", JUDGE)}
    assert json.loads((out / "eval.json").read_text())["answers"] == {"parser": "strict/1", "judge": JUDGE}
    for entry in json.loads((out / "summary.json").read_text())["benches"].values():
        assert (entry["parser"], entry["judge"]) == ("strict/1", JUDGE)


def test_records_of_earlier_versions(run: tuple[dict[str, Path], Path]) -> None:
    world, out = run
    before = summarise_run(out)["benches"]
    forget(out)
    for name, entry in summarise_run(out)["benches"].items():
        assert (entry["parser"], entry["judge"]) == ("not recorded", "not recorded")
        assert entry["headline"] == before[name]["headline"]
    rows = lines(out)
    (out / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    summary = evaluate(Oracle(), load_all(world), out, SETTINGS)  # goes on: one question is missing
    assert {entry["judge"] for entry in summary["benches"].values()} <= {"not recorded", f"not recorded + {JUDGE}"}
    assert len(lines(out)) == len(rows) and lines(out)[-1]["judge"] == JUDGE
    again = summarise_run(out, policy="strict")["benches"]
    assert {entry["judge"] for entry in again.values()} == {JUDGE}


def test_a_run_under_another_judge_is_refused(run: tuple[dict[str, Path], Path]) -> None:
    world, out = run
    record = json.loads((out / "eval.json").read_text())
    record["answers"]["judge"] = "realvr/0"
    write_json(out / "eval.json", record)
    with pytest.raises(UserError, match=rf"answers\.judge.*realvr/0.*{JUDGE}"):
        evaluate(Oracle(), load_all(world), out, SETTINGS)
