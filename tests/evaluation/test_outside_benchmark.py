"""A benchmark in a file of the user: through evaluation with a kill and several processes, scores, report and lists."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import outside
import realvr
from eval_cases import Speaker, lines
from realvr.backbone import Backbone
from realvr.errors import UserError
from realvr.evaluation import benchmark_tables
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.evaluation.questions import load
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.registry import load_file

TOY = Path(__file__).resolve().parents[1] / "toys" / "toy_benchmark.py"
DOCS = TOY.parents[2] / "docs" / "evaluation.md"
PACKAGE = Path(realvr.__file__).parent
ROWS = [
    ("q1", "1.png", "Which shade?", "light/dark/grey", "dark", "one"),
    ("q2", "2.png", "Which shade is it?", "light/dark/grey", "light", "one"),
    ("q3", "3.png", "Shade?", "light/dark/grey", "grey", "two"),
    ("q4", "4.png", "How dark?", "light/dark/grey", "dark", "two"),
    ("q5", "5.png", "Light or dark?", "light/dark/grey", "light", "three"),
    ("q6", "6.png", "What shade?", "light/dark/grey", "B", "four"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shades")
    for number, row in enumerate(ROWS):
        Image.new("RGB", (56, 56), (40 * number, 30, 200 - 30 * number)).save(folder / row[1])
    (folder / "shades.txt").write_text("".join("; ".join(row) + "\n" for row in ROWS) + "half; a row\n")
    return folder


@pytest.fixture(scope="module")
def model(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu", latents=2)
    return backbone.save(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def toy() -> Iterator[Any]:
    """The toy in this process' registry, for one test."""
    BENCHMARKS.names()  # filled
    before = dict(BENCHMARKS._members)
    (made,) = BENCHMARKS.adopt(load_file(TOY))
    yield made
    BENCHMARKS._members.clear()
    BENCHMARKS._members.update(before)


start, run = partial(outside.start, plugin=TOY), partial(outside.run, plugin=TOY)


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    asked = ["eval", str(model), "--bench", f"toy={data}", "--out", str(out)]
    return [*asked, "--max-new", "6", "--device", "cpu", "--batch", "2", *more]


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    said = run(*command(model, data, out))
    assert "Toy Shades" in said and "1 rows cannot be asked" in said and "groups right" in said
    return out


def test_reader_policy_and_rule_are_its_own(finished: Path) -> None:
    """Against the texts of predictions.jsonl, by hand."""
    answers = dict(zip([row[0] for row in ROWS], "BACBAB", strict=True))
    found = lines(finished)
    assert len(found) == 5 * len(ROWS) and {row["policy"] for row in found} == {"toy-length"}
    for row in found:
        picked = "ABC"[len(row["text"]) % 3] if row["text"].strip() else None
        assert (row["extracted"], row["answer"]) == (picked, answers[row["question"]])
        assert row["correct"] == (picked == answers[row["question"]])
    own = {row["question"]: row["correct"] for row in found if (row["condition"], row["latents"]) == ("own", 2)}
    groups = [own["q1"] and own["q2"], own["q3"] and own["q4"], own["q5"], own["q6"]]
    entry = json.loads((finished / "summary.json").read_text())["benches"]["toy"]
    assert entry["headline"] == 100 * sum(groups) / 4 and entry["metric"] == "groups right" and entry["n"] == 6
    assert entry["metrics"]["single"] == pytest.approx(100 * sum(own.values()) / 6)
    assert entry["not_published_set"] == ""
    record = json.loads((finished / "eval.json").read_text())
    assert record["settings"]["policy"] == "toy-length" and record["benches"]["toy"]["dropped"] == {"field_missing": 1}


@pytest.mark.slow
def test_it_survives_a_kill_and_two_processes_go_on(finished: Path, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*command(model, data, out))
    process.until(lambda: sum(file.read_bytes().count(b"\n") for file in out.glob("predictions*.jsonl")) >= 4)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 4 <= len((out / "predictions.jsonl").read_bytes().splitlines()) < 30
    run(*command(model, data, out, "--processes", "2"))
    assert lines(out) == lines(finished)
    assert (out / "summary.json").read_bytes() == (finished / "summary.json").read_bytes()
    assert "made otherwise" in run(*command(model, data, out, "--variant", "toy=turned"), code=2)


@pytest.mark.slow
def test_scores_comparison_and_report_show_it(finished: Path, tmp_path: Path) -> None:
    said = run("score", finished, "--beside", "guess@toy-1b")
    assert "25.0 ± 1.5" in said and "published with the benchmark" in said
    run("score", finished, "--policy", "strict")
    assert {row["policy"] for row in lines(finished)} == {"toy-length"}
    strict = json.loads((finished / "summary.strict.json").read_text())["benches"]["toy"]
    assert strict["policy"] == "strict" and strict["metric"] == "groups right"
    said = run("compare", finished, finished)
    assert "Toy Shades" in said and "toy-length" in said
    for plugin, title in ((TOY, "Toy Shades"), (None, "toy")):  # shown by its name where the file is gone
        run("report", finished, "--out", tmp_path / title, plugin=plugin)
        (page,) = (tmp_path / title).glob("*.html")
        assert title in page.read_text() and "groups right" in page.read_text()


