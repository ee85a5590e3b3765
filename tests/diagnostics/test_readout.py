"""Readout against correctness: on small models of every family against stock attention; its numbers by hand; the
command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from helpers import DEVICE, tolerance
from pair_cases import world_samples
from pair_reference import greedy, question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Source
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.readout import Readout, group_of
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling

K, NEW = 3, 5
SHORT = Sampling(temperature=0.0, max_new=NEW)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_the_readout_is_the_stock_attention_of_the_generated_answer(pair: Any) -> None:
    """Two questions in one batch; the replies of these models have no answer block, so every token of them counts."""
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:2]
    chosen[1] = replace(chosen[1], turns=[replace(chosen[1].turns[0], text="A longer question: what is it, please?")])
    model = Model(ModelResponder(pair.ours, SHORT), K)
    records = {record["id"]: record for record in Readout().measure(model, Samples(chosen))}
    for sample in chosen:
        begun, _ = pair.think(pair.begin([pair.ours.prompt([question(sample)])]), K)
        ids = greedy(pair, begun, NEW)
        slots = (begun.ids[0] == pair.ours.markers.slot).nonzero()[:, 0]
        longer = reference.append(pair.stock, begun, torch.tensor([ids], device=DEVICE))
        eager = reference.attentions(pair.stock, longer)  # (L, 1, H, T, T)
        rows = [begun.ids.shape[1] + place for place in range(len(ids))]
        right = eager[:, 0][:, :, rows][..., slots].double().mean((0, 1, 2))
        record = records[sample.id]
        assert record["content"] == len(ids) and not record["block"] and record["correct"] is False
        assert record["readout"] == pytest.approx(right.tolist(), abs=tolerance(2e-6))
        assert sum(record["readout"]) > 1e-3


# ---------------------------------------------------------------------- numbers by hand


def record(name: str, correct: bool, readout: list[float] | None, group: str = "a") -> dict[str, Any]:
    said = "A" if correct else None
    more = {"latents": 2, "extracted": said, "correct": correct, "block": True, "content": 1, "readout": readout}
    return {"id": name, "group": group, **more, "error": None}


RECORDS = [
    record("1", True, [0.1, 0.3]),
    record("2", True, [0.2, 0.2]),
    record("3", False, [0.1, 0.0]),
    record("4", False, None),
    record("5", True, [0.5, 0.1], "b"),
    {"id": "6", "error": "gone"},
]


def test_deltas_by_hand() -> None:
    found = Readout().summarise(RECORDS)
    first, second, whole = (found["groups"][name] for name in ("a", "b", "all"))
    assert (found["empty"], found["errors"], found["latents"]) == (1, 1, 2)
    assert (first["accuracy"]["count"], first["accuracy"]["of"]) == (2, 4) and first["parsed"]["count"] == 2
    assert first["mass"]["delta"]["mean"] == pytest.approx(0.4 - 0.1)
    assert first["top1"]["delta"]["mean"] == pytest.approx((0.75 + 0.5) / 2 - 1)
    assert first["peak"]["delta"]["mean"] == pytest.approx(0.25 - 0.1)
    assert first["mass"]["delta"]["pairs"] == 3 and first["reason"] is None
    assert [one["mean"] for one in first["slots"]["correct"]] == pytest.approx([0.15, 0.25])
    assert second["mass"]["delta"] == {"mean": None, "low": None, "high": None, "pairs": 1}
    assert second["reason"] == "all answers are right" and second["accuracy"]["rate"] == 1.0
    assert whole["mass"]["correct"]["pairs"] == 3 and whole["mass"]["delta"]["mean"] == pytest.approx(1.4 / 3 - 0.1)


def test_without_right_or_wrong_answers_there_is_no_delta_and_a_reason() -> None:
    cases = [
        ([record("1", False, [0.1, 0.2])], "all answers are wrong"),
        ([record("1", True, [0.1, 0.2])], "all answers are right"),
        ([record("1", True, [0.1, 0.2]), record("2", False, None)], "no wrong answer has a readout"),
        ([], "there is no question"),
    ]
    for records, reason in cases:
        summary = Readout().summarise(records)
        (found,) = summary["groups"].values()
        assert found["reason"] == reason and found["mass"]["delta"]["mean"] is None
        assert any(reason in line for line in Readout().notes(records, summary, len(records)))
        shown = Shown("model", summary)
        assert reason in str(Readout().drawn([shown]))
        figure = Readout().figure([shown])
        assert figure is not None and "none" in [text.get_text().strip() for text in figure.axes[0].texts]


def test_the_interval_covers_a_known_difference() -> None:
    """Right answers read twice as much; the interval resamples both groups and narrows with them."""
    generator = torch.Generator().manual_seed(0)

    def many(count: int) -> list[dict[str, Any]]:
        noise = (0.02 * torch.randn(2 * count, generator=generator)).tolist()
        return [record(str(n), n < count, [(0.2 if n < count else 0.1) + noise[n], 0.0]) for n in range(2 * count)]

    wide, narrow = (Readout().summarise(many(n))["groups"]["a"]["mass"]["delta"] for n in (10, 1000))
    assert narrow["low"] < 0.1 < narrow["high"]
    assert 0.5 * 4 * 0.02 * (2 / 1000) ** 0.5 < narrow["high"] - narrow["low"] < 2 * 4 * 0.02 * (2 / 1000) ** 0.5
    assert wide["high"] - wide["low"] > 4 * (narrow["high"] - narrow["low"])


def test_figure_panel_and_groups() -> None:
    summary = Readout().summarise(RECORDS)
    figure = Readout().figure([Shown("one", summary), Shown("two", summary, 1)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[2].lines) == 4
    panel = Readout().panel(RECORDS[0])
    assert panel is not None and panel.as_json()["parts"][0]["series"][0]["values"] == [0.1, 0.3]
    assert Readout().panel(RECORDS[3]) is None and Readout().panel(RECORDS[5]) is None
    sample = replace(world_samples(1)[0], source=Source("x/blink.parquet", 3), category="art")
    assert group_of(sample, "task") == sample.task != "" and group_of(sample, "source") == "blink"
    assert group_of(replace(sample, task=""), "task") == "blink" and group_of(sample, "category") == "art"
    assert group_of(sample, "view") == "original" and group_of(sample, "no such tag") == "none"


# ---------------------------------------------------------------------- the command


def test_the_command_and_what_it_refuses(
    build_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = Backbone.load(build_tiny("gemma3"), dtype=torch.float32, device="cpu")
    backbone.latents = 1
    small = backbone.save(tmp_path / "small")
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    write(iter(world_samples(2)), "jsonl", data)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert rows[0]["tags"]["view"] == "original"
    rows[0]["images"] = ["gone.png"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(data), "--out", str(out), "--max-new", "3", "--device", "cpu"]
    assert main(["diagnose", "readout", str(build_tiny("gemma3")), *given]) == 2
    assert "has no trained latent span" in capsys.readouterr().err and not out.exists()
    assert main(["diagnose", "readout", str(small), *given, "--by", "edit"]) == 0
    assert "1 of 8 questions cannot be read" in capsys.readouterr().err
    summary = json.loads((out / "readout.json").read_text())
    assert len(summary["groups"]) == 5 and summary["errors"] == 1
    assert summary["groups"]["all"]["reason"] == "all answers are wrong"  # K = 1: the whole mass is on the one slot
    assert summary["groups"]["all"]["top1"]["incorrect"]["mean"] == 1.0
    assert (out / "readout.svg").stat().st_size > 2000
