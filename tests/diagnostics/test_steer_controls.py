"""Steering by an edited picture and to any region, on small models of every family against stock models; the random
direction, distances and figures; the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import reference
from helpers import tolerance
from pair_reference import greedy, question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Box, ImageRef, Sample
from realvr.diagnostics.measuring.reading import read_samples
from realvr.diagnostics.measuring.steer import SteerOptions, steer_samples
from realvr.diagnostics.measuring.steer_edit import NO_REGION, OTHER_GRID, edited_region, steer_pairs
from realvr.diagnostics.measuring.steer_region import NO_AREA, NO_ROOM, Regions, region_at, steer_regions
from realvr.diagnostics.pairs import Pair, pair_up
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.steer import Steer
from realvr.diagnostics.steer_edit import EditSettings, SteerEdit
from realvr.diagnostics.steer_moves import Move, box_distance, control_seed
from realvr.diagnostics.steer_region import SteerRegion
from realvr.diagnostics.steer_summary import distance_bin, summarise_steer
from realvr.imaging.types import Grid
from realvr.latent.sampling import Sampling
from realvr.maths.injection import random_direction
from realvr.world.splits import Recipe, samples

K, NEW = 4, 2
OPTIONS = SteerOptions(latents=K, steps=(2,), sampling=Sampling(temperature=0.0, max_new=NEW))


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def trails(count: int) -> list[Sample]:
    return list(samples(Recipe("trails", seed=1, count=count)))


def trail_pairs(count: int) -> list[Pair]:
    pairs, _ = pair_up(samples(Recipe("trails-pairs", seed=1, count=count)))
    return [pair for pair in pairs if pair.changed]


def slow(pair: Any, sequence: Any, put: dict[int, Tensor]) -> tuple[Any, Tensor]:
    """The span with a vector put at a step: every step runs the whole sequence through the stock model."""
    markers = pair.ours.markers
    sequence, fed = reference.append(pair.stock, sequence, pair.column(1, markers.start)), []
    for step in range(1, K + 1):
        fed.append(put.get(step, reference.hidden(pair.stock, sequence)[0, -1]))
        sequence = reference.append(pair.stock, sequence, pair.column(1, markers.slot), embeds=fed[-1][None, None])
    return reference.append(pair.stock, sequence, pair.column(1, markers.end)), torch.stack(fed)


def pixels_of(grid: Grid, token: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Pixels (x0, y0, x1, y1) that a visual token shows, tiles side by side; nothing for a thumbnail's."""
    tile, inside = divmod(token, grid.rows * grid.cols)
    if tile >= grid.tile_rows * grid.tile_cols:
        return 0, 0, 0, 0
    row = tile // grid.tile_cols * grid.rows + inside // grid.cols
    column = tile % grid.tile_cols * grid.cols + inside % grid.cols
    rows, columns = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols
    edges = [column * size[0] / columns, row * size[1] / rows]
    return (
        int(edges[0]),
        int(edges[1]),
        -int(-(column + 1) * size[0] // columns),
        -int(-(row + 1) * size[1] // rows),
    )


def test_the_edited_object_is_put_into_the_span_of_the_stock_model(pair: Any) -> None:
    """Region, replies and later latents of every condition; the region by a search over pixels."""
    one = next(found for found in trail_pairs(1) if found.edit == "turn_on_trail")
    (record,) = steer_pairs(pair.ours, [one], OPTIONS)
    prompts = [pair.ours.prompt([question(view)]) for view in one.views]
    begun = [pair.begin([prompt]) for prompt in prompts]
    features = [sequence.embeds[0][sequence.image[0]] for sequence in begun]
    grid = prompts[0].images[0].grid
    region = edited_region(one, *prompts)
    assert not isinstance(region, str) and region[0] == 0 and record["tokens"] == len(region[1])
    first, second = (view.images[0].open().convert("RGB") for view in one.views)
    for token in range(grid.tokens):
        box = pixels_of(grid, token, first.size)
        touched = first.crop(box).tobytes() != second.crop(box).tobytes()
        assert touched or token not in region[1], "every token of the region shows the edit"
    edited, original = (part[region[1]].mean(0) for part in (features[1], features[0]))
    drawn = random_direction(edited, control_seed(0, one.original.id, 2))
    goal = slow(pair, begun[1], {})[1]
    free = slow(pair, begun[0], {})[1]
    for name, put in (("free", {}), ("edited", {2: edited}), ("original", {2: original}), ("random", {2: drawn})):
        sequence, span = slow(pair, begun[0], put)
        assert record["texts"][name] == pair.ours.tokenizer.decode(greedy(pair, sequence, NEW)), name
        if name != "free":
            gain = torch.cosine_similarity(span[2:], goal[2:]) - torch.cosine_similarity(free[2:], goal[2:])
            assert record["toward"][name] == pytest.approx(float(gain.mean()), abs=tolerance(2e-4))


def test_another_region_is_put_into_the_span_of_the_stock_model(pair: Any) -> None:
    (sample,) = trails(1)
    (record,) = steer_regions(pair.ours, [sample], OPTIONS)
    assert record["skipped"] is None
    prompt = pair.ours.prompt([question(sample)])
    grid, begun = prompt.images[0].grid, pair.begin([prompt])
    features = begun.embeds[0][begun.image[0]]

    def tokens(box: Any) -> list[int]:
        x0, y0, x1, y1 = box
        inside = []
        for token in range(grid.tokens):
            left, top, right, bottom = pixels_of(grid, token, (6000, 6000))
            if left < 6000 * x1 - 1 and right > 6000 * x0 + 1 and top < 6000 * y1 - 1 and bottom > 6000 * y0 + 1:
                inside.append(token)
        return inside

    own = sample.boxes[min(2, len(sample.boxes)) - 1].xyxy
    region = tokens(record["box"])
    assert not set(region) & {token for box in sample.boxes for token in tokens(box.xyxy)}, "outside all evidence"
    assert len(region) == len(tokens(own))
    moved, placed = features[region].mean(0), features[tokens(own)].mean(0)
    drawn = random_direction(moved, control_seed(0, sample.id, 2))
    free = slow(pair, begun, {})[1]
    for name, vector in (("moved", moved), ("own_place", placed), ("random", drawn)):
        sequence, span = slow(pair, begun, {2: vector})
        assert record["texts"][name] == pair.ours.tokenizer.decode(greedy(pair, sequence, NEW)), name
        gain = torch.cosine_similarity(span[2:], moved[None]) - torch.cosine_similarity(free[2:], moved[None])
        assert record["toward"][name] == pytest.approx(float(gain.mean()), abs=tolerance(2e-4))


# ---------------------------------------------------------------------- mini: the truth is known


@pytest.fixture(scope="module")
def loaded() -> Backbone:
    """One visual token a cell."""
    return Backbone.load("mini", dtype=torch.float32, device="cpu")


def test_the_region_of_an_edit(loaded: Backbone, tmp_path: Path) -> None:
    def prompts(one: Pair) -> list[Any]:
        return [read_samples(loaded, [view], 8).prompts[0] for view in one.views]

    turned = next(found for found in trail_pairs(2) if found.edit == "turn_on_trail")
    cells = turned.original.meta["trail"]["cells"]
    row, column = cells[turned.original.meta["trail"]["changes_at"] - 1]
    assert edited_region(turned, *prompts(turned)) == (0, [6 * row + column])
    swapped = next(found for found in trail_pairs(16) if found.edit == "swap_circles")
    end = swapped.edited.meta["trail"]["cells"][-1]
    assert edited_region(swapped, *prompts(swapped)) == (0, [6 * end[0] + end[1]]), "of two circles the one that counts"
    bare = replace(swapped, edited=replace(swapped.edited, boxes=[]))
    assert len(edited_region(bare, *prompts(bare))[1]) == 2
    same = replace(turned, edited=replace(turned.edited, images=turned.original.images))
    boxed = edited_region(same, *prompts(same))
    assert boxed == (0, sorted(6 * r + c for r, c in turned.edited.meta["trail"]["cells"])), (
        "evidence where no pixel differs"
    )
    nothing = replace(same, edited=replace(same.edited, boxes=[]))
    assert edited_region(nothing, *prompts(nothing)) == NO_REGION
    wide = ImageRef.from_image("wide", turned.edited.images[0].open().resize((96, 48)))
    other = replace(turned, edited=replace(turned.edited, images=[wide]))
    views = prompts(other)
    if views[0].images[0].grid != views[1].images[0].grid:
        assert edited_region(other, *views) == OTHER_GRID
    gone = replace(turned, edited=replace(turned.edited, images=[ImageRef.from_path(tmp_path / "gone.png")]))
    eight = replace(OPTIONS, latents=8)
    records = [record for one in (gone, nothing, turned) for record in steer_pairs(loaded, [one], eight)]
    assert "gone.png" in records[0]["error"] and [r["skipped"] for r in records[1:]] == [NO_REGION, None]
    summary = SteerEdit().summarise(records)
    assert summary["errors"] == 1 and summary["pairs"] == 1 and summary["steps"][0]["skipped"] == {NO_REGION: 1}
    assert any(NO_REGION in line for line in SteerEdit().notes(records, summary, 3))


def test_where_a_region_may_be() -> None:
    grid = Grid(4, 5)

    def sample(*boxes: Any) -> Sample:
        picture = ImageRef.from_image("p", Image.new("RGB", (50, 40)))
        return Sample.ask("s", [picture], "?", "red", boxes=[Box(0, box) for box in boxes])

    top = sample((0, 0, 0.4, 0.5))  # two columns, two rows
    seen = set()
    for seed in range(60):
        move = region_at(top, [grid], 1, seed)
        assert isinstance(move, Move) and move.own == (0, 0, 0.4, 0.5)
        x0, y0, x1, y1 = move.box
        column, row = round(x0 * 5), round(y0 * 4)
        assert (round(x1 * 5), round(y1 * 4)) == (column + 2, row + 2) and (column > 1 or row > 1)
        assert move.distance == row + column, "between the middles"
        seen.add((row, column))
        assert region_at(top, [grid], 1, seed) == move
    assert seen == {(r, c) for r in range(3) for c in range(4) if r > 1 or c > 1}
    assert region_at(sample((0, 0, 1, 0.7)), [grid], 1, 0) == NO_ROOM
    assert region_at(sample(), [grid], 1, 0) == NO_AREA == region_at(sample((0.5, 0, 0.5, 1)), [grid], 1, 0)
    ordered = sample((0, 0, 0.2, 0.25), (0, 0, 0.4, 0.25))
    widths = [region_at(ordered, [grid], step, 0).box for step in (1, 2, 3)]  # type: ignore[union-attr]
    assert [round((box[2] - box[0]) * 5) for box in widths] == [1, 2, 2], "the last box is repeated"


def test_the_own_place_put_back_gains_nothing_and_planted_latents_all(loaded: Backbone) -> None:
    """A span of region vectors gains what it lacked; the free-running span itself gains exactly zero."""
    (sample,) = trails(1)
    bench = Regions(loaded, read_samples(loaded, [sample], 8), replace(OPTIONS, latents=8))
    move = region_at(sample, [Grid(6, 6)], 2, 0)
    assert isinstance(move, Move)
    (vector,) = bench.vectors([0], [move.box])
    assert vector is not None and bench._toward(0, 2, bench.free, vector) == 0.0
    planted = replace(bench.free, latents_RKD=vector.expand_as(bench.free.latents_RKD) * 2)
    free = torch.cosine_similarity(bench.free.latents_RKD[0, 2:], vector[None]).mean()
    assert bench._toward(0, 2, planted, vector) == pytest.approx(1 - float(free), abs=1e-5)
    assert bench._toward(0, 8, planted, vector) is None
    assert bench._on(0, move, planted, (move.box,) * 6) == [True] * 6


def test_distances_and_the_random_direction_of_trails(loaded: Backbone) -> None:
    chosen = trails(6)
    records = steer_samples(loaded, chosen, replace(OPTIONS, latents=8, steps=(2, 4)))
    by_id = {sample.id: sample for sample in chosen}
    for record in records:
        cells = by_id[record["id"]].meta["trail"]["cells"]
        own = cells[min(record["step"], len(cells)) - 1]
        assert record["distance"] == abs(own[0] - record["cell"][0]) + abs(own[1] - record["cell"][1]) > 0
        assert (
            set(record["random"]) == {"text", "extracted", "later"}
            and len(record["random"]["later"]) == 8 - record["step"]
        )
    summary = summarise_steer(records)
    assert sum(row["moved"]["pairs"] for row in summary["distances"]) >= 6
    assert all(step["random"]["new"]["of"] == 6 for step in summary["steps"])
    # Folders of earlier versions have neither.
    old = [{k: v for k, v in record.items() if k not in ("random", "distance")} for record in records]
    found = summarise_steer(old)
    assert found["distances"] == [] and found["steps"][0]["random"]["new"]["rate"] is None
    assert found["steps"][0]["moved"] == summary["steps"][0]["moved"]
    assert Steer().drawn([Shown("old", found)]) and Steer().figure([Shown("old", found)]) is not None
    for step in found["steps"]:
        del step["random"], step["later_random"]
    del found["distances"]
    assert Steer().drawn([Shown("older", found)]) and Steer().figure([Shown("older", found)]) is not None


def test_groups_of_distances() -> None:
    groups = [distance_bin(distance) for distance in range(18)]
    assert groups[:6] == [(0, 0), (1, 1), (2, 2), (3, 4), (3, 4), (5, 8)] and groups[9] == groups[16] == (9, 16)
    assert all(low <= distance <= high for distance, (low, high) in enumerate(groups))
    assert box_distance(Grid(6, 6), (0, 0, 1 / 6, 1 / 6), (0.5, 0.5, 4 / 6, 4 / 6)) == 6


# ---------------------------------------------------------------------- numbers by hand, figures


def edit_record(
    pair: str, step: int, edited: str, original: str, distance: int | None, edit: str = "e"
) -> dict[str, Any]:
    return {
        "pair": pair,
        "edit": edit,
        "step": step,
        "latents": 4,
        "skipped": None,
        "distance": distance,
        "old_truth": "red",
        "new_truth": "blue",
        "extracted": {"free": "red", "edited": edited, "original": original, "random": None},
        "toward": {"edited": 0.5 if step < 4 else None, "original": 0.1, "random": -0.2},
        "choices": [],
        "error": None,
    }


def test_edits_by_hand() -> None:
    records = [
        edit_record("a", 2, "blue", "red", 0),
        edit_record("a", 4, "red", "red", 3),
        edit_record("b", 2, "blue", "blue", 4, "f"),
        edit_record("b", 4, "green", "red", None, "f"),
    ]
    found = SteerEdit().summarise(records)
    second, fourth = found["steps"]
    assert (second["edited"]["new"]["count"], second["original"]["new"]["count"], second["pairs"]) == (2, 1, 2)
    assert (fourth["edited"]["old"]["count"], fourth["edited"]["neither"]["count"]) == (1, 1)
    assert second["random"]["unreadable"]["rate"] == 1.0 and second["free"]["old"]["rate"] == 1.0
    assert second["toward"]["edited"]["mean"] == 0.5 and fourth["toward"]["edited"]["mean"] is None
    assert second["edits"]["f"]["original"]["rate"] == 1.0 and second["edits"]["e"]["original"]["rate"] == 0.0
    near, far = found["distances"]
    assert (near["near"], near["edited"]["mean"], near["edited"]["pairs"]) == (0, 100.0, 1)
    assert (far["near"], far["far"], far["edited"]["mean"], far["edited"]["pairs"]) == (3, 4, 50.0, 2)
    figure = SteerEdit().figure([Shown("one", found), Shown("two", found, 1)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[0].lines) == 6
    empty = SteerEdit().summarise([])
    assert SteerEdit().figure([Shown("m", empty)]) is None and SteerEdit().drawn([Shown("m", empty)])


def test_regions_by_hand() -> None:
    def one(name: str, step: int, changed: Any, distance: int) -> dict[str, Any]:
        conditions = ("moved", "own_place", "random")
        return {
            "id": name,
            "step": step,
            "latents": 4,
            "skipped": None,
            "distance": distance,
            "changed": {"moved": changed, "own_place": False, "random": True},
            "right": {"free": True, "moved": not changed, "own_place": True, "random": False},
            "toward": dict(zip(conditions, (0.4, 0.0, -0.1), strict=True)),
            "inside": {c: [c == "moved", False] for c in conditions},
            "error": None,
        }

    records = [one("a", 2, True, 1), one("a", 3, False, 6), one("b", 2, None, 1)]
    records.append({"id": "c", "step": 2, "skipped": NO_ROOM, "error": None})
    found = SteerRegion().summarise(records)
    assert (
        found["questions"] == 2
        and found["changed"]["moved"]["mean"] == 50.0
        and found["changed"]["moved"]["pairs"] == 1
    )
    assert found["inside"]["moved"]["mean"] == 50.0 and found["toward"]["moved"]["mean"] == pytest.approx(0.4)
    assert found["right"]["free"]["mean"] == 100.0 and found["steps"][0]["skipped"] == {NO_ROOM: 1}
    assert [(row["near"], row["far"], row["questions"]) for row in found["distances"]] == [(1, 1, 2), (5, 8, 1)]
    figure = SteerRegion().figure([Shown("one", found)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[1].lines) == 3
    assert SteerRegion().figure([Shown("m", SteerRegion().summarise([]))]) is None


# ---------------------------------------------------------------------- the commands


def test_the_commands_and_what_they_refuse(
    build_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = Backbone.load(build_tiny("internvl3"), dtype=torch.float32, device="cpu")
    backbone.latents = 2
    small = str(backbone.save(tmp_path / "small"))
    pairs, plain, out = tmp_path / "pairs.jsonl", tmp_path / "plain.jsonl", tmp_path / "out"
    write((view for one in trail_pairs(1) for view in one.views), "jsonl", pairs)
    write((replace(sample, boxes=[], meta={}) for sample in trails(2)), "jsonl", plain)
    given = ["--max-new", "2", "--device", "cpu", "--out"]
    cases = [
        (("steer-edit", small, plain), "no counterfactual pair found"),
        (("steer-region", small, plain), "none of its 2 samples has evidence boxes"),
        (("steer-edit", build_tiny("internvl3"), pairs), "has no trained latent span (K = 0)"),
        (("steer-region", small, pairs, "--at", "3"), "--at: there is no step 3; the span has K = 2 latents"),
    ]
    for args, said in cases:
        assert main(["diagnose", *map(str, args), *given, str(tmp_path / "no")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "no").exists()
    for name in ("steer-edit", "steer-region"):
        command = ["diagnose", name, small, str(pairs), "--at", "1", *given, str(out)]
        assert main(command) == 0
        before = (out / f"{name}.jsonl").read_text()
        assert main([*command[:5], "1,2", *command[6:]]) == 0  # steps may be added
        lines = (out / f"{name}.jsonl").read_text().splitlines()
        assert set(before.splitlines()) < set(lines) and len(lines) == 2 * len(before.splitlines())
        summary = json.loads((out / f"{name}.json").read_text())
        assert [step["step"] for step in summary["steps"]] == [1, 2]
        assert (out / f"{name}.svg").stat().st_size > 2000
    assert EditSettings().steps(8) == (2, 4, 6, 8) and EditSettings().steps(1) == (1,)
