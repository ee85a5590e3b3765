"""Mixtures: fixed order, exact shares, shards that partition, and an exact resume."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.data.mixture import Mixture, apportion
from realvr.errors import UserError

quick = settings(max_examples=60, deadline=None)
sizes = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def mixture(counts: list[int], **options: Any) -> Mixture[tuple[int, int]]:
    return Mixture({str(s): [(s, i) for i in range(n)] for s, n in enumerate(counts)}, **options)


@quick
@given(counts=sizes, seed=st.integers(-5, 2**40))
def test_an_epoch_without_weights_is_every_item_once(counts: list[int], seed: int) -> None:
    total = sum(counts)
    drawn = list(mixture(counts, seed=seed, epochs=3))
    for epoch in range(3):
        part = drawn[epoch * total : (epoch + 1) * total]
        assert sorted(part) == [(s, i) for s, n in enumerate(counts) for i in range(n)]
    assert drawn == list(mixture(counts, seed=seed, epochs=3))


@quick
@given(counts=sizes, world=st.integers(1, 4), workers=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_shards_partition(counts: list[int], world: int, workers: int, seed: int, data: st.DataObject) -> None:
    weights = None
    if data.draw(st.booleans()):
        weights = {str(s): data.draw(st.floats(0.5, 2)) for s in range(len(counts))}
    options: dict[str, Any] = {"weights": weights, "seed": seed, "epochs": 2}
    if weights:
        options["epoch_size"] = 20 * len(counts)
    whole = list(mixture(counts, **options))
    merged: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        for worker in range(workers):
            shard = mixture(counts, rank=rank, world=world, worker=worker, workers=workers, **options)
            position = shard.position
            for item in shard:
                assert position not in merged and position % world == rank
                merged[position] = item
                position = shard.position
    assert [merged[p] for p in range(len(whole))] == whole and len(merged) == len(whole)


@quick
@given(counts=sizes, taken=st.integers(0, 70), ahead=st.integers(0, 50), world=st.integers(1, 3), data=st.data())
def test_what_comes_is_known_without_moving_on(
    counts: list[int], taken: int, ahead: int, world: int, data: st.DataObject
) -> None:
    """Over the ends of epochs, and not beyond the last one."""
    options: dict[str, Any] = {"epochs": 3, "world": world, "rank": data.draw(st.integers(0, world - 1))}
    looking, plain = mixture(counts, **options), mixture(counts, **options)
    assert list(islice(looking, taken)) == list(islice(plain, taken))
    before = looking.state_dict()
    found = looking.upcoming(ahead)
    assert looking.state_dict() == before == plain.state_dict()
    rest = list(plain)
    assert found == rest[:ahead] and list(looking) == rest


@quick
@given(counts=sizes, taken=st.integers(0, 70), seed=st.integers(0, 99), rank=st.integers(0, 2))
def test_resume_equals_no_restart(counts: list[int], taken: int, seed: int, rank: int) -> None:
    options: dict[str, Any] = {"seed": seed, "epochs": 4, "rank": rank, "world": 3, "workers": 2, "worker": seed % 2}
    whole = list(mixture(counts, **options))
    first = mixture(counts, **options)
    head = list(islice(iter(first), taken))
    second = mixture(counts, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + list(second) == whole


def test_resume_with_another_number_of_shards() -> None:
    whole = list(mixture([10, 7], epochs=2))
    old = [mixture([10, 7], epochs=2, rank=rank, world=2, worker=w, workers=2) for rank in (0, 1) for w in (0, 1)]
    seen = [item for shard in old for item in islice(iter(shard), 3)]
    assert sorted(seen) == sorted(whole[:12])
    rest = []
    for rank in range(3):
        shard = mixture([10, 7], epochs=2, rank=rank, world=3)
        shard.load_state_dict(old[rank].state_dict())
        rest.extend(shard)
    assert Counter(rest) == Counter(whole[12:])


def test_weights_are_shares_of_the_draws() -> None:
    mixed = mixture([10, 1000], weights={"0": 1, "1": 3}, epoch_size=40, seed=1)
    drawn = list(islice(iter(mixed), 400))
    assert Counter(source for source, _ in drawn) == {0: 100, 1: 300}
    assert set(Counter(item for item in drawn if item[0] == 0).values()) == {10}, "passes run on over epochs"
    assert len({item for item in drawn if item[0] == 1}) == 300, "no item again before all have come"
    assert drawn != list(islice(iter(mixture([10, 1000], weights={"0": 1, "1": 3}, epoch_size=40, seed=2)), 400))


@quick
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), total=st.integers(0, 1000))
def test_apportion(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    assert all(abs(n - w / sum(weights) * total) < 1 + 1e-9 for n, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"0": 1}}, "no weight for 1"),
        ({"weights": {"0": 1, "1": 1, "x": 1}}, "unknown sources: x"),
        ({"weights": {"0": 1, "1": -1}}, "positive"),
        ({"weights": {"0": 1, "1": 1e-9}}, "no draw per epoch"),
        ({"weights": {"0": 0, "1": 0}}, "no source"),
        ({"epoch_size": 3}, "give weights"),
        ({"rank": 2, "world": 2}, "no shard"),
    ],
)
def test_bad_mixtures(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixture([3, 4], **options)


def test_empty_source_and_foreign_state() -> None:
    with pytest.raises(UserError, match="holds no sample"):
        mixture([3, 0])
    with pytest.raises(UserError, match="cannot resume: sizes"):
        mixture([3, 4]).load_state_dict(mixture([3, 5]).state_dict())
    with pytest.raises(UserError, match="cannot resume: seed"):
        mixture([3, 4]).load_state_dict(mixture([3, 4], seed=1).state_dict())
    assert list(mixture([3, 4], weights={"0": 1, "1": 0}, epoch_size=3, epochs=1))
