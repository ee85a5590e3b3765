"""Steering on small models of every family, against stock models over whole sequences; and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from pair_cases import world_samples
from pair_reference import greedy, question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import ImageRef, Sample
from realvr.diagnostics.measuring.reading import read_samples
from realvr.diagnostics.measuring.steer import Bench, SteerOptions, Told, steer_samples
from realvr.diagnostics.steer_moves import OTHER_QUESTION, Move, move_at
from realvr.diagnostics.steer_summary import summarise_steer
from realvr.imaging.types import Grid
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

K, NEW = 5, 2
OPTIONS = SteerOptions(latents=K, steps=(2, 4), sampling=Sampling(temperature=0.0, max_new=NEW))


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def trails(count: int) -> list[Sample]:
    return list(samples(Recipe("trails", seed=1, count=count)))


def tokens_of(grid: Grid, cell: tuple[int, int], side: int = 6) -> list[int]:
    """Visual tokens that a cell of a board with ``side`` rows and columns overlaps, by exact fractions."""
    rows, columns = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols

    def overlap(number: int, count: int, place: int) -> bool:
        return Fraction(number, count) < Fraction(place + 1, side) and Fraction(number + 1, count) > Fraction(
            place, side
        )

    def index(row: int, column: int) -> int:
        (tile_row, y), (tile_column, x) = divmod(row, grid.rows), divmod(column, grid.cols)
        return ((tile_row * grid.tile_cols + tile_column) * grid.rows + y) * grid.cols + x

    return [
        index(row, column)
        for row in range(rows)
        for column in range(columns)
        if overlap(row, rows, cell[0]) and overlap(column, columns, cell[1])
    ]


def slow(pair: Any, sequence: Any, put: dict[int, Tensor]) -> tuple[Any, Tensor]:
    """The span with a vector put at a step: every step runs the whole sequence through the stock model."""
    markers = pair.ours.markers
    sequence, fed = reference.append(pair.stock, sequence, pair.column(1, markers.start)), []
    for step in range(1, K + 1):
        fed.append(put.get(step, reference.hidden(pair.stock, sequence)[0, -1]))
        sequence = reference.append(pair.stock, sequence, pair.column(1, markers.slot), embeds=fed[-1][None, None])
    return reference.append(pair.stock, sequence, pair.column(1, markers.end)), torch.stack(fed)


def test_every_condition_is_the_stock_model_with_that_token_in_its_span(pair: Any) -> None:
    """Replies and places of all conditions of two questions in one batch."""
    chosen = trails(2)
    records = steer_samples(pair.ours, chosen, replace(OPTIONS, steps=(2,)))
    assert {(r["id"], r["step"]) for r in records} == {(s.id, 2) for s in chosen}
    moved = [record for record in records if record["skipped"] is None]
    assert len(moved) == 2 and all(record["unchanged"] for record in moved)
    by_id = {sample.id: sample for sample in chosen}
    for record in moved:
        sample, step = by_id[record["id"]], record["step"]
        prompt = pair.ours.prompt([question(sample)])
        grid, cells = prompt.images[0].grid, [tuple(cell) for cell in sample.meta["trail"]["cells"]]
        begun = pair.begin([prompt])
        features_ND = begun.embeds[0][begun.image[0]]
        move = move_at(sample, step, K)
        assert isinstance(move, Move) and move.cell is not None and record["cell"] == list(move.cell)
        own = cells[min(step, len(cells)) - 1]
        vectors = {"moved": move.cell, "own_place": own}
        spans = {}
        assert record["texts"]["put_back"] == record["texts"]["free"]
        for name, cell in (*vectors.items(), ("free", None)):
            put = {} if cell is None else {step: features_ND[tokens_of(grid, cell)].mean(0)}
            sequence, spans[name] = slow(pair, begun, put)
            said = greedy(pair, sequence, NEW)
            assert record["texts"][name] == pair.ours.tokenizer.decode(said), (record["id"], step, name)
        for name, expected in (("free", "old"), ("own_place", "old"), ("moved", "new")):
            # A board's cell whose tokens hold the nearest of the picture's own tokens; the thumbnail's do not count.
            near = torch.cosine_similarity(spans[name][step:, None], features_ND[None], dim=-1)
            near = near[:, : grid.rows * grid.cols * grid.tile_rows * grid.tile_cols].argmax(-1).tolist()
            places = [(round(box[1] * 6), round(box[0] * 6)) for box in getattr(move, expected)]
            right = [token in tokens_of(grid, place) for token, place in zip(near, places, strict=True)]
            assert record["later"][name] == right


def test_the_walk_after_a_move_by_planted_latents(loaded: Backbone) -> None:
    """Latents that are the visual tokens of the new trail, of the own trail, and of the new one but for one step."""
    bench = Bench(loaded, read_samples(loaded, trails(2), 8), replace(OPTIONS, latents=8))
    for row, sample in enumerate(bench.reading.samples):
        move = move_at(sample, 2, 8)
        assert isinstance(move, Move)
        grid, features = bench.reading.prompts[row].images[0].grid, bench.features[row][0]
        assert (grid.rows, grid.cols) == (6, 6) and len(move.new) == len(move.old) == 6

        def token(box: Any, features: Tensor = features) -> Tensor:
            return features[round(box[1] * 6) * 6 + round(box[0] * 6)]

        for places in (move.new, move.old):
            told = torch.zeros_like(bench.free.latents_RKD)
            told[row] = features[35]
            told[row, 2:] = torch.stack([3 * token(box) for box in places])  # cosines know no length
            planted = Told(told, bench.free.last_RD, bench.free.replies)
            assert bench._on(row, move, planted, places) == [True] * 6
            assert bench._on(row, move, planted, move.old if places is move.new else move.new) == [False] * 6
            told[row, 4] = -told[row, 4]
            assert bench._on(row, move, planted, places) == [True, True, False, True, True, True]


def test_what_cannot_be_moved_or_read(loaded: Backbone, tmp_path: Path) -> None:
    first, second, third = trails(3)
    gone = replace(second, images=[ImageRef.from_path(tmp_path / "gone.png")])
    records = steer_samples(loaded, [first, gone, replace(third, answer="7", choices=[])], OPTIONS)
    found = {(r["id"], r.get("step")): r for r in records}
    assert len(found) == len(records) == 2 + 1 + 2
    assert "gone.png" in found[second.id, None]["error"]
    assert {found[third.id, step]["skipped"] for step in (2, 4)} == {OTHER_QUESTION}
    assert steer_samples(loaded, [replace(third, answer="7", choices=[])], OPTIONS)[0]["skipped"] == OTHER_QUESTION


def test_batches_do_not_matter(loaded: Backbone) -> None:
    chosen = trails(4)
    together = {(r["id"], r["step"]): r for r in steer_samples(loaded, chosen, OPTIONS)}
    for sample in chosen:
        for record in steer_samples(loaded, [sample], OPTIONS):
            assert record == together[record["id"], record["step"]]


def test_places_that_the_data_lists(loaded: Backbone) -> None:
    """Without evidence there is no own place to compare with, and no trail for the latents to be on."""
    places = [{"box": [0, 0, 0.5, 0.5], "answer": "blue"}]
    (sample,) = trails(1)
    plain = replace(sample, meta={"steer": places}, boxes=[], choices=[], answer="red")
    (record,) = steer_samples(loaded, [plain], replace(OPTIONS, steps=(3,)))
    assert set(record["texts"]) == {"free", "moved", "put_back"} and record["unchanged"]
    assert record["later"] == {"moved": [], "own_place": [], "free": []} and record["new_truth"] == "blue"
    (step,) = summarise_steer([record])["steps"]
    assert step["own_place"]["old"]["of"] == 0 and step["later_moved"]["mean"] is None
    boxed = replace(plain, boxes=sample.boxes)
    assert "own_place" in steer_samples(loaded, [boxed], replace(OPTIONS, steps=(3,)))[0]["texts"]


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def small(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with trained markers, as far as its files tell."""
    backbone = Backbone.load(build_tiny("internvl3"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    return backbone.save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def loaded() -> Backbone:
    """One visual token a cell."""
    return Backbone.load("mini", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trails") / "samples.jsonl"
    write(iter([*trails(5), *world_samples(1)[:1]]), "jsonl", path)
    return path


def arguments(*args: Any) -> list[str]:
    return ["steer", *map(str, args), "--max-new", "3", "--device", "cpu", "--batch", "2"]


def test_a_run_goes_on_and_takes_more_steps(
    small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(small, data, "--out", out, "--at", "2")) == 0
    printed = capsys.readouterr()
    assert "z_2" in printed.out and "1 samples have no trail and list no places to move to" in printed.err
    lines = (out / "steer.jsonl").read_text().splitlines()
    assert len(lines) == 5
    (out / "steer.jsonl").write_text("\n".join(lines[:3]) + "\n")  # stopped in the second batch
    assert main(arguments(small, data, "--out", out, "--at", "2")) == 0
    assert sorted((out / "steer.jsonl").read_text().splitlines()) == sorted(lines)
    assert main(arguments(small, data, "--out", out, "--at", "2,3")) == 0
    records = [json.loads(line) for line in (out / "steer.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records].count(3) == 5 and len(records) == 10
    summary = json.loads((out / "steer.json").read_text())
    assert [step["step"] for step in summary["steps"]] == [2, 3] and summary["questions"] == 5
    for step in summary["steps"]:
        assert step["questions"] + sum(step["skipped"].values()) == 5
        assert step["unchanged"]["count"] == step["questions"] > 0
    assert "## A latent moved to another trail" in (out / "steer.md").read_text()
    assert main(arguments(small, data, "--out", out, "--at", "2", "--seed", "1")) == 2
    assert "seed" in capsys.readouterr().err
    assert main(["report", str(out), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "Does the model go on from where a latent was moved to?" in page


def test_what_is_refused(
    build_tiny: Callable[[str], Path], small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, broken = tmp_path / "plain.jsonl", tmp_path / "broken.jsonl"
    write(iter(world_samples(1)), "jsonl", plain)
    (sample,) = trails(1)
    write(iter([replace(sample, meta={"trail": {"grid": [6, 6]}})]), "jsonl", broken)
    cases = [
        ((small, plain), "has a trail (meta['trail']"),
        ((small, broken), f"{broken}, row 1: meta['trail'] is not"),
        ((small, data, "--at", "6"), "--at: there is no step 6; the span has K = 5 latents"),
        ((small, data, "--at", "two"), "--at is 'two': write steps"),
        ((build_tiny("internvl3"), data), "has no trained latent span (K = 0)"),
        ((small, data, "--latents", "0"), "do not ask for --latents 0"),
    ]
    for args, said in cases:
        assert main(arguments(*args, "--out", tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error and not (tmp_path / "out").exists(), error
