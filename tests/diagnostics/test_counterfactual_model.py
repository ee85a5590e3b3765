"""Pairs put to small models of every family, against stock models over whole sequences; and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from helpers import tolerance
from pair_cases import world_pairs, world_samples
from pair_reference import question, two_turns
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.diagnostics.counterfactual import CounterfactualSettings
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.diagnostics.measuring.views import measure_distances, read_views
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling

K, NEW = 3, 4
SHORT = Sampling(temperature=0.0, max_new=NEW)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    found = world_pairs(1)
    return [found[0], found[2]]


def test_two_turns_are_the_conversation_put_together_at_once(pair: Any, pairs: list[Pair]) -> None:
    responder = ModelResponder(pair.ours, SHORT)
    variants = CounterfactualSettings().variants(K)
    assert variants == [("two-turn", "keep"), ("two-turn", "drop"), ("separate", "none")]
    records = {(r["pair"], r["protocol"], r["first_span"]): r for r in ask_pairs(responder, pairs, variants, K)}
    decode = pair.ours.tokenizer.decode
    for one in pairs:
        kept, dropped = (records[one.id, "two-turn", span] for span in ("keep", "drop"))
        for record, keep in ((kept, True), (dropped, False)):
            right = two_turns(pair, one.original, one.edited, K, NEW, keep)
            assert record["texts"] == [decode(ids) for ids in right]
            assert record["truths"] == [one.original.answer, one.edited.answer]
        assert kept["prompts"][0] == dropped["prompts"][0] == records[one.id, "separate", "none"]["prompts"][0]
        seconds = {records[key]["prompts"][1] for key in records if key[0] == one.id}
        assert len(seconds) == 3  # with the span, without it, and without the first turn


def test_distances_are_those_of_the_stock_spans(pair: Any, pairs: list[Pair]) -> None:
    controls = unrelated(pairs)
    found = measure_distances(read_views(pair.ours, pairs, controls, K))
    assert [record["unrelated"] for record in found] == [pairs[1].id, pairs[0].id]
    for record, one, control in zip(found, pairs, controls, strict=True):
        assert control is not None
        views = [question(one.original), question(one.edited), question(one.original, control.original)]
        pooled, final = [], []
        for view in views:
            sequence, z = pair.think(pair.begin([pair.ours.prompt([view])]), K)
            pooled.append(z[0].double().sum(0) / K)
            final.append(reference.hidden(pair.stock, sequence)[0, -1].double())
        for name, vectors in (("latent", pooled), ("final", final)):
            for suffix, other in (("", vectors[1]), ("_unrelated", vectors[2])):
                cosine = vectors[0] @ other / (vectors[0] @ vectors[0]).sqrt() / (other @ other).sqrt()
                assert record[name + suffix] == pytest.approx(1 - float(cosine), abs=tolerance(1e-6))
        assert record["latent"] > 0 and record["final"] > 0


@pytest.fixture(scope="module")
def small(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with trained markers, as far as its files tell."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    return backbone.save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "samples.jsonl"
    write(iter(world_samples(2)), "jsonl", path)
    return path


def test_the_batch_does_not_matter(small: Path) -> None:
    responder = ModelResponder(Backbone.load(small, dtype=torch.float32, device="cpu"), SHORT)
    pairs = world_pairs(1)
    variants = CounterfactualSettings().variants(K)
    together = ask_pairs(responder, pairs, variants, K)
    alone = [r for one in pairs for r in ask_pairs(responder, [one], variants, K)]

    def texts(records: list[Any]) -> dict[Any, Any]:
        return {(r["pair"], r["protocol"], r["first_span"]): r["texts"] for r in records}

    assert texts(together) == texts(alone) and len(texts(alone)) == 12
    one, many = (
        measure_distances(read_views(responder.backbone, pairs[:n], unrelated(pairs)[:n], K))[0] for n in (1, 4)
    )
    assert one["latent"] == pytest.approx(many["latent"], abs=1e-6)
    assert one["final_unrelated"] == pytest.approx(many["final_unrelated"], abs=1e-6)


def test_equal_pictures_are_at_distance_zero(small: Path) -> None:
    backbone = Backbone.load(small, dtype=torch.float32, device="cpu")
    pairs = world_pairs(1)[:2]
    pairs = [replace(one, edited=replace(one.edited, images=one.original.images)) for one in pairs]
    found = measure_distances(read_views(backbone, pairs, unrelated(pairs), K))
    assert [(r["latent"], r["final"]) for r in found] == [(pytest.approx(0, abs=1e-15),) * 2] * 2
    direct = measure_distances(read_views(backbone, pairs[:1], [None], 0))[0]
    assert direct["latent"] is direct["latent_unrelated"] is direct["final_unrelated"] is None
    assert direct["final"] == pytest.approx(0, abs=1e-15)


def call(*args: Any) -> int:
    return main(["counterfactual", *map(str, args), "--max-new", "3", "--device", "cpu"])


def test_the_command_writes_records_tables_and_settings(
    small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(small, data, "--out", out, "--limit", "1", "--batch", "3") == 0
    summary = json.loads((out / "counterfactual.json").read_text())
    assert list(summary["protocols"]) == ["two-turn/keep", "two-turn/drop", "separate"]
    assert summary["protocols"]["separate"]["all"]["pairs"] == 4
    assert summary["distances"]["all"]["latent"]["pairs"] == 4
    assert summary["settings"]["latents"] == K and summary["settings"]["model"]["weights"]
    assert (out / "counterfactual.md").read_text().count("| color_change |") == 7
    assert len((out / "counterfactual.csv").read_text().splitlines()) == 1 + 3 * 6 * 10 + 5 * 4
    before = (out / "counterfactual.jsonl").read_bytes()
    assert call(small, data, "--out", out, "--limit", "1", "--batch", "3") == 0
    assert (out / "counterfactual.jsonl").read_bytes() == before  # nothing was asked twice
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}" in shown for name in ("C: pairs whose", "U: the others", "A0, A1: right", "change: both"))
    assert "intervals are in the CSV" in shown and "C: pairs whose" in (out / "counterfactual.md").read_text()
    assert call(small, data, "--out", out, "--limit", "2") == 2
    assert "holds results with other settings (pairs was 4, now 8" in capsys.readouterr().err


def test_a_model_without_markers_answers_directly(
    build_tiny: Callable[[str], Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny("qwen2.5-vl")
    assert call(model, data, "--out", tmp_path / "a", "--limit", "1", "--no-distances") == 0
    assert "never trained with latent slots: it answers directly, K = 0" in capsys.readouterr().err
    summary = json.loads((tmp_path / "a" / "counterfactual.json").read_text())
    assert list(summary["protocols"]) == ["two-turn/none", "separate"] and summary["distances"] is None
    assert call(model, data, "--out", tmp_path / "b", "--latents", "4") == 2
    error = capsys.readouterr().err
    assert "--latents 0, or train Stage 1" in error and not (tmp_path / "b").exists()
    for wrong, said in ((("--policy", "guess"), "--policy is 'guess'"), (("--batch", "0"), "--batch is 0")):
        assert call(model, data, "--out", tmp_path / "b", *wrong) == 2
        assert said in capsys.readouterr().err
