"""Pairs whose unrelated control is missing or cannot be read: they lose that one condition, and it is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pair_cases import Says, oracle, world_pairs, world_samples
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import ImageRef
from realvr.diagnostics.exchange import Exchange
from realvr.diagnostics.exchange_summary import record_key, summarise_exchange
from realvr.diagnostics.measuring.exchange import ExchangeOptions, exchange_pairs
from realvr.diagnostics.measuring.views import measure_distances, read_views
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.diagnostics.run import measure_all
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.runs.journal import Journal

K = 2
OPTIONS = ExchangeOptions(latents=K, ks=(1,), seeds=1, sampling=Sampling(temperature=0.0, max_new=3))


@pytest.fixture(scope="module")
def small(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with trained markers, as far as its files tell."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    return backbone.save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def backbone(small: Path) -> Backbone:
    return Backbone.load(small, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [one for one in world_pairs(2) if one.changed][:3]


def broken(pair: Pair) -> Pair:
    """The same with a picture that cannot be decoded."""
    damaged = ImageRef.from_bytes("damaged.png", pair.original.images[0].read()[:100])
    return Pair(pair.edit, replace(pair.original, images=[damaged]), pair.edited)


def test_a_missing_control_costs_its_own_pair_only(backbone: Backbone, pairs: list[Pair]) -> None:
    """Three pairs in one batch: with a control, without one, with one that cannot be read."""
    controls = [pairs[1], None, broken(pairs[0])]
    whole = exchange_pairs(backbone, pairs, unrelated(pairs), OPTIONS)
    found = exchange_pairs(backbone, pairs, controls, OPTIONS)
    donors = [record["pair"] for record in found if record["condition"] == "unrelated"]
    assert donors == [pairs[0].id] * 2
    assert not [record for record in found if record["condition"] == "error"], "no pair is an error"

    def others(records: list[Any]) -> dict[Any, Any]:
        kept = [r for r in records if r["condition"] not in ("unrelated", "no-control")]
        return {record_key(r): (r["text"], pytest.approx(r["margin"], abs=1e-4)) for r in kept}

    assert others(found) == others(whole) and len(others(found)) == 3 * 2 * 5
    summary = summarise_exchange(found)
    assert summary["errors"] == 0
    assert summary["controls"]["pairs"] == 3 and summary["controls"]["without"] == 2
    reasons = summary["controls"]["reasons"]
    assert [one["pairs"] for one in reasons.values()] == [1, 1]
    (unread,) = [one["first"] for one in reasons.values() if one["first"]]
    assert "damaged.png" in unread
    (row,) = [row for row in summary["rows"] if row["condition"] == "unrelated"]
    assert row["answers"] == 2 and row["donor_lift"]["pairs"] == 1


def test_distances_keep_every_control_that_can_be_read(backbone: Backbone, pairs: list[Pair]) -> None:
    found = measure_distances(read_views(backbone, pairs, [pairs[1], None, broken(pairs[0])], K))
    whole = measure_distances(read_views(backbone, pairs, [pairs[1], pairs[2], pairs[0]], K))
    assert [record["error"] for record in found] == [None] * 3
    for name in ("latent", "final"):
        assert [r[name] for r in found] == pytest.approx([r[name] for r in whole], abs=1e-6)
        values = [r[f"{name}_unrelated"] for r in found]
        assert values[0] == pytest.approx(whole[0][f"{name}_unrelated"], abs=1e-6) and values[1:] == [None, None]
    assert [record["unrelated"] for record in found] == [pairs[1].id, None, None]
    assert [bool(record["no_control"]) for record in found] == [False, True, True]


def test_a_pair_that_cannot_be_read_stays_an_error_of_its_own(backbone: Backbone, pairs: list[Pair]) -> None:
    found = exchange_pairs(backbone, [broken(pairs[0]), *pairs[1:]], [pairs[1], pairs[2], pairs[1]], OPTIONS)
    assert [r["pair"] for r in found if r["condition"] == "error"] == [pairs[0].id]
    assert len([r for r in found if r["condition"] == "unrelated"]) == 4
    assert summarise_exchange(found)["controls"] == {"pairs": 2, "without": 0, "reasons": {}}


def test_a_finished_run_is_not_done_again(backbone: Backbone, pairs: list[Pair], tmp_path: Path) -> None:
    controls = [pairs[1], None, broken(pairs[0])]

    class Given(Exchange):
        def prepare(self, model: Model, samples: Any) -> None:
            self._controls = {pair.id: control for pair, control in zip(pairs, controls, strict=True)}

    given = Given.configure({"k": "1", "seeds": 1})
    journal = Journal(tmp_path / "exchange.jsonl", record_key)
    measure_all(given, Model(ModelResponder(backbone, OPTIONS.sampling), K), pairs, journal, 4)
    written = (tmp_path / "exchange.jsonl").read_bytes()
    again = Journal(tmp_path / "exchange.jsonl", record_key)
    measure_all(given, Model(Says(oracle), K), pairs, again, 4)  # no model: nothing is left to ask
    assert (tmp_path / "exchange.jsonl").read_bytes() == written


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Pairs as a file, the edited picture of the first one cut short after it was written."""
    path = tmp_path / "samples.jsonl"
    write(iter(world_samples(1)), "jsonl", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    victim = tmp_path / next(row for row in rows if row["tags"]["view"] == "original")["images"][0]
    victim.write_bytes(victim.read_bytes()[:120])
    return path


def test_the_commands_say_how_many_pairs_lack_the_control(
    small: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-new", "3", "--device", "cpu"]
    assert main(["counterfactual", str(small), str(damaged), "--out", str(tmp_path / "c"), *flags]) == 0
    said = capsys.readouterr().err
    summary = json.loads((tmp_path / "c" / "counterfactual.json").read_text())
    distances = [json.loads(line) for line in (tmp_path / "c" / "distances.jsonl").read_text().splitlines()]
    errors = [record for record in distances if record["error"]]
    lacking = [record for record in distances if record["no_control"]]
    assert len(errors) == 1 and len(lacking) == summary["controls"]["without"] == 1
    assert summary["controls"]["pairs"] == len(distances) - 1
    assert f"1 of {len(distances) - 1} pairs has no unrelated control: 1 because the control cannot be read" in said
    assert "has no unrelated control" in (tmp_path / "c" / "counterfactual.md").read_text()
    kept = [record for record in distances if not record["error"] and not record["no_control"]]
    assert kept and all(record["latent_unrelated"] is not None for record in kept)
    (bad,) = errors
    unread = (
        f"1 of {len(distances)} pairs cannot be read; these count as wrong, and as no change (first: {bad['pair']}: "
    )
    assert unread in said


def test_pairs_that_cannot_be_read_are_named(
    small: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--max-new", "3", "--device", "cpu", "--k", "1"]
    assert main(["exchange", str(small), str(damaged), "--out", str(tmp_path / "x"), *flags]) == 0
    said, noted = capsys.readouterr()
    assert "pairs cannot be read; these are left out (first: " in noted
    assert "Unrelated donor" in said  # names of rows stay whole in a narrow window
