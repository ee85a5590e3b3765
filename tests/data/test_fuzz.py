"""No change to a file makes a reader crash, hang or lose a row without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz_readers import LAYOUTS, Outcome, fuzz
from realvr.data.detect import FORMATS


def holds(outcome: Outcome) -> None:
    assert not outcome.crashes, outcome.crashes
    assert not outcome.hangs, outcome.hangs
    assert not outcome.wrong, outcome.wrong
    assert outcome.rows == outcome.accepted + outcome.rejected


def test_every_reader_is_fuzzed() -> None:
    assert {name for name, _, _ in LAYOUTS} == set(FORMATS)


def test_a_sample_of_the_fuzzer(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, seed=0, rows=0, files=150)
    holds(outcome)
    assert outcome.accepted > 200 and outcome.rejected > 200 and len(outcome.dropped) > 12


@pytest.mark.slow
def test_twenty_thousand_rows(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, seed=1, rows=25_000)
    holds(outcome)
    assert outcome.rows >= 25_000 and len(outcome.layouts) >= 15 and min(outcome.layouts.values()) > 50