def test_lists_name_it(data: Path) -> None:
    assert "Toy Shades" in run("benchmarks", "toy")
    facts = json.loads(run("benchmarks", "toy", "--json"))
    assert (facts["policy"], facts["variants"]) == ("toy-length", {"turned": "reads the options in reverse"})
    printed = run("benchmarks", "--markdown")
    assert "| `toy` | shades.txt beside its pictures | 6 | share of groups with every answer right |" in printed
    assert [line for line in printed.splitlines() if "`toy`" not in line] == benchmark_tables.markdown().splitlines()
    assert "no benchmark 'toy'" in run("benchmarks", "toy", plugin=None, code=2)


def test_the_model_reads_its_prompt(toy: Any, data: Path, tmp_path: Path) -> None:
    heard = {}

    class Listener(Speaker):
        def say(self, request: Any) -> str:
            heard[request.sample.id] = [(turn.role, turn.text, len(turn.images)) for turn in request.turns]
            return "light" if request.sample.id == "q1" else "xx"  # 5 and 2 letters: C

    questions = load("TOY", data)
    summary = evaluate(Listener(), [questions], tmp_path / "run", EvalSettings(latents=(0,)))
    assert heard["q2"] == [("user", "Which shade is it? Say light or dark or grey.", 1)]
    assert summary["benches"]["toy"]["metrics"]["groups"]["two"] == {"accuracy": 50.0, "n": 2}  # q3 is C
    assert summary["benches"]["toy"]["headline"] == 0.0  # and q4 is not
    turned = load("toy", data / "shades.txt", variant="turned")
    assert [sample.answer for sample in turned.samples] == list("BCABCB")
    with pytest.raises(UserError, match="there is no variant 'x' of toy; there are turned"):
        load("toy", data, variant="x")


def test_another_wording_is_another_evaluation(toy: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load("toy", data).describe()["sha256"]
    monkeypatch.setattr(toy, "prompt", classmethod(lambda cls, sample: [*toy.__mro__[1].prompt(sample)]))
    assert load("toy", data).describe()["sha256"] != before


def test_a_policy_belongs_to_its_benchmark(model: Path, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    row = {"id": "1", "images": [str(data / "1.png")], "question": "?", "choices": ["a", "b"], "answer": "A"}
    mine.write_text(json.dumps(row))
    asked = ["eval", model, "--bench", f"mine={mine}", "--out", tmp_path / "run", "--policy", "toy-length"]
    assert "'toy-length' is not an extraction policy; there are strict, " in run(*asked, code=2)


READER = 'reader = Format("toy", "Toy Shades text", rows, parse)'
BROKEN = {
    "no rule": ("rule = Rule(", "other = Rule(", r"benchmark Shades lacks rule \(see realvr.evaluation.benchmark"),
    "no title": ('title = "Toy Shades"', "pass", "benchmark Shades lacks title"),
    "wrong kind": (READER, "reader = rows", "reader is a function, Format is expected"),
    "unknown policy": ('policy = "toy-length"', 'policy = "toy-lenght"', "policy 'toy-lenght' is none of strict, "),
    "taken policy": ('"toy-length": by', '"toy-length": by_length, "lvr": by', "policy 'lvr' has the name of one of"),
    "name": ('name = "toy"', 'name = "Toy"', "its name 'Toy' must be of small letters"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_with_a_file_is_said_with_its_line(what: str, tmp_path: Path) -> None:
    old, new, message = BROKEN[what]
    source = TOY.read_text()
    assert source.count(old) == 1
    (tmp_path / "mine.py").write_text(source.replace(old, new))
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.startswith("class Shades"))
    said = run("benchmarks", plugin=tmp_path / "mine.py", code=2)
    assert re.search(re.escape(f"{tmp_path}/mine.py:{line}: ") + ".*" + message, said), said


def test_two_of_one_name_are_refused_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOY.read_text().replace('name = "toy"', 'name = "mmvp"'))
    for verb in ("benchmarks", "env"):
        said = run(verb, plugin=tmp_path / "mine.py", code=2)
        assert "two benchmarks are called 'mmvp'" in said
        assert "tasks/mmvp.py:" in said and f"{tmp_path}/mine.py:" in said


# ---------------------------------------------------------------------- the package itself


def test_the_docs_list_the_registered_benchmarks() -> None:
    text = DOCS.read_text()
    assert benchmark_tables.files_table() in text and benchmark_tables.rules_table() in text, (
        "docs/evaluation.md: put in what realvr benchmarks --markdown prints"
    )


def test_no_tensors_are_imported() -> None:
    code = "from realvr.evaluation.benchmark import BENCHMARKS; assert 'toy' in BENCHMARKS"
    code += "; import sys; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "REALVR_PLUGINS": str(TOY)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


NAMES = re.compile(r"(?<![a-z])(blink|mmvp|hr[-_ ]?bench|mme|vstar|v\*)(?![a-z])", re.IGNORECASE)


def _is_quote(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "paper" for target in node.targets)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String literals that are no documentation: docstrings, texts that stand alone as a statement, and what a
    diagnostic quotes of the paper are."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    quotes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_quote(node)]
    said |= {id(part) for quote in quotes for part in ast.walk(quote.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def test_only_its_own_file_names_a_benchmark() -> None:
    assert NAMES.search("--bench mmvp=PATH") and NAMES.search("HR-Bench 4K") and not NAMES.search("commercial")
    found = []
    for room in ("evaluation", "diagnostics", "training", "report", "demo", "cli"):
        for file in sorted((PACKAGE / room).rglob("*.py")):
            if file.parent.name == "tasks":
                continue
            for line, text in strings(ast.parse(file.read_text())):
                if NAMES.search(text):
                    found.append(f"{file.relative_to(PACKAGE)}:{line}: {text[:80]!r}")
    assert not found, "\n".join(found)
