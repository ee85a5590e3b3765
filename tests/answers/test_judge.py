"""The judge: its properties, its limits, and that everything which compares answers asks it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pair_cases import Says, world_pairs
from realvr import answers
from realvr.answers import JUDGE, PARSERS, equal, mathematics
from realvr.data.sample import Sample
from realvr.diagnostics.counterfactual_summary import numbers
from realvr.diagnostics.exchange_summary import summarise_exchange
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.diagnostics.pairs import Pair
from realvr.evaluation.asking import Asked, prediction
from realvr.evaluation.responder import Reply
from realvr.evaluation.scoring import reread
from realvr.training import rewards

pieces = st.sampled_from(
    [
        "1",
        "2",
        "0",
        ".",
        ",",
        "/",
        "x",
        "y",
        "+",
        "-",
        "^",
        "{",
        "}",
        "(",
        ")",
        "\\frac",
        "%",
        " cm",
        " ",
        "½",
        "²",
        "=",
        ":",
    ]
)
texts = st.one_of(st.text(max_size=12), st.lists(pieces, max_size=6).map("".join))
OPTIONS = ["red", "dark red", "1/2", "A"]


@settings(max_examples=150, deadline=None)
@given(texts, texts, st.sampled_from([(), OPTIONS]))
def test_the_verdict_is_symmetric_and_never_an_error(one: str, other: str, choices: Any) -> None:
    verdict = equal(one, other, choices)
    assert equal(other, one, choices) == verdict
    assert type(verdict.equal) is bool


@settings(max_examples=200, deadline=None)
@given(texts, st.sampled_from(["", " ", "\n", "  \t"]), st.sampled_from([(), OPTIONS]))
def test_an_answer_equals_itself_however_it_is_spaced(text: str, space: str, choices: Any) -> None:
    assert equal(text, text, choices)
    assert equal(text, f"{space}{text}{space}", choices)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(1, 50))
def test_a_fraction_in_any_terms(over: int, under: int, factor: int) -> None:
    """Against integers: a/b is c/d where ad = bc."""
    assert equal(f"{over}/{under}", rf"\frac{{{over * factor}}}{{{under * factor}}}")
    assert not equal(f"{over}/{under}", f"{over + 1}/{under}")


# ---------------------------------------------------------------------- limits

HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    r"\sum_{k=1}^{10^{12}} k^{99}",
    "{" * 90 + "1" + "}" * 90,
    "\\frac" * 40,
    "1" * 199 + "/7",
    "0" * 100_000,
    "(" * 100_000,
]


def test_hostile_answers_are_decided_within_the_limit() -> None:
    begun = time.monotonic()
    assert equal(HOSTILE[0], "3").how == "limit", "arithmetic on long integers, which no signal interrupts"
    assert time.monotonic() - begun < mathematics.WALL_SECONDS
    for text in HOSTILE[1:]:
        begun = time.monotonic()
        assert not equal(text, "3")
        assert time.monotonic() - begun < mathematics.WALL_SECONDS
    assert equal("x + y", "y + x"), "the judge goes on after the limit was reached"


def test_threads_share_the_judge() -> None:
    """math-verify's own limits are signals, which only the main thread may set."""
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda n: bool(equal(f"{n}x + {n}", f"{n}(x + 1)")), range(2, 10)))
    assert verdicts == [True] * 8
    assert threading.current_thread() is threading.main_thread()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_worker_has_a_judge_of_its_own() -> None:
    assert equal("x + 3", "3 + x")
    parents = mathematics._helper._process
    with mathematics._helper._lock:  # as if another thread were asking at the moment of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # waiting for the parent's lock would take forever
            right = equal("x + 4", "4 + x") and not equal("x + 4", "5 + x")
            os._exit(0 if right and mathematics._helper._process is not parents else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal("x + 5", "5 + x"), "the parent's helper still answers the parent"


def test_the_helper_ends_with_its_process() -> None:
    code = (
        "from realvr.answers import equal, mathematics; assert equal('x + 1', '1 + x'); "
        "print(mathematics._helper._process.pid)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(answers.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert done.stderr == ""


def test_letters_and_numbers_need_no_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*pair: str) -> bool:
        raise AssertionError(f"math-verify was asked about {pair}")

    monkeypatch.setattr("realvr.answers.judge.expressions_equal", refuse)
    assert (
        not equal("A", "C", OPTIONS) and not equal("A", "B") and not equal("17/34", "0.75") and equal("12 mm", "1.2 cm")
    )
    assert not equal("a big cat", "a small dog")


# ---------------------------------------------------------------------- one judge


@contextmanager
def calls_of_the_judge() -> Iterator[list[str]]:
    """Modules of the functions above each call of `equal`, nearest first, as one text a call."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is equal.__code__:
            above, caller = [], frame.f_back
            while caller is not None:
                above.append(caller.f_globals.get("__name__", ""))
                caller = caller.f_back
            seen.append(" ".join(above))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def free(answer: str) -> Sample:
    return Sample.ask("s", [], "How much?", answer)


def test_rewards_and_wrong_answers() -> None:
    with calls_of_the_judge() as seen:
        assert rewards.accuracy("<answer>1/2</answer>", free("0.5")) == 1
        assert answers.wrong(["1/2", "0.25", "1/4", "25 %"], "0.5") == ["0.25"]
    assert any("realvr.training.rewards" in call for call in seen)
    assert any("realvr.answers.canonical" in call for call in seen)


def test_evaluation() -> None:
    with calls_of_the_judge() as seen:
        row = prediction("mine", Asked(free("0.5"), []), "own", 0, 0, Reply("<answer>1/2</answer>"), "strict")
        assert row.correct and (row.parser, row.judge) == ("strict/1", JUDGE)
        old = replace(row, correct=False, parser="", judge="")
        again = reread(old, "vlmevalkit")
        assert again.correct and (again.parser, again.judge) == ("vlmevalkit/1", JUDGE)
    for module in ("realvr.evaluation.asking", "realvr.evaluation.scoring"):
        assert any(module in call for call in seen), module


def test_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from realvr import cli

    Image.new("RGB", (56, 56), "red").save(tmp_path / "red.png")
    command = ["ask", "mini", str(tmp_path / "red.png"), "What is one half?", "--max-new", "4", "--json", "--expected"]
    assert cli.main([*command, "no such answer"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["parser"], told["judge"], told["correct"]) == ("ask/1", JUDGE, False)
    with calls_of_the_judge() as seen:
        assert cli.main([*command, f" {told['answer'].upper()}. "]) == 0
    assert json.loads(capsys.readouterr().out)["correct"] is True
    assert any("realvr.cli" in call for call in seen)


def free_pair(first: str, second: str) -> Pair:
    """A pair of the world as a question without options."""
    pair = world_pairs(1)[0]
    views = [replace(view, choices=[], answer=y) for view, y in zip(pair.views, (first, second), strict=True)]
    return replace(pair, original=views[0], edited=views[1])


def test_counterfactual_pairs() -> None:
    """Truths 1/2 and 3; the replies say 0.5 and 3.0: both right, and a change."""
    pair = free_pair("1/2", "3")
    said = {pair.original.id: "0.5", pair.edited.id: "3.0"}
    responder = Says(lambda request: f"<answer>{said[request.sample.id]}</answer>")
    with calls_of_the_judge() as seen:
        assert pair.changed and not free_pair("1/2", "0.5").changed
        (record,) = ask_pairs(responder, [pair], [("separate", "none")], latents=0)
        found = numbers([record])
    assert (record["parser"], record["judge"]) == ("strict/1", JUDGE)
    rates = [found[name]["count"] for name in ("original_accuracy", "edited_accuracy", "strict_correct_flip")]
    assert rates == [1, 1, 1] and found["prediction_change"]["count"] == 1
    for module in ("realvr.diagnostics.pairs", "realvr.diagnostics.counterfactual_summary"):
        assert any(module in call for call in seen), module


def test_exchange() -> None:
    """The donor's right answer is 1/2; a swap that makes the recipient say 0.5 follows it."""

    def record(condition: str, said: str) -> dict[str, Any]:
        return {
            "pair": "p", "edit": "e", "direction": "d", "condition": condition,
            "selector": "full", "k": 4, "seed": None,
            "recipient_truth": "3", "donor_truth": "1/2", "extracted": said, "margin": 0.0, "text": said, "choices": [],
        }  # fmt: skip

    with calls_of_the_judge() as seen:
        found = summarise_exchange([record("sham", "3.0"), record("swap", "0.5")])
    rows = {row["condition"]: row for row in found["rows"]}
    assert rows["swap"]["donor_frequency"]["count"] == 1 and rows["sham"]["recipient_frequency"]["count"] == 1
    assert rows["swap"]["donor_lift"]["mean"] == 100
    assert any("realvr.diagnostics.exchange_summary" in call for call in seen)


# ---------------------------------------------------------------------- names


def test_parsers_are_listed_with_purpose_and_version() -> None:
    assert {parser.purpose for parser in PARSERS.values()} == {"reward", "evaluation", "ask"}
    for name, parser in PARSERS.items():
        assert str(parser) == f"{name}/{parser.version}" and parser.description
    with pytest.raises(answers.extract.UserError, match="'reward' is not an extraction policy; there are strict, "):
        answers.parser("reward", "evaluation")


def test_docs_and_options_take_their_list_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
    assert answers.extract.parsers_table() in page.read_text(encoding="utf-8")
    from realvr import cli

    for verb in ("eval", "score", "compare", "report"):
        with pytest.raises(SystemExit) as caught:
            cli.main([verb, "--help"])
        assert caught.value.code == 0
        shown = "".join(capsys.readouterr().out.split()).replace("│", "")
        assert "|".join(answers.POLICIES) in shown, verb


@pytest.mark.parametrize(
    ("module", "name"),
    [("realvr.benchmarks.extract", "extract_choice"), ("realvr.maths.answers", "canonical")],
)
def test_old_names_work_and_warn(module: str, name: str) -> None:
    import importlib

    old = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{name} is deprecated: use realvr\.answers"):
        function = getattr(old, name)
    assert function("(B)", ["red", "blue"]) == "B"
    with pytest.raises(AttributeError):
        getattr(old, "no_such_name")  # noqa: B009


def test_old_names_of_the_maths() -> None:
    from realvr.maths import answers as old

    with pytest.warns(DeprecationWarning):
        assert old.same("Red.", "red") and old.key("A  b.") == "a b" and old.LETTERS.startswith("ABC")
    with pytest.warns(DeprecationWarning):
        assert (
            old.parse("<answer>x</answer>") == "x"
            and old.unique(["a", "A"]) == ["a"]
            and old.wrong(["b"], "a") == ["b"]
        )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("2024-01-02", "2021", False),  # 2024 - 1 - 2
        ("2024/1/2", "1012", False),
        ("1/2/2024", "1/4048", False),
        ("2024-01-02", "2024-1-2", True),
        ("2024-01-02", "2024/01/02", True),
        ("01-02-2024", "02-01-2024", False),
        ("2024-1", "2023", True),  # no date: a subtraction
    ],
)
def test_a_date_is_no_calculation(one: str, other: str, expected: bool) -> None:
    assert bool(equal(one, other)) is bool(equal(other, one)) is expected


@pytest.mark.parametrize(
    ("one", "other", "choices", "expected"),
    [
        ("1/2", "0.5", ["1/2", "0.5"], False),  # two options are two answers, whatever they say
        ("A", "0.5", ["1/2", "0.5"], False),
        ("blue", "B", ["red", "blue"], True),
        ("(b) blue", "Blue.", ["red", "blue"], True),
        ("A. blue", "B", ["red", "blue"], False),
    ],
)
def test_options_decide_where_there_are_some(one: str, other: str, choices: list[str], expected: bool) -> None:
    verdict = equal(one, other, choices)
    assert (bool(verdict), verdict.how) == (expected, "option") and equal(other, one, choices) == verdict
