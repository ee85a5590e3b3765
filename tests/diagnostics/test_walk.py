"""The walk of the latents: planted latents with a known answer, a model against a slow loop, and the summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from realvr.backbone import Backbone
from realvr.backbone.backbone import VisualTokens
from realvr.backbone.samples import conversation
from realvr.backbone.types import Prompt
from realvr.cli import main
from realvr.data.export import write
from realvr.data.reading import read
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.diagnostics import Samples, Shown
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.walk import Walk
from realvr.imaging.types import Grid, ImageInput
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.widgets import tables_of
from realvr.world.splits import Recipe, samples

D, K = 12, 5
GRID = Grid(4, 4)


def cell(row: int, col: int, image: int = 0, size: int = 4) -> Box:
    return Box(image, (col / size, row / size, (col + 1) / size, (row + 1) / size))


def asked(id: str, boxes: Sequence[Box], images: int = 1, **fields: Any) -> Sample:
    refs = [ImageRef.from_path(f"{number}.png") for number in range(images)]
    return Sample.ask(id, refs, "?", "7", boxes=list(boxes), **fields)


class Planted:
    """A model whose reading is given: visual tokens at random, latents at chosen tokens, slightly off."""

    latents = K

    def __init__(self, grids: dict[str, list[Grid]], tokens: dict[str, list[int]]) -> None:
        self.grids, self.tokens = grids, tokens

    def read(self, chosen: Sequence[Sample]) -> Reading:
        generator = torch.Generator().manual_seed(4)
        reading, features, spans = Reading(), [], []
        for sample in chosen:
            grids = self.grids[sample.id]
            inputs = tuple(ImageInput(torch.zeros(1), grid, str(n), str(n)) for n, grid in enumerate(grids))
            reading.samples.append(sample)
            reading.prompts.append(Prompt(torch.zeros(1, dtype=torch.long), inputs))
            own = torch.randn(sum(grid.tokens for grid in grids), D, generator=generator)
            features.append(own)
            noise = torch.randn(K, D, generator=generator)
            spans.append(3 * own[self.tokens[sample.id]] + 0.05 * noise)
        all_grids = tuple(image.grid for prompt in reading.prompts for image in prompt.images)
        reading.visual = VisualTokens(torch.cat(features), (), all_grids)
        reading.latents_RKD = torch.stack(spans)
        return reading


def measured(chosen: Sequence[Sample], grids: dict[str, list[Grid]], tokens: dict[str, list[int]]) -> dict[str, Any]:
    model = cast(Model, Planted(grids, tokens))
    return {record["id"]: record for record in Walk().measure(model, Samples(chosen))}


def test_planted_walks_have_a_known_answer() -> None:
    """A trail with one latent astray, boxes without an order, two pictures of which one is shown twice, tiles."""
    tiled = Grid(2, 2, 1, 2, thumbnail=True)  # 2 x 4 places, then 4 tokens of the thumbnail
    twice = asked("twice", [cell(1, 1, 1), cell(2, 2, 0)], images=2)
    twice = replace(twice, turns=[Message("user", "?", (0, 1, 0))])
    chosen = [
        asked("trail", [cell(0, 0), cell(0, 1), cell(1, 1)], tags={"arrows": "2"}),
        asked("any order", [cell(0, 0), cell(3, 3)], ordered=False),
        twice,
        asked("tiles", [Box(0, (0.5, 0.0, 0.75, 0.5)), Box(0, (0.0, 0.0, 1.0, 1.0))]),
        asked("unshown", [cell(0, 0, 1)], images=2),
    ]
    chosen[-1] = replace(chosen[-1], turns=[Message("user", "?", (0,))])
    found = measured(
        chosen,
        {"trail": [GRID], "any order": [GRID], "twice": [GRID, GRID, GRID], "tiles": [tiled]},
        {
            "trail": [0, 1, 5, 5, 4],
            "any order": [15, 0, 0, 7, 15],
            # Pictures 0, 1, 0: the second showing of cell (2, 2) starts at token 32, and the first is the nearest.
            "twice": [16 + 5, 32 + 10, 10, 32 + 5, 16 + 10],
            "tiles": [4, 0, 11, 7, 2],
        },
    )
    trail = found["trail"]
    assert trail["nearest"] == [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert trail["inside"] == [True, True, True, True, False] == trail["evidence"] and trail["boxes"] == 3
    assert trail["chance"] == [1 / 16] * 5 and trail["chance_evidence"] == 3 / 16 and trail["group"] == "2"
    assert min(trail["cosine"][:4]) > 0.98 and trail["cosine"][4] < 0.9
    assert found["any order"]["inside"] == [True, True, True, False, True] and found["any order"]["boxes"] == 1
    assert found["any order"]["chance"] == [2 / 16] * 5
    assert found["twice"]["inside"] == [True, True, True, False, False]
    assert found["twice"]["evidence"] == [True, True, True, False, False]
    assert [place[0] for place in found["twice"]["nearest"]] == [1, 2, 0, 2, 1]
    assert found["twice"]["chance"] == [1 / 48, *[2 / 48] * 4]
    assert found["tiles"]["nearest"][0] == [0, 0, 2] and found["tiles"]["thumbnail"] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert found["tiles"]["inside"] == [True] * 5 and found["tiles"]["chance"] == [1 / 8, 1, 1, 1, 1]
    assert "box 1 is on image 1" in found["unshown"]["error"]


def test_a_latent_in_an_earlier_box_is_in_the_evidence_only() -> None:
    found = measured([asked("late", [cell(0, 0), cell(0, 1)])], {"late": [GRID]}, {"late": [0, 0, 1, 0, 9]})["late"]
    assert found["inside"] == [True, False, True, False, False]
    assert found["evidence"] == [True, True, True, True, False]


def record(id: str, inside: list[bool], boxes: int, group: str, cosine: float = 0.5) -> dict[str, Any]:
    count = len(inside)
    return {
        "id": id,
        "latents": count,
        "group": group,
        "boxes": boxes,
        "inside": inside,
        "evidence": [True] * count,
        "chance": [0.1] * count,
        "chance_evidence": 0.4,
        "cosine": [cosine] * count,
        "nearest_cosine": [0.9] * count,
        "thumbnail": [False] * count,
        "error": None,
    }


def test_the_summary_of_records() -> None:
    yes, no = True, False
    records = [
        record("a", [yes, yes, yes, yes], 2, "1", 1.0),
        record("b", [yes, no, no, no], 3, "2"),
        record("c", [yes, yes, no, no], 9, "10"),
        {"id": "d", "error": "broken"},
    ]
    walk = Walk()
    found = walk.summarise(records)
    assert found["questions"] == 3 and found["latents"] == 4 and found["longer"] == 1
    assert found["inside"]["mean"] == pytest.approx((1 + 0.25 + 0.5) / 3)
    assert found["inside"]["low"] < found["inside"]["mean"] < found["inside"]["high"] and found["inside"]["pairs"] == 3
    assert found["on_the_way"]["mean"] == pytest.approx((1 + 1 / 3 + 0.5) / 3)
    assert found["at_the_end"]["mean"] == pytest.approx((1 + 0) / 2) and found["at_the_end"]["pairs"] == 2
    assert (found["whole"]["count"], found["whole"]["of"]) == (1, 3)
    assert found["cosine"]["mean"] == pytest.approx(2 / 3) and found["chance"]["mean"] == pytest.approx(0.1)
    assert [step["inside"]["count"] for step in found["steps"]] == [3, 2, 1, 1]
    assert list(found["groups"]) == ["1", "2", "10"]  # by value, not as texts
    assert found["groups"]["10"]["inside"]["mean"] == 0.5
    notes = walk.notes(records, found, 4)
    assert any("1 of 4 questions cannot be read" in line for line in notes)
    assert any("1 of 3 questions have more boxes than K = 4" in line for line in notes)
    widgets = walk.drawn([Shown("one", found, 0), Shown("two", walk.summarise(records[:1]), 1)])
    tables = list(tables_of(widgets))
    assert [table.caption for table in tables] == ["Latents in their boxes", "By arrows", "By step"]
    assert [len(table.rows) for table in tables] == [2, 4, 8]
    figures = str(widgets[0])
    assert "chance" in figures and "one 1: 100.0, 2: 66.7, 3: 33.3, 4: 33.3" in figures
    assert walk.drawn([Shown("none", walk.summarise([]), 0)])  # nothing could be read: tables of dashes


def test_other_groups_or_none() -> None:
    plain = [record("a", [True], 1, ""), record("b", [False], 1, "")]
    found = Walk().summarise(plain)
    assert found["groups"] == {} and found["by"] == "arrows"
    assert len(list(tables_of(Walk().drawn([Shown("m", found, 0)])))) == 2
    words = [record("a", [True], 1, "end"), record("b", [False], 1, "turn")]
    found = Walk.configure({"by": "kind"}).summarise(words)
    assert list(found["groups"]) == ["end", "turn"]
    assert "By kind" in [table.caption for table in tables_of(Walk().drawn([Shown("m", found, 0)]))]


def _nearest(z: list[float], tokens: list[list[float]]) -> int:
    cosines = [sum(a * b for a, b in zip(z, v, strict=True)) / math.hypot(*z) / math.hypot(*v) for v in tokens]
    return int(np.argmax(cosines))


def test_a_model_on_trails_against_a_loop(
    tmp_path: Path,
    build_tiny: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the command line to records, one question and one product at a time on the other side."""
    monkeypatch.setenv("COLUMNS", "240")  # the table names the model's folder, whose path is long
    plain = Backbone.load(build_tiny("internvl3"), device="cpu")
    plain.latents = 8
    model, data, out = str(plain.save(tmp_path / "model")), tmp_path / "samples.jsonl", tmp_path / "out"
    write(samples(Recipe("trails", seed=1, count=5)), "jsonl", data)
    assert main(["diagnose", "walk", model, str(data), "--out", str(out), "--batch", "2", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "chance, %" in shown and "whole" in shown
    found = [json.loads(line) for line in (out / "walk.jsonl").read_text().splitlines()]
    backbone = Backbone.load(model, device="cpu")
    for sample, one in zip(read(data), found, strict=True):
        prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
        done = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=1), latents=8)
        features = backbone.encode_images(prompt.images).features_ND.double().tolist()
        grid = prompt.images[0].grid
        assert not grid.thumbnail
        inside = []
        for t, z in enumerate(done.latents_BKD[0].double().tolist()):
            row, col = divmod(_nearest(z, features), grid.cols)
            assert one["nearest"][t] == [0, row, col]
            x0, y0, x1, y1 = sample.boxes[min(t, len(sample.boxes) - 1)].xyxy
            inside.append(x0 < (col + 1) / grid.cols - 1e-9 and col / grid.cols < x1 - 1e-9
                          and y0 < (row + 1) / grid.rows - 1e-9 and row / grid.rows < y1 - 1e-9)  # fmt: skip
        assert one["inside"] == inside and one["group"] == sample.tags["arrows"]
    summary = json.loads((out / "walk.json").read_text())
    assert summary["inside"]["mean"] == pytest.approx(np.mean([np.mean(one["inside"]) for one in found]))


def test_a_model_without_a_span_is_refused(
    tmp_path: Path, build_tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "samples.jsonl"
    write(samples(Recipe("trails", seed=1, count=2)), "jsonl", data)
    words = ["diagnose", "walk", str(build_tiny("internvl3")), str(data), "--out", str(tmp_path / "out")]
    assert main([*words, "--device", "cpu"]) == 2
    assert "span" in capsys.readouterr().err
