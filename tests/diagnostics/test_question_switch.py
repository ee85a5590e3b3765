"""Two questions about one picture: which samples belong together, densities against stock attention, the summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attention_cases as cases
from helpers import tolerance
from realvr.data.export import write
from realvr.data.sample import Box, ImageRef, Sample
from realvr.diagnostics import DiagnoseSettings, Samples, Shown, diagnose
from realvr.diagnostics.parts import Skip
from realvr.diagnostics.question_groups import groups
from realvr.diagnostics.question_switch import QuestionSwitch, _region
from realvr.widgets import tables_of
from realvr.world.splits import Recipe
from realvr.world.splits import samples as drawn

K = 3
ONE, TWO = Box(0, (0.0, 0.0, 0.4, 0.4)), Box(0, (0.5, 0.5, 1.0, 1.0))


def four(folder: Path) -> list[Sample]:
    """Q1, Q2, Q1', Q2' about one picture, saved twice in different files."""
    image = cases.samples(folder)[0].images[0]
    copy = folder / "copy.png"
    image.open().save(copy, compress_level=1)
    again = ImageRef.from_path(copy)
    return [
        Sample.ask("q1", [image], "What is at the top?", "red", boxes=[ONE]),
        Sample.ask("q2", [again], "What is at the bottom?", "blue", boxes=[TWO]),
        Sample.ask("q1b", [image], "Which thing is above?", "red", boxes=[ONE]),
        Sample.ask("q2b", [image], "Which thing is below?", "blue", boxes=[TWO]),
    ]


def test_which_samples_belong_together(tmp_path: Path) -> None:
    q1, q2, q1b, q2b = four(tmp_path)
    other = cases.samples(tmp_path)[1]
    third = replace(q1, id="third", boxes=[Box(0, (0.0, 0.6, 0.2, 0.9))])
    same = replace(q1, id="same")  # the same words again
    bare, wide = replace(q1, id="bare", boxes=[]), replace(q2, id="wide", turns=q2b.turns, answer="green")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = replace(q1, id="broken", images=[ImageRef.from_path(tmp_path / "broken.png")])
    found = groups([other, bare, q1, same, q2, broken, third, q1b, wide, q2b])
    assert {name: (one.question, one.wording) for name, one in found.items()} == {
        "q1": (1, 1),
        "q1b": (1, 2),
        "q2": (2, 1),
        "q2b": (2, 2),
    }
    assert {one.boxes for one in found.values()} == {((ONE,), (TWO,))} and len({o.picture for o in found.values()}) == 1
    assert groups([q1, q1b]) == {} and groups([q1, other]) == {} and groups([]) == {}
    with pytest.raises(Skip, match="two questions with different evidence boxes"):
        QuestionSwitch().select([q1, q1b, other], Path("some.jsonl"))
    assert QuestionSwitch().select([other, q2, q1], Path("some.jsonl")) == [q2, q1]


@pytest.mark.parametrize("latents", [K, 0])
def test_densities_are_those_of_stock_attention(pair: Any, tmp_path: Path, latents: int) -> None:
    chosen = four(tmp_path)[: 4 if latents else 2]
    diagnostic = QuestionSwitch()
    model = cases.model_of(pair.ours, latents)
    diagnostic.prepare(model, chosen)
    records = {record["id"]: record for record in diagnostic.measure(model, Samples(chosen))}
    for sample in chosen[:2]:
        right, record = cases.seen(pair, sample, latents), records[sample.id]
        queries = [*right.slots, *([right.reply[0] - 1] if right.reply else [])]
        if not queries:
            assert record["skipped"]
            continue
        a_N = right.mean().mean(0)[queries][:, right.image].mean(0)
        (grid,) = right.grids
        token = cases.places(grid)
        average = sum(float(a_N[number]) for number in token.values()) / len(token)
        rows, columns = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols
        for place, box in enumerate((ONE, TWO)):
            inside = cases.cells([box], 0, rows, columns)
            expected = sum(float(a_N[token[cell]]) for cell in inside) / len(inside) / average
            assert record["density"][place] == pytest.approx(expected, abs=tolerance(1e-4))
        for (row, column), number in token.items():
            expected = float(a_N[number]) / average
            assert record["maps"][0][row][column] == pytest.approx(expected, rel=6e-3, abs=tolerance(1e-5))
    panel = diagnostic.panel(records["q1"])
    assert panel is not None and panel.as_json()["parts"][0]["kind"] == "overlay"


@torch.no_grad()
def test_uniform_attention_has_density_one(fresh: Any, tmp_path: Path) -> None:
    cases.uniform(fresh)
    if fresh.windowed:
        fresh.text_config.layer_types = ["full_attention"] * fresh.layers
        for layer in fresh.decoder.layers:
            layer.self_attn.sliding_window = None
    chosen, diagnostic, model = four(tmp_path), QuestionSwitch(), cases.model_of(fresh, K)
    diagnostic.prepare(model, chosen)
    records = list(diagnostic.measure(model, Samples(chosen)))
    values = [value for record in records for value in record["density"]]
    assert values == pytest.approx([1.0] * 8, abs=2e-3)
    summary = diagnostic.summarised(records)
    assert summary["selection"]["mean"] == pytest.approx(0, abs=2e-3)


def record_of(picture: str, question: int, wording: int, density: list[float], **fields: Any) -> dict[str, Any]:
    base = {"id": f"{picture}-{question}-{wording}", "picture": picture, "question": question, "wording": wording}
    more = {"text": "?", "latents": K, "correct": wording == 1, "skipped": None, "error": None, "density": density}
    shown = {"maps": [[[1.0, 2.0], [0.5, 0.5]]], "boxes": [[[0, 0, 0.5, 0.5]], [[0.5, 0.5, 1, 1]]]}
    return base | more | shown | fields


def test_regions_by_hand() -> None:
    records = [
        record_of("a", 1, 1, [3.0, 0.5]),
        record_of("a", 1, 2, [2.0, 0.5]),
        record_of("a", 2, 1, [1.0, 1.5]),
        record_of("a", 2, 2, [1.0, 1.25]),
        record_of("b", 1, 1, [1.0, 2.0]),
        record_of("b", 2, 1, [2.0, 1.0]),
        record_of("c", 1, 1, [9.0, 9.0]),
        record_of("d", 1, 1, [], skipped="no attention"),
    ]
    diagnostic = QuestionSwitch()
    summary = diagnostic.summarised(records)
    assert summary["pictures"] == 2 and summary["incomplete"] == 1 and summary["questions"] == 7
    assert summary["question"]["mean"] == pytest.approx((3 + 1.5 + 1 + 1) / 4) and summary["question"]["pairs"] == 2
    assert summary["other"]["mean"] == pytest.approx((1 + 0.5 + 2 + 2) / 4)
    assert summary["paraphrase"]["mean"] == pytest.approx((2 + 1.25) / 2)
    assert summary["selection"]["mean"] == pytest.approx(((2 + 1) / 2 + (-1 - 1) / 2) / 2)
    assert summary["paraphrase_gap"]["mean"] == pytest.approx((1 + 0.25) / 2)
    assert summary["follows"]["count"] == 1 and summary["follows"]["of"] == 2
    assert summary["example"]["picture"] == "a" and [m["name"] for m in summary["example"]["maps"]] == [
        "Q1",
        "Q1′",
        "Q2",
        "Q2′",
    ]
    found = {(one["question"], one["wording"]): one for one in records[:4]}
    assert _region(found, 1) == {"question": 3.0, "other": 1.0, "paraphrase": 2.0}
    assert _region(found, 2) == {"question": 1.5, "other": 0.5, "paraphrase": 1.25}
    notes = " ".join(diagnostic.notes(records, summary, 8))
    assert "1 pictures lack" in notes and "1 of 8 questions" in notes
    alone = diagnostic.summarised([one for one in records if one["picture"] == "b"])
    assert alone["paraphrase"]["mean"] is None and "no question has a paraphrase" in diagnostic.notes([], alone, 2)[0]
    nothing = diagnostic.summarised([])
    json.dumps([summary, alone, nothing], allow_nan=False)
    for summaries in ([summary], [summary, alone], [nothing]):
        shown = [Shown(str(place), one, place) for place, one in enumerate(summaries)]
        figure = diagnostic.figure(shown)
        titled = [ax for ax in figure.axes if ax.get_title(loc="left") or ax.get_title()]
        assert len(titled) == 5 * len(shown)
        maps = [ax.images[0] for ax in titled if ax.images]
        assert len({image.get_clim() for image in maps}) <= 1  # one scale
        assert len(maps) == sum(len(one["example"]["maps"]) for one in summaries if one["example"])
        assert len(list(tables_of(diagnostic.drawn(shown)))[0].rows) == len(shown)


def test_intervals_are_over_pictures_not_over_their_regions() -> None:
    """Alike regions of a picture say the same twice, opposite ones nothing about other pictures."""
    alike, opposite = [], []
    for number in range(12):
        high = 1.0 + number % 2
        for question in (1, 2):
            for wording in (1, 2):
                own, other = high + 0.5 * (wording == 2) * high, 0.5 * high
                density = [own, other] if question == 1 else [other, own]
                alike.append(record_of(str(number), question, wording, density))
                density = [1.0, 7.0] if question == 1 else [5.0, 3.0]
                opposite.append(record_of(str(number), question, wording, density))
    found = QuestionSwitch().summarised(alike)
    rng = np.random.default_rng(3)
    drawn = np.mean(rng.choice([1.0, 2.0], (4000, 12)), axis=1)
    for name, scale in (("question", 1.0), ("other", 0.5), ("paraphrase", 1.5), ("paraphrase_gap", 0.5)):
        assert found[name]["pairs"] == 12 and found[name]["mean"] == pytest.approx(1.5 * scale)
        ends = [found[name]["low"] / scale, found[name]["high"] / scale]
        assert ends == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.05)
    found = QuestionSwitch().summarised(opposite)
    for name, value in (("question", 2.0), ("paraphrase", 2.0), ("other", 6.0)):
        assert [found[name][end] for end in ("low", "mean", "high")] == pytest.approx([value] * 3)


def test_the_world_supplies_them(build_tiny: Any, tmp_path: Path) -> None:
    data = tmp_path / "samples.jsonl"
    write(drawn(Recipe("trails", seed=1, count=2, kinds=("switch",))), "jsonl", data)
    settings = DiagnoseSettings(str(build_tiny("internvl3")), data, tmp_path / "out", batch=3, max_new=2, device="cpu")
    found = diagnose(["question-switch"], settings)["question-switch"]
    assert found["pictures"] == 2 and found["questions"] == 8 and found["paraphrase"]["pairs"] == 2
    assert (tmp_path / "out" / "question-switch.svg").stat().st_size > 1000
    data.write_text(data.read_text().splitlines()[0] + "\n")
    with pytest.raises(Skip, match="kinds switch"):
        diagnose(["question-switch"], replace(settings, out=tmp_path / "other"))
