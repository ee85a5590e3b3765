"""Packing: nothing lost, nothing cut, nothing shared between examples, and an exact resume."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.data.mixture import Mixture
from realvr.data.packing import PackedStream, pack_all, plan
from realvr.errors import UserError

quick = settings(max_examples=100, deadline=None)
lengths = st.lists(st.integers(1, 120), min_size=1, max_size=60)


@quick
@given(sizes=lengths)
def test_every_example_is_in_one_row_or_rejected(sizes: list[int]) -> None:
    items = list(enumerate(sizes))
    rows, rejected = pack_all(items, lambda item: item[1], 100)
    assert sorted([item for row in rows for item in row.items] + [item for item, _ in rejected]) == items
    assert all(len(row) <= 100 for row in rows)
    assert all(item[1] > 100 and reason == "example_too_long" for item, reason in rejected)
    assert (rows, rejected) == pack_all(items, lambda item: item[1], 100)
    kept = [size for size in sizes if size <= 100]
    # No two rows that could be joined are left apart more than best fit allows: at most one row is half empty.
    assert sum(len(row) <= 50 for row in rows) <= 1 or not kept


@quick
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_segments_positions_and_attention(sizes: list[int]) -> None:
    (row,), _ = pack_all(sizes, lambda size: size, 60)
    width = 64
    segments, positions, attention = row.segment_ids(width), row.positions(width), row.attention(width)
    for number, (start, length) in enumerate(zip(row.starts, row.lengths, strict=True)):
        assert (segments[start : start + length] == number).all()
        assert (positions[start : start + length] == np.arange(length)).all()
        block = attention[start : start + length]
        assert (block[:, start : start + length] == np.tril(np.ones((length, length), bool))).all()
        assert block.sum() == length * (length + 1) // 2, "no example sees another"
    assert (segments[len(row) :] == -1).all() and not attention[len(row) :].any()
    assert len(row.positions()) == len(row)
    with pytest.raises(ValueError, match="does not fit"):
        row.positions(len(row) - 1)


def test_plan_refuses_what_does_not_fit() -> None:
    assert plan([60, 50, 40, 30, 20], 100) == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="between 1 and"):
        plan([101], 100)


def stream(rejected: list | None = None) -> PackedStream[int]:
    source = Mixture({"a": list(range(5, 60)), "b": list(range(90, 130))}, {"a": 3, "b": 1}, seed=5, epochs=3)
    heard = None if rejected is None else lambda item, reason: rejected.append((item, reason))
    return PackedStream(source, lambda size: size, budget=100, window=16, on_reject=heard)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7, 8, 20])
def test_resume_equals_no_restart(taken: int) -> None:
    rejected: list = []
    whole = stream(rejected)
    rows = list(whole)
    assert rejected and whole.rejected == {"example_too_long": len(rejected)}
    first = stream()
    head = list(islice(first, taken))
    state = json.loads(json.dumps(first.state_dict()))
    second = stream()
    second.load_state_dict(state)
    assert head + list(second) == rows
    assert second.rejected == whole.rejected


def test_a_source_that_never_fits_is_an_error() -> None:
    with pytest.raises(UserError, match="do not fit 10 tokens"):
        next(iter(PackedStream(Mixture({"a": [50]}), lambda size: size, budget=10)))
    with pytest.raises(UserError, match="at least 1"):
        PackedStream(Mixture({"a": [50]}), lambda size: size, budget=0)
