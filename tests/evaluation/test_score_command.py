"""``realvr score`` and ``realvr compare`` through the command line, on files as an evaluation leaves them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realvr.cli import main
from realvr.evaluation.records import Prediction, write_predictions


def prediction(question: int, right: bool, bench: str = "mmvp", **fields: Any) -> Prediction:
    base = {
        "condition": "own",
        "latents": 4,
        "seed": 0,
        "answer": "A",
        "choices": ["x", "y"],
        "pair": str(question // 2),
    }
    letter = "A" if right else "B"
    made = {"text": f"<answer>{letter}</answer>", "extracted": letter, "correct": right, "images": [f"{question}.jpg"]}
    return Prediction(bench, str(question), **(base | made | fields))


def run(folder: Path, right: int, total: int = 10, **fields: Any) -> Path:
    """A run with ``right`` of ``total`` questions answered correctly."""
    folder.mkdir(parents=True)
    write_predictions(folder / "predictions.jsonl", [prediction(n, n < right, **fields) for n in range(total)])
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_score_writes_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", 6)
    (folder / "eval.json").write_text(json.dumps({"responder": {"latents": 4}, "expected": {"mmvp": 12}}))
    assert main(["score", str(folder), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
    out = capsys.readouterr().out
    assert "60.0" in out and "incomplete 10/12" in out and "strict" in out
    entry = summary(folder)["benches"]["mmvp"]
    assert (entry["headline"], entry["n"], entry["complete"]) == (60.0, 10, False)
    lines = list(csv.DictReader((folder / "summary.csv").open()))
    assert [(line["benchmark"], line["condition"], line["score"]) for line in lines] == [("mmvp", "own", "60.0")]
    text = (folder / "summary.md").read_text()
    assert "| MMVP (incomplete 10/12) | 60.0 |" in text
    # Ten questions of unknown origin: the paper's 72.0 does not stand beside them.
    assert "72.0" not in text and "72.0" not in out
    assert "No published number stands beside MMVP: no record of the questions (eval.json)." in text
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["eval.json", "predictions.jsonl", "summary.csv", "summary.json", "summary.md"]
    )


def test_a_narrow_terminal_shows_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tmp_path / "run", 6)
    cells = (("own", 0), ("mean", 4), ("other", 4), ("noise", 4))
    more = [prediction(n, n < 3, condition=c, latents=k) for n in range(10) for c, k in cells]
    lost = Prediction("mmvp", "10", "own", 4, 0, "A", error="a.png: no such image file", finish="error")
    write_predictions(folder / "predictions.more.jsonl", [*more, lost])
    (folder / "eval.json").write_text(
        json.dumps({"responder": {"latents": 4}, "expected": {"mmvp": 11, "blink": 5, "own": 3}})
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["score", str(folder), "--beside", "ReaLVR@Qwen2.5-VL-7B"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("wrote")) <= 80
    first, second = (part.split() for part in out.split("What the latents do"))
    assert {"benchmark", "interval", "policy", "unread", "strict"} <= set(first)  # no word is cut
    assert "54.5" in first and {"help:", "dependence:", "another's", "noise", "read"} <= set(second)
    assert second.count("+30.0") == 3  # own 6 of the 10 asked under all, the others 3
    flat = " ".join(out.split())
    assert "1 of 11 answers are missing and count as wrong, the first for question 10: a.png: no such image" in flat
    assert "BLINK has no predictions yet." in flat and "own has no predictions yet." in flat
    assert summary(folder)["not_begun"] == ["blink", "own"]


def test_shards_torn_lines_and_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", 2, total=4)
    more = [prediction(n, True) for n in range(4, 8)] + [prediction(n, n == 0, latents=0) for n in range(8)]
    write_predictions(folder / "predictions.1.jsonl", more)
    with (folder / "predictions.1.jsonl").open("a") as file:
        file.write(prediction(8, True).to_json()[:40])
    assert main(["score", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == summary(folder)
    entry = printed["benches"]["mmvp"]
    assert printed["trained_latents"] == 4
    assert (entry["headline"], entry["ablation"]["none"]["difference"]) == (75.0, -62.5)
    table = (folder / "summary.md").read_text()
    assert "| MMVP | no span | 12.5 | -62.5 |" in table and "best K" not in table  # two K are no sweep


def test_score_again_under_another_policy(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 6)
    assert main(["score", str(folder)]) == 0
    own = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["score", str(folder), "--policy", "vlmevalkit"]) == 0
    named = {f"summary.vlmevalkit.{kind}" for kind in ("json", "md", "csv")}
    assert {path.name for path in folder.iterdir()} == own.keys() | named
    assert all((folder / name).read_bytes() == content for name, content in own.items())
    entry = json.loads((folder / "summary.vlmevalkit.json").read_text())["benches"]["mmvp"]
    assert (entry["headline"], entry["coverage"], entry["policy"]) == (0.0, 0.0, "vlmevalkit")
    assert summary(folder)["benches"]["mmvp"]["headline"] == 60.0
    assert main(["score", str(folder), "--policy", "lvr"]) == 0  # a third one leaves both alone
    assert (
        summary(folder)["benches"]["mmvp"]["policy"] == "strict"
        and entry == (json.loads((folder / "summary.vlmevalkit.json").read_text())["benches"]["mmvp"])
    )
    assert main(["score", str(folder), "--policy", "strict"]) == 0  # the run's own policy by its name
    assert not (folder / "summary.strict.json").exists() and summary(folder)["benches"]["mmvp"]["headline"] == 60.0


def test_checkpoints_scored_under_another_policy_keep_their_mean(tmp_path: Path) -> None:
    for name, right in (("seed0", 4), ("seed1", 6)):
        run(tmp_path / "all" / name, right)
    assert main(["score", str(tmp_path / "all")]) == 0
    assert main(["score", str(tmp_path / "all"), "--policy", "vlmevalkit"]) == 0
    assert summary(tmp_path / "all")["benches"]["mmvp"]["mean"] == 50.0
    other = json.loads((tmp_path / "all" / "summary.vlmevalkit.json").read_text())
    assert other["benches"]["mmvp"]["mean"] == 0.0
    assert summary(tmp_path / "all" / "seed1")["benches"]["mmvp"]["headline"] == 60.0


def test_several_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, right in (("seed0", 4), ("seed1", 6), ("seed2", 8)):
        run(tmp_path / "all" / name, right)
    assert main(["score", str(tmp_path / "all")]) == 0
    assert "60.0 ± 20.0" in capsys.readouterr().out
    total = summary(tmp_path / "all")
    assert total["checkpoints"] == ["seed0", "seed1", "seed2"]
    assert total["benches"]["mmvp"]["values"] == {"seed0": 40.0, "seed1": 60.0, "seed2": 80.0}
    assert summary(tmp_path / "all" / "seed1")["benches"]["mmvp"]["headline"] == 60.0


def test_what_cannot_be_scored_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", 6)
    empty = tmp_path / "empty"
    empty.mkdir()
    hollow = run(tmp_path / "hollow", 0, total=0)
    broken = run(tmp_path / "broken", 1)
    (broken / "eval.json").write_text("[1]")
    for arguments, said in (
        (["score", str(tmp_path / "nowhere")], "not a folder"),
        (["score", str(empty)], "no predictions.jsonl"),
        (["score", str(hollow)], "predictions are empty"),
        (["score", str(broken)], "eval.json: a JSON object is expected"),
        (["score", str(folder), "--policy", "best"], "'best' is not an extraction policy"),
        (["score", str(folder), "--beside", "ReaLVR"], "not a published row"),
        (["score", str(folder), "--resamples", "0"], "--resamples is 0"),
        (["compare", str(folder), str(empty)], "no predictions.jsonl"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path / "a", 5), tmp_path / "b"
    second.mkdir()
    rows = [prediction(n, n in (0, 5, 6, 7, 8, 9), latents=8) for n in range(1, 12)]
    write_predictions(second / "predictions.jsonl", rows)
    assert main(["compare", str(first), str(second), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    entry = result["benches"]["mmvp"]
    # Questions 1 to 9 are in both: the first run has 1 to 4 right, the second 5 to 9.
    assert (entry["common"], entry["only_in_first"], entry["only_in_second"]) == (9, 1, 2)
    assert (entry["only_first"], entry["only_second"]) == (4, 5)
    assert entry["p"] == 1.0
    assert entry["difference"] == pytest.approx(100 / 9)
    assert entry["difference_ci"][0] < 100 / 9 < entry["difference_ci"][1]
    assert result["warnings"] == []
    assert main(["compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "+11.2" in out and "4 / 5" in out  # 44.4 and 55.6 as displayed; +11.1 before rounding
    assert entry["gain"] == 11.2
    assert "1 questions only in a, 2 only in b" in " ".join(out.split())


def test_compare_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a", 5, prompt="p")
    other = run(tmp_path / "b", 5, prompt="q", answer="B", policy="lvr", images=["x.jpg"])
    assert main(["compare", str(first), str(other)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for what in ("right answer", "image list", "encoded prompt", "extraction policy"):
        assert f"the {what} differs in 10 of 10" in out
    assert "options differs" not in out


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = run(tmp_path / "a", 5), run(tmp_path / "b", 5, bench="blink")
    assert main(["compare", str(first), str(other)]) == 2
    assert "no question in common: the first has mmvp (10), the second blink (10)" in capsys.readouterr().err


def test_five_task_mean_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("mmvp", "blink", "hrbench-4k", "hrbench-8k", "mme-realworld-lite")
    for folder, right in (("a", 5), ("b", 7)):
        (tmp_path / folder).mkdir()
        rows = [prediction(n, n < right, bench=name) for name in names for n in range(10)]
        write_predictions(tmp_path / folder / "predictions.jsonl", rows)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    five = json.loads(capsys.readouterr().out)["five_task_mean"]
    assert (five["first"], five["second"], five["difference"], five["gain"]) == pytest.approx((50, 70, 20, 20))
    # The mean of five independent tasks is known better than one of them: a fifth of the variance.
    low, high = five["difference_ci"]
    assert 15 < high - low < 32


def test_no_torch(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 6)
    code = (
        f"import sys; from realvr.cli import main; main(['score', {str(folder)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
