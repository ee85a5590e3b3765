"""Numbers of the latent exchange, from records written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realvr.diagnostics.exchange import Exchange
from realvr.diagnostics.exchange_summary import csv_rows, report, summarise_exchange
from realvr.diagnostics.parts import Shown

ONE, TWO = "edited-to-original", "original-to-edited"


def record(
    pair: str,
    way: str,
    condition: str,
    said: str | None,
    margin: float,
    selector: str = "full",
    k: int = 4,
    seed: int | None = None,
) -> dict[str, Any]:
    """The recipient's right answer is A, the donor's is B."""
    return {
        "pair": pair, "edit": pair[0], "direction": way, "condition": condition, "selector": selector, "k": k,
        "seed": seed, "recipient_truth": "A", "donor_truth": "B", "extracted": said, "margin": margin,
        "text": str(said),
    }  # fmt: skip


RECORDS = [
    # Pair x1: the sham says A twice. A full swap turns one of two answers to B.
    record("x1", ONE, "unmodified", "A", -2.0, "none", 0),
    record("x1", TWO, "unmodified", "C", -1.0, "none", 0),
    record("x1", ONE, "sham", "A", -2.0),
    record("x1", TWO, "sham", "A", -1.25),
    record("x1", ONE, "swap", "B", 1.0),  # lift 100, shift 3
    record("x1", TWO, "swap", "A", -0.25),  # lift 0, shift 1
    record("x1", ONE, "swap", "b", 0.0, "contrast", 1),  # lift 100, shift 2
    record("x1", TWO, "swap", None, -1.25, "contrast", 1),  # a parse failure: lift 0, shift 0
    record("x1", ONE, "swap", "B", 0.0, "random", 1, 0),  # lift 100, shift 2
    record("x1", ONE, "swap", "A", -2.0, "random", 1, 1),  # lift 0, shift 0
    record("x1", TWO, "swap", "C", -1.25, "random", 1, 0),  # lift 0, shift 0
    record("x1", TWO, "swap", "A", -0.25, "random", 1, 1),  # lift 0, shift 1
    # Pair y1: one sham says the donor's answer already.
    record("y1", ONE, "sham", "B", 1.0),
    record("y1", TWO, "sham", "A", -1.0),
    record("y1", ONE, "swap", "A", 0.0),  # lift -100, shift -1
    record("y1", TWO, "swap", "A", 0.0),  # lift 0, shift 1
    # Pair z1 is in progress: no sham yet.
    record("z1", ONE, "swap", "B", 9.0),
]


def test_lifts_and_shifts_by_hand() -> None:
    found = summarise_exchange(RECORDS)
    rows = {(r["condition"], r["selector"], r["k"]): r for r in found["rows"]}
    full = rows["swap", "full", 4]
    assert full["donor_lift"]["mean"] == pytest.approx((50 - 50) / 2) and full["donor_lift"]["pairs"] == 2
    assert full["margin_shift"]["mean"] == pytest.approx((2 + 0) / 2)
    assert full["answers"] == 4 and full["donor_frequency"]["count"] == 1 and full["recipient_frequency"]["count"] == 3
    # Two pairs, resampled: the interval of their mean goes from one to the other.
    assert (full["donor_lift"]["low"], full["donor_lift"]["high"]) == (-50.0, 50.0)
    contrast, chance = rows["swap", "contrast", 1], rows["swap", "random", 1]
    assert contrast["donor_lift"]["mean"] == 50 and contrast["margin_shift"]["mean"] == pytest.approx(1)
    assert contrast["parse_coverage"]["rate"] == 0.5
    assert chance["donor_lift"]["mean"] == 25 and chance["margin_shift"]["mean"] == pytest.approx(0.75)
    assert chance["answers"] == 4 and chance["donor_lift"]["pairs"] == 1
    (between,) = found["contrast_minus_random"]
    assert between["k"] == 1 and between["donor_lift"]["mean"] == 25
    assert between["margin_shift"]["mean"] == pytest.approx(0.25)
    assert rows["sham", "full", 4]["donor_frequency"]["rate"] == 0.25
    assert found["sham"]["equal_replies"]["count"] == 1 and found["sham"]["equal_replies"]["of"] == 2
    assert found["sham"]["largest_margin_difference"] == 0.25
    assert set(found["edits"]) == {"x", "y", "z"} and found["errors"] == 0


def test_tables_and_the_empty_case() -> None:
    found = summarise_exchange([*RECORDS, record("w1", "", "error", None, 0.0, "none", 0)])
    assert found["errors"] == 1
    text = report(found, "model")
    assert "| Full span | 4 | +0.0 [-50.0, +50.0] | +1.000 [+0.000, +2.000] | 25.0 | 75.0 | 100.0 |" in text
    assert "1 of 2 shams" in text
    lines = [row for row in csv_rows(found) if row["edit"] == "y" and row["condition"] == "swap"]
    assert [(row["donor_lift"], row["margin_shift"]) for row in lines] == [(-50.0, 0.0)]
    empty = summarise_exchange([])
    assert empty["rows"] == [] and json.dumps(empty) and report(empty, "model") and csv_rows(empty) == []


def test_swaps_from_a_step_on_by_hand() -> None:
    """K = 4. The trails of x1 part at step 3, those of y1 at step 2; w1 does not know."""

    def late(pair: str, way: str, said: str, margin: float, step: int, parts_at: int | None) -> dict[str, Any]:
        known = {} if parts_at is None else {"parts_at": parts_at}
        found = record(pair, way, "swap", said, margin, "from-step", 5 - step)
        return found | known | {"positions": list(range(step, 5))}

    records = [
        *(record(pair, way, "sham", "A", 0.0) for pair in ("x1", "y1", "w1") for way in (ONE, TWO)),
        *(record("x1", way, "swap", "B", 3.0) for way in (ONE, TWO)),
        late("x1", ONE, "B", 2.0, 2, 3),  # one step before the parting
        late("x1", TWO, "B", 1.0, 2, 3),
        late("x1", ONE, "A", -1.0, 4, 3),  # one step after it
        late("y1", ONE, "B", 4.0, 2, 2),  # at it
        late("y1", TWO, "A", 0.0, 2, 2),
        late("y1", ONE, "B", 0.5, 3, 2),  # one step after it
        late("w1", ONE, "C", 0.0, 3, None),
    ]
    found = summarise_exchange(records)
    rows = {row["from_step"]: row for row in found["rows"] if "from_step" in row}
    assert list(rows) == [2, 3, 4] and [row["k"] for row in rows.values()] == [3, 2, 1]
    assert rows[2]["donor_lift"]["mean"] == 75 and rows[2]["donor_lift"]["pairs"] == 2
    assert rows[3]["donor_lift"]["mean"] == 50 and rows[4]["donor_lift"]["mean"] == 0
    assert rows[2]["margin_shift"]["mean"] == pytest.approx((1.5 + 2.0) / 2)
    assert [row["selector"] for row in found["rows"]] == ["full", "full", *["from-step"] * 3]
    parting = {row["offset"]: row for row in found["parting"]}
    assert {offset: (row["answers"], row["donor_lift"]["mean"]) for offset, row in parting.items()} == {
        -1: (2, 100.0), 0: (2, 50.0), 1: (2, 50.0)
    }  # fmt: skip
    assert parting[1]["margin_shift"]["mean"] == pytest.approx((-1.0 + 0.5) / 2)
    text = report(found, "model")
    assert "| From step 2 | 3 | +75.0" in text and "| -1 | 2 | +100.0" in text
    assert "parting" not in summarise_exchange(RECORDS) and "From step" not in report(summarise_exchange(RECORDS), "m")
    by_step, _, parted = (
        next(w for w in Exchange().draw([Shown("m", found)]) if w.caption.startswith(words))
        for words in ("Latents swapped from", "Exchange", "From step t on")
    )
    assert "+75.0 from step 2, +50.0 from step 3, 0.0 from step 4" in str(by_step.figures[0][1])
    assert "m +100.0 from step 1" in str(by_step.figures[0][1]), "from the first step on, it is the whole span"
    assert [row[1] for row in parted.rows] == ["-1", "0", "+1"]
