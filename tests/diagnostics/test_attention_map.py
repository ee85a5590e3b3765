"""The binned map: against loops over stock attention, rows that sum to one, evidence by bin, the figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_cases as cases
from helpers import tolerance
from realvr.backbone.samples import conversation
from realvr.data.sample import Sample
from realvr.data.wording import question_text
from realvr.diagnostics import Samples, Shown
from realvr.diagnostics.attention_map import AttentionMap, labels
from realvr.diagnostics.measuring.binning import cut, question_columns
from realvr.widgets import tables_of

K = 3
BINS = {"image_bins": 4, "question_bins": 3, "answer_bins": 2}


def runs(columns: list[int], count: int) -> list[list[int]]:
    """Almost equal runs, by walking through the columns: column i of n is in bin b where b n <= count i < (b + 1) n,
    up to where runs begin."""
    starts = [place * len(columns) // count for place in range(count)] + [len(columns)]
    return [columns[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def test_the_map_is_that_of_stock_attention(pair: Any, tmp_path: Path) -> None:
    chosen = cases.samples(tmp_path)
    diagnostic = AttentionMap.configure(BINS)
    for latents in (K, 0):
        records = {one["id"]: one for one in diagnostic.measure(cases.model_of(pair.ours, latents), Samples(chosen))}
        for sample in chosen[: 3 if latents else 1]:
            right, record = cases.seen(pair, sample, latents), records[sample.id]
            prompt = pair.ours.prompt(conversation(sample, [image.open() for image in sample.images]))
            asked, found = question_columns(pair.ours, prompt, sample)
            text = pair.ours.tokenizer.decode([right.ids[place] for place in asked])
            assert found and record["question_found"] and question_text(sample) in text
            assert len(text) < len(question_text(sample)) + 12  # nothing but what shares a token with it
            bins = runs(right.image, 4) + runs(asked, 3) + [[slot] for slot in right.slots] + runs(right.reply, 2)
            assert record["sizes"] == [len(own) for own in bins] and record["bins"] == [4, 3, latents, 2]
            mean_TT = right.mean().mean(0)
            for query, queries in enumerate(bins):
                for key, keys in enumerate(bins):
                    expected = sum(float(mean_TT[i, j]) for i in queries for j in keys) / max(len(queries), 1)
                    assert record["mass"][query][key] == pytest.approx(expected, abs=tolerance(1e-5))
        summary = diagnostic.summarised(list(records.values()))
        for row, omitted in zip(summary["map"], summary["omitted"], strict=True):
            if omitted["pairs"]:
                known = [cell["mean"] for cell in row if cell is not None]
                assert sum(known) == pytest.approx(1, abs=1e-4) and 0 < omitted["mean"] < 1
        assert summary["labels"] == labels([4, 3, latents, 2]) and len(summary["map"]) == 9 + latents
        assert (summary["links"]["answer_on_latents"]["mean"] is None) == (latents == 0)


def record_of(number: int, mass: list[list[float]], **fields: Any) -> dict[str, Any]:
    base = {"id": str(number), "latents": 1, "bins": [2, 1, 1, 1], "sizes": [4, 4, 3, 1, 2], "correct": True}
    return base | {"mass": mass, "evidence": None, "question_found": True, "error": None} | fields


LOW = [
    [0.5, 0.0, 0.0, 0.0, 0.0],
    [0.2, 0.2, 0.0, 0.0, 0.0],
    [0.1, 0.1, 0.6, 0.0, 0.0],
    [0.3, 0.1, 0.1, 0.3, 0.0],
    [0.1, 0.1, 0.1, 0.4, 0.1],
]


def test_rows_links_and_marks_by_hand() -> None:
    records = [record_of(1, LOW, evidence=[1.0, 0.0]), record_of(2, LOW, evidence=[0.5, 0.5])]
    diagnostic = AttentionMap.configure({"image_bins": 2, "question_bins": 1, "answer_bins": 1})
    summary = diagnostic.summarised(records)
    means = [[None if cell is None else cell["mean"] for cell in row] for row in summary["map"]]
    assert means[0] == [1.0, None, None, None, None] and means[1][:2] == [0.5, 0.5]
    assert means[3][:4] == pytest.approx([0.375, 0.125, 0.125, 0.375])
    assert [one["mean"] for one in summary["omitted"]] == pytest.approx([0.5, 0.6, 0.2, 0.2, 0.2])
    assert summary["marked"] == [True, False] and summary["evidence"][0]["mean"] == 0.75
    links = {name: one["mean"] for name, one in summary["links"].items()}
    assert links["latents_on_image"] == pytest.approx(0.4) and links["answer_on_latents"] == pytest.approx(0.4)
    assert links["answer_on_image"] == pytest.approx(0.2) and links["answer_on_question"] == pytest.approx(0.1)
    assert links["evidence_share"] == pytest.approx((0.75 + 1) / 2)
    assert links["evidence_even"] == pytest.approx((0.5 + 1) / 2)


def test_an_empty_bin_has_no_row_and_two_way_images_keep_theirs() -> None:
    short = record_of(1, [*LOW[:4], [0.0] * 5], sizes=[4, 4, 3, 1, 0])
    two_way = record_of(2, [[0.3, 0.3, 0.0, 0.0, 0.0], *LOW[1:]])
    diagnostic = AttentionMap()
    summary = diagnostic.summarised([short, two_way])
    assert summary["map"][4][0]["pairs"] == 1 and summary["omitted"][4]["pairs"] == 1
    assert summary["map"][0][1]["mean"] == 0.25 and summary["map"][0][0]["mean"] == 0.75
    assert summary["map"][1][4] is None and not any(summary["marked"])
    assert any("no sample has evidence boxes" in note for note in diagnostic.notes([], summary, 2))
    lost = diagnostic.summarised([record_of(1, LOW, question_found=False)])
    assert any("was not found" in note for note in diagnostic.notes([], lost, 1))


def test_runs_cover_every_column_once() -> None:
    assert cut(range(5), 2) == [[0, 1], [2, 3, 4]]
    assert sum(cut(range(3), 4), []) == [0, 1, 2] and [] in cut(range(3), 4)
    assert cut([], 3) == [[], [], []]


def test_one_panel_for_each_model_and_a_matrix_for_each_case() -> None:
    diagnostic = AttentionMap()
    summary = diagnostic.summarised([record_of(1, LOW, evidence=[1.0, 0.0])])
    nothing = diagnostic.summarised([])
    json.dumps([summary, nothing], allow_nan=False)
    for shown in ([Shown("a", summary)], [Shown("a", summary), Shown("b", summary, 1)], [Shown("none", nothing)]):
        figure = diagnostic.figure(shown)
        titled = [ax for ax in figure.axes if ax.get_title(loc="left") or ax.get_title()]
        assert len(titled) == len(shown)
        for one, ax in zip(shown, titled, strict=True):
            marked = [tick.get_text() for tick in ax.get_xticklabels() if tick.get_text().endswith("*")]
            assert marked == (["I1*"] if one.summary["questions"] else [])
            assert len(ax.patches) == (2 if one.summary["questions"] else 0)
        assert len(list(tables_of(diagnostic.drawn(shown)))) == 1 + len(shown)
    panel = diagnostic.panel(record_of(1, LOW))
    assert panel is not None and panel.as_json()["parts"][0]["rows"] == ["I1", "I2", "Q1", "z1", "A1"]
    assert diagnostic.panel(diagnostic.failed(Sample.ask("x", [], "?", "A"), "no")) is None


def test_no_picture_and_a_reply_without_tokens(backbone: Any) -> None:
    sample = Sample.ask("text", [], "Count to three.", "3")
    (record,) = AttentionMap().measure(cases.model_of(backbone, 0), Samples([sample]))
    assert record["sizes"][:8] == [0] * 8 and record["evidence"] is None
    summary = AttentionMap().summarised([record])
    assert summary["map"][0] == [None] * 16 and summary["omitted"][0]["mean"] is None
    assert torch.tensor([cell["mean"] for cell in summary["map"][11] if cell]).sum() == pytest.approx(1)
