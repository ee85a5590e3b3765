"""Latents on the evidence and the answer on the latents: against stock attention, planted attention, the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_cases as cases
from helpers import tolerance
from realvr.data.sample import Box, Sample
from realvr.diagnostics import Samples, Shown
from realvr.diagnostics.evidence_readout import EvidenceReadout, _record, boxes_of
from realvr.diagnostics.measuring.attending import Generated
from realvr.diagnostics.measuring.looking import NO_WINDOW, Look
from realvr.imaging.types import Grid
from realvr.widgets import tables_of

K = 3


def cell(row: int, column: int) -> Box:
    return Box(0, (column / 4, row / 4, (column + 1) / 4, (row + 1) / 4))


TRAIL = [cell(0, 0), cell(0, 1)]


def planted(attention_LKN: torch.Tensor, boxes: list[Box], **fields: Any) -> dict[str, Any]:
    sample = cases.asked_about(Sample.ask("planted", [], "?", "A", boxes=boxes, **fields), 0)
    said = Generated([1], "<answer>A</answer>", [0], True, "A", True)
    read = torch.tensor([[0.1, 0.2, 0.3]] * len(attention_LKN), dtype=torch.float64)
    one = Look(sample, (Grid(4, 4),), said, attention_LKN, attention_LKN[:, 0], attention_LKN[:, 0], read)
    return _record(one, attention_LKN.shape[1])


def test_every_number_is_that_of_stock_attention(pair: Any, tmp_path: Path) -> None:
    chosen = cases.samples(tmp_path)
    records = {one["id"]: one for one in EvidenceReadout().measure(cases.model_of(pair.ours, K), Samples(chosen))}
    compared = set()
    for sample in chosen:
        right, record = cases.seen(pair, sample, K), records[sample.id]
        mean_TT = right.mean().mean(0)
        image = [float(mean_TT[slot, right.image].sum()) for slot in right.slots]
        assert record["image"] == pytest.approx(image, abs=tolerance(1e-6))
        if right.reply:  # the whole reply is content: <|lvr_end|> predicts its first token
            before = right.reply[0] - 1
            assert right.ids[before] == pair.ours.markers.end
            assert record["read"] == pytest.approx(mean_TT[before, right.slots].tolist(), abs=tolerance(1e-6))
            compared.add("read")
        for name in ("evidence", "own", "next"):
            boxes = boxes_of(sample, name, K)
            for t, own in enumerate(boxes or []):
                for layer, matrix in enumerate(right.mean()):
                    found = cases.ratio(right, matrix[right.slots[t]][right.image], own) if own else None
                    if found is None:
                        assert name not in record or record[name]["ratio"][layer][t] is None
                        continue
                    assert record[name]["target"][layer][t] == pytest.approx(found[0], abs=tolerance(1e-6))
                    assert record[name]["background"][layer][t] == pytest.approx(found[1], abs=tolerance(1e-6))
                    compared.add(name)
    assert {"evidence", "own", "next"} <= compared


@torch.no_grad()
def test_uniform_attention_prefers_nothing(fresh: Any, tmp_path: Path) -> None:
    cases.uniform(fresh)
    window = getattr(fresh.text_config, "layer_types", None) or ["full_attention"] * fresh.layers
    whole = [layer for layer, kind in enumerate(window) if kind == "full_attention"]
    found = []
    for record in EvidenceReadout().measure(cases.model_of(fresh, K), Samples(cases.samples(tmp_path))):
        for name in ("evidence", "own", "next"):
            found += [value for layer in whole for value in record.get(name, {"ratio": [[]] * 99})["ratio"][layer]]
    known = [value for value in found if value is not None]
    assert len(known) > 3 and known == pytest.approx([1] * len(known), abs=1e-4)


def test_which_box_belongs_to_which_latent() -> None:
    sample = cases.asked_about(Sample.ask("a", [], "?", "A", boxes=[*TRAIL, Box(0, (0, 0, 0, 0)), cell(1, 1)]), 0)
    own, following = boxes_of(sample, "own", 5), boxes_of(sample, "next", 5)
    assert own == [[TRAIL[0]], [TRAIL[1]], [cell(1, 1)], [cell(1, 1)], [cell(1, 1)]]
    assert following == [[TRAIL[1]], [cell(1, 1)], None, None, None]
    assert boxes_of(sample, "evidence", 2) == [[*TRAIL, cell(1, 1)]] * 2
    loose = cases.asked_about(Sample.ask("b", [], "?", "A", boxes=TRAIL, ordered=False), 0)
    single = cases.asked_about(Sample.ask("c", [], "?", "A", boxes=TRAIL[:1]), 0)
    assert boxes_of(loose, "own", 2) is None and boxes_of(single, "next", 2) is None


def test_attention_written_by_hand_has_the_exact_ratio_of_its_cells() -> None:
    """z_t puts half of its attention on cell t + 1 of a trail, the rest evenly. No model: `test_planted_latents` has
    latents that copy a token."""
    a_LKN = torch.full((2, K, 16), 0.5 / 15, dtype=torch.float64)
    for t, token in enumerate((1, 5, 5)):
        a_LKN[:, t, token] = 0.5
    record = planted(a_LKN, [*TRAIL, cell(1, 1)])
    assert record["next"]["ratio"] == [[pytest.approx(15, rel=1e-5), pytest.approx(15, rel=1e-5), None]] * 2
    background = (0.5 + 14 * 0.5 / 15) / 15
    assert record["own"]["ratio"][1][:2] == pytest.approx([0.5 / 15 / background] * 2, rel=1e-5)
    assert record["own"]["ratio"][1][2] == pytest.approx(15, rel=1e-5)
    assert record["image"] == pytest.approx([1, 1, 1]) and record["read"] == pytest.approx([0.1, 0.2, 0.3])
    everything = planted(a_LKN, [Box(0, (0, 0, 1, 1))])
    assert everything["skipped"] == NO_WINDOW and "evidence" not in everything and "own" not in everything
    summary = EvidenceReadout().summarised([record | {"id": "1"}, everything | {"id": "2"}])
    assert summary["skipped"] == {NO_WINDOW: 1} and summary["questions"] == 2
    assert summary["maps"]["next"][0][0]["ratio"]["mean"] == pytest.approx(15, rel=1e-4)
    assert summary["maps"]["next"][0][2]["ratio"] == {"mean": None, "low": None, "high": None, "pairs": 0}
    assert summary["on_latents"]["mean"] == pytest.approx(0.6) and summary["steps"][2]["read"]["pairs"] == 2


def test_figures_tables_and_the_panel_of_a_case() -> None:
    diagnostic = EvidenceReadout()
    a_LKN = torch.full((2, K, 16), 1 / 16, dtype=torch.float64)
    trail, plain = planted(a_LKN, TRAIL), planted(a_LKN, TRAIL, ordered=False)
    ordered, loose = diagnostic.summarised([trail]), diagnostic.summarised([plain])
    one = diagnostic.summarised([planted(a_LKN[:, :1], TRAIL)])  # K = 1
    assert list(loose["maps"]) == ["evidence"] and one["latents"] == 1
    for summaries, panels in (([loose], 1 + 2), ([loose, loose], 2 + 2), ([ordered, ordered], 6 + 2), ([one], 3 + 2)):
        shown = [Shown(str(place), summary, place) for place, summary in enumerate(summaries)]
        titled = [ax for ax in diagnostic.figure(shown).axes if ax.get_title(loc="left") or ax.get_title()]
        assert len(titled) == panels
        assert all(ax.lines or ax.images for ax in titled)
        assert len(list(tables_of(diagnostic.drawn(shown)))[0].rows) == len(shown)
    nothing = diagnostic.summarised([])
    assert json.dumps(nothing, allow_nan=False) and diagnostic.drawn([Shown("none", nothing)])
    assert len(diagnostic.figure([Shown("none", nothing)]).axes) == 3
    panel = diagnostic.panel(trail)
    assert panel is not None
    names = [series["name"] for series in panel.as_json()["parts"][0]["series"]]
    assert len(names) == 5 and diagnostic.panel(diagnostic.failed(Sample.ask("x", [], "?", "A"), "no")) is None
