"""Attention on the evidence: against stock attention and loops, uniform and planted attention, the summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_cases as cases
from helpers import tolerance
from realvr.data.sample import Box, Sample
from realvr.diagnostics import DIAGNOSTICS, DiagnoseSettings, Samples, Shown, diagnose
from realvr.diagnostics.enrichment import Enrichment
from realvr.diagnostics.measuring.attending import Generated
from realvr.diagnostics.measuring.looking import NO_CONTENT, NO_REGION, NO_WINDOW, Look, look, region
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.widgets import tables_of

K = 3
GRID = Grid(4, 4)


def record_of(attention_LN: torch.Tensor, boxes: list[Box], grids: tuple[Grid, ...] = (GRID,), **fields: Any) -> Any:
    """The record of a question whose attention is given."""
    said = Generated([1], "<answer>A</answer>", [0], True, "A", fields.pop("correct", True))
    sample = Sample.ask("planted", [], "?", "A", boxes=boxes)
    sample = cases.asked_about(sample, *range(len(grids)))
    latents_LKN = attention_LN[:, None].expand(-1, K, -1)
    one = Look(sample, grids, said, latents_LKN, attention_LN, None, None)
    return Enrichment.configure(fields)._record(one, K, False)


def test_every_layer_is_that_of_stock_attention(pair: Any, tmp_path: Path) -> None:
    chosen = cases.samples(tmp_path)
    records = {one["id"]: one for one in Enrichment().measure(cases.model_of(pair.ours, K), Samples(chosen, (), "two"))}
    compared = 0
    for sample in chosen:
        right = cases.seen(pair, sample, K)
        record = records[sample.id]
        for name, rows in (("answer", right.reply), ("latent", right.slots)):
            for layer, matrix in enumerate(right.mean()):
                a_N = matrix[rows][:, right.image].mean(0)
                expected = cases.ratio(right, a_N)
                if expected is None or not rows:
                    assert record["skipped"] in (NO_WINDOW, NO_CONTENT)
                    continue
                target, around = expected
                found = record[name]
                assert found["target"][layer] == pytest.approx(target, abs=tolerance(1e-6))
                assert found["background"][layer] == pytest.approx(around, abs=tolerance(1e-6))
                assert found["image"][layer] == pytest.approx(float(a_N.sum()), abs=tolerance(1e-6))
                if target == around == 0:
                    assert found["ratio"][layer] is None
                else:
                    assert found["ratio"][layer] == pytest.approx(target / (around + 1e-8), rel=tolerance(1e-3))
                compared += 1
    assert compared >= 2 * pair.ours.layers
    assert not any("detail" in record for record in records.values())


@torch.no_grad()
def test_uniform_attention_has_no_enrichment(fresh: Any, tmp_path: Path) -> None:
    """A model whose queries are zero looks everywhere alike; a sliding window still cuts the picture."""
    cases.uniform(fresh)
    window = getattr(fresh.text_config, "layer_types", None) or ["full_attention"] * fresh.layers
    whole = [layer for layer, kind in enumerate(window) if kind == "full_attention"]
    found = 0
    for record in Enrichment().measure(cases.model_of(fresh, K), Samples(cases.samples(tmp_path))):
        for name in ("answer", "latent"):
            if record["skipped"] is None:
                assert [record[name]["ratio"][layer] for layer in whole] == pytest.approx([1] * len(whole), abs=1e-4)
                found += 1
    assert whole and found >= 2


def test_attention_written_by_hand_has_its_exact_ratio() -> None:
    """One picture, each box by itself, two pictures, tiles with a thumbnail that looks the other way. No model:
    `test_planted_latents` has latents that copy a token."""
    box = Box(0, (0.25, 0.25, 0.75, 0.5))  # tokens 5 and 6
    a_LN = torch.full((2, 16), 0.01, dtype=torch.float64)
    a_LN[0, 5], a_LN[0, 6] = 0.2, 0.1
    a_LN[1] = 0.0
    record = record_of(a_LN, [box])
    assert record["answer"]["target"] == [0.3, 0.0] and record["answer"]["background"] == [0.02, 0.0]
    assert record["answer"]["ratio"] == [pytest.approx(15, rel=1e-5), None] and record["windows"] == 9
    assert record["latent"] == record["answer"]

    corners = [Box(0, (0.0, 0.0, 0.25, 0.25)), Box(0, (0.75, 0.75, 1.0, 1.0))]  # no translate fits
    assert record_of(a_LN, corners)["skipped"] == NO_WINDOW
    moved = record_of(a_LN, corners, windows="box")
    others = (a_LN[0].sum() - a_LN[0, 0] - a_LN[0, 15]) / 14
    assert moved["answer"]["ratio"][0] == pytest.approx(0.02 / (2 * float(others)), rel=1e-5)
    overlapping = [Box(0, (0.0, 0.0, 0.5, 0.25)), Box(0, (0.0, 0.0, 0.25, 0.25))]  # the union is two tokens
    even = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    assert record_of(even, overlapping, windows="box")["answer"]["ratio"] == [pytest.approx(1, abs=1e-5)]

    twice = torch.cat([a_LN, torch.full((2, 16), 0.03, dtype=torch.float64)], -1)
    both = record_of(twice, [box, Box(1, (0.0, 0.0, 0.25, 0.25))], (GRID, GRID))
    assert both["answer"]["ratio"][0] == pytest.approx((0.3 + 0.03) / (0.02 + 0.03), rel=1e-5)
    tiled = Grid(2, 2, 1, 2, thumbnail=True)  # 2 x 4 places: tokens 0 1 4 5 above, 2 3 6 7 below, then the thumbnail
    values = torch.tensor([[0.1, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    third = record_of(values, [Box(0, (0.5, 0.0, 0.75, 0.5))], (tiled,))
    assert third["answer"]["target"] == [0.3] and third["answer"]["background"] == [pytest.approx(0.1 / 7, rel=1e-5)]
    assert record_of(a_LN, [Box(0, (0.0, 0.0, 0.0, 0.0))])["skipped"] == NO_REGION
    assert record_of(a_LN, [Box(0, (0.0, 0.0, 1.0, 1.0))])["skipped"] == NO_WINDOW


def planted_records() -> list[dict[str, Any]]:
    box = [Box(0, (0.0, 0.0, 0.25, 0.25))]
    found = []
    for number, (share, correct) in enumerate([(0.2, True), (0.4, True), (0.1, False)]):
        a_LN = torch.full((2, 16), 0.1, dtype=torch.float64)
        a_LN[:, 0] = share
        a_LN[1] /= 2 if number == 1 else 1
        found.append(record_of(a_LN, box, correct=correct) | {"id": f"q{number}"})
    return found


def test_right_and_wrong_answers_are_apart_and_ratios_are_averaged() -> None:
    records = planted_records()
    records.append(record_of(torch.ones(2, 16, dtype=torch.float64), [Box(0, (0, 0, 1, 1))]) | {"id": "q3"})
    diagnostic = Enrichment()
    records.append(diagnostic.failed(Sample.ask("q4", [], "?", "A"), "unreadable"))
    summary = diagnostic.summarised(records)
    assert summary["questions"] == 3 and summary["skipped"] == {NO_WINDOW: 1} and summary["accuracy"]["count"] == 2
    first = summary["correct"]["layers"][1]
    assert first["layer"] == 2 and first["ratio"]["mean"] == pytest.approx((2 + 4) / 2, abs=1e-4)
    assert first["ratio_of_means"]["mean"] == pytest.approx((0.2 + 0.2) / (0.1 + 0.05), rel=1e-4)
    assert first["target"]["mean"] == pytest.approx(0.2) and first["image"]["pairs"] == 2
    assert summary["incorrect"]["layers"][0]["ratio"]["mean"] == pytest.approx(1, abs=1e-4)
    assert summary["latents_curve"]["questions"] == 3 and summary["answers"]["mean"] == pytest.approx(7 / 3, abs=1e-3)
    notes = diagnostic.notes(records, summary, 5)
    assert any(NO_WINDOW in note for note in notes) and any("q4" in note for note in notes)
    both = [Shown("one", summary), Shown("two", summary, 1)]
    figure = diagnostic.figure(both)
    assert len(figure.axes) == 2 and all(len(ax.lines) == 4 for ax in figure.axes)
    tables = list(tables_of(diagnostic.drawn(both)))
    assert len(tables[0].rows) == 2 and len(tables[1].rows) == 2 * 3 * 2


def test_all_right_or_nothing_at_all_is_drawn_without_numbers() -> None:
    diagnostic = Enrichment()
    right = diagnostic.summarised([one for one in planted_records() if one["correct"]])
    assert right["incorrect"]["questions"] == 0 and right["incorrect"]["ratio"]["mean"] is None
    assert any("no question has a wrong answer" in note for note in diagnostic.notes([], right, 2))
    nothing = diagnostic.summarised([])
    assert nothing["answers"]["mean"] is None and nothing["accuracy"]["rate"] is None
    for summaries in ([right], [nothing], [right, nothing]):
        shown = [Shown(str(place), summary, place) for place, summary in enumerate(summaries)]
        assert len(diagnostic.figure(shown).axes) == len(summaries) and diagnostic.drawn(shown)
        json.dumps(summaries, allow_nan=False)


def test_a_model_without_a_span_and_bad_data(backbone: Any, tmp_path: Path) -> None:
    chosen = cases.samples(tmp_path)
    hidden = replace(cases.asked_about(chosen[2], 0), id="hidden")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = replace(chosen[0], id="broken", images=[type(chosen[0].images[0]).from_path(tmp_path / "broken.png")])
    samples = Samples([chosen[0], hidden, broken], (), frozenset({"one"}))
    records = {one["id"]: one for one in Enrichment().measure(cases.model_of(backbone, 0), samples)}
    assert "shows" in records["hidden"]["error"] and records["broken"]["error"]
    assert "latent" not in records["one"] and records["one"]["error"] is None
    summary = Enrichment().summarised(list(records.values()))
    assert summary["latents"] == 0 and summary["latents_curve"]["questions"] == 0
    panel = Enrichment().panel(records["one"])
    if panel is not None:  # not of an empty reply
        maps = panel.as_json()["parts"][0]
        assert maps["queries"] == ["answer"] and maps["layers"] == ["mean", *range(1, backbone.layers + 1)]
    assert Enrichment().panel(records["broken"]) is None


def test_detail_holds_the_map_of_every_latent_and_layer(pair: Any, tmp_path: Path) -> None:
    (sample, *_) = cases.samples(tmp_path)
    samples = Samples([sample], (), frozenset({"one"}))
    (record,) = Enrichment().measure(cases.model_of(pair.ours, K), samples)
    right = cases.seen(pair, sample, K)
    panel = Enrichment().panel(record)
    assert panel is not None
    overlay = panel.parts[0].as_json()
    assert overlay["queries"][:K] == list(range(1, K + 1))
    token = cases.places(right.grids[0])
    for query, layer, grids in overlay["maps"]:
        name, where = overlay["queries"][query], overlay["layers"][layer]
        rows = right.reply if name == "answer" else [right.slots[name - 1]]
        matrix = right.mean().mean(0) if where == "mean" else right.mean()[where - 1]
        a_N = matrix[rows][:, right.image].mean(0)
        for (row, column), number in token.items():
            assert grids[0][row][column] == pytest.approx(float(a_N[number]), rel=6e-3, abs=tolerance(1e-6))


def test_data_without_boxes_is_refused(build_tiny: Any, tmp_path: Path) -> None:
    cases.samples(tmp_path)
    data = tmp_path / "samples.jsonl"
    data.write_text(json.dumps({"id": "a", "images": ["4.png"], "question": "What?", "answer": "red"}) + "\n")
    with pytest.raises(UserError, match="evidence boxes"):
        diagnose(["enrichment"], DiagnoseSettings(str(build_tiny("gemma3")), data, tmp_path / "out", device="cpu"))
    assert "enrichment" in DIAGNOSTICS.names()


def test_nothing_to_look_at(backbone: Any) -> None:
    assert look(cases.model_of(backbone, K), []) == ([], [])
    empty = region(Sample.ask("none", [], "?", "A"), [])
    assert empty.windows == 0 and len(empty.target_N) == 0
