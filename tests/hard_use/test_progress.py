"""Where nobody watches, every long verb prints where it stands about as often as it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forked import Forked, forked
from realvr.runs import progress
from realvr.runs.progress import Bar, Ticker, busy
from verbs import Place

LINES = {
    "base": r"step 1/4: 0:00:\d\d in this step",
    "sft": r"step 1/4: 0:00:\d\d in this step",
    "rl": r"step 1/4: 0:00:\d\d in this step",
    "eval": r"mine own, K = 3: [\d,]+ of [\d,]+ \(\d+%\), 0:00:\d\d so far, 0:00:\d\d left, [\d.]+/s, [\d.]+% right",
    "counterfactual": r"pairs: \d+ of \d+ \(\d+%\), 0:00:\d\d so far",
    "exchange": r"pairs: \d+ of \d+ \(\d+%\), 0:00:\d\d so far",
}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SECONDS, "0.001")  # a fast disk has a tiny model written within 20 ms


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", LINES)
def test_every_long_verb_says_where_it_stands(name: str, place: Place, tmp_path: Path) -> None:
    args = place.verbs[name].args(tmp_path / "run")
    args += ["--log.console"] if name in ("base", "sft", "rl") else []
    done = forked(args, tmp_path)
    assert done.code == 0 and re.search(LINES[name], done.said), done.said
    assert "\x1b" not in done.said and "\r" not in done.said  # no bars in a log
    if name in ("base", "sft", "rl"):
        assert "step 4/4  loss" in done.said and ("  g " in done.said) == (name == "rl")
        assert "step 5/4" not in done.said and re.search(r"writing .*final: 0:00:\d\d so far", done.said), done.said


@pytest.mark.usefixtures("often")
def test_commands_about_data_say_where_they_stand(place: Place, tmp_path: Path) -> None:
    made = forked(["world", "make", tmp_path / "w", "--split", "mmvp", "--count", "60", "--workers", "1"], tmp_path)
    assert made.code == 0 and re.search(r"mmvp: \d+ of 120 \(\d+%\), 0:00:0\d so far", made.said), made.said
    source = tmp_path / "w" / "mmvp" / "samples.jsonl"
    checked = forked(["data", "check", source, source, "--duplicates", "rename"], tmp_path)
    assert re.search(r"data check: \d+%, .*\d+ ok", checked.said), checked.said
    exported = forked(["data", "export", source, tmp_path / "x" / "out.jsonl", "--to", "jsonl"], tmp_path)
    assert exported.code == 0 and re.search(r"samples.jsonl as jsonl: \d+%, 0:00:0\d so far", exported.said)


@pytest.mark.usefixtures("often")
def test_the_demo_says_what_runs(tmp_path: Path) -> None:
    process = Forked(["demo", "--quick", "--out", tmp_path / "demo"], tmp_path)
    try:
        process.until(lambda: re.search(r"step 1 of \d+, ~\d+:\d\d left; running: \S", process.said) is not None)
    finally:
        process.kill()


def test_lines_come_at_their_interval_and_not_from_the_outer_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a clock of the test's own: nothing before 30 s, then one line, from the innermost only."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    outer, inner = Ticker(lambda: "outer"), Ticker(lambda: "inner")
    with outer, inner:
        assert not inner.due and not outer.due
        now += 29.9
        assert not inner.due
        now += 0.2
        assert inner.due and not outer.due
        inner.said()
        assert not inner.due
        now += 31
        assert inner.due
    assert not outer.due


def test_many_short_things_inside_do_not_keep_all_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a checkpoint after every step."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Ticker(lambda: "outer") as outer:
        for _ in range(3):
            now += 5
            with Ticker(lambda: "inner") as inner:
                now += 4
                assert not inner.due
        now += 4
        assert outer.due
        with Ticker(lambda: "inner") as inner:
            assert inner.due
            inner.said()
        assert not outer.due


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(progress.SECONDS, "0")
    with busy("nothing"), Bar("some", 10) as bar:
        bar.advance(4)
    assert bar.line().startswith("some: 4 of 10 (40%)") and capsys.readouterr().err == ""
