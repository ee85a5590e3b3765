"""Cases: the rule that chooses them, and every reply and walk of theirs against one question at a time."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import reference
from pair_cases import world_samples
from pair_reference import greedy, question
from realvr.answers import parser
from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Message
from realvr.diagnostics import DiagnoseSettings, diagnose
from realvr.diagnostics.cases import Candidate, Cases, choose
from realvr.diagnostics.measuring.cases import Answers, build_cases, changed_cells, data_address, said, trail_answers
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair, pair_up, read_pairs
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.imaging.types import Grid
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples
from stage_runs import LATENTS, with_markers

K, NEW = 3, 4
SHORT = Sampling(temperature=0.0, max_new=NEW)

# ---------------------------------------------------------------------- the rule


def candidates(seed: int) -> list[Candidate]:
    rng = np.random.default_rng(seed)
    share = rng.choice([0.0, 0.02, 0.3, 0.9])
    return [
        Candidate(place, f"edit{rng.integers(4)}", str(rng.integers(1, 8)), bool(rng.random() < share))
        for place in range(int(rng.integers(1, 60)))
    ]


@pytest.mark.parametrize("seed", range(60))
def test_failures_are_at_least_their_share_and_the_rest_is_spread(seed: int) -> None:
    known = candidates(seed)
    chosen = choose(known, 12)
    count = min(12, len(known))
    assert len(chosen) == len(set(chosen)) == count
    failed, wrong = [one for one in known if one.failed], [one for one in chosen if one.failed]
    assert len(wrong) >= min(count, len(failed), max(2, math.ceil(count * len(failed) / len(known))))
    assert [one.failed for one in chosen] == [False] * (count - len(wrong)) + [True] * len(wrong)
    right = [one for one in chosen if not one.failed]
    taken = Counter(one.edit for one in right)
    for edit, there in Counter(one.edit for one in known if not one.failed).items():
        # No edit is behind another by more than one, unless it has no more pairs.
        assert taken[edit] >= min(there, max(taken.values(), default=0) - 1)


def test_a_small_choice_by_hand() -> None:
    known = [
        Candidate(0, "turn", "3", False),
        Candidate(1, "turn", "7", False),
        Candidate(2, "turn", "7", True),
        Candidate(3, "swap", "7", False),
        Candidate(4, "swap", "10", False),
        Candidate(5, "swap", "3", True),
        Candidate(6, "swap", "3", True),
    ]
    # Three of seven failed: three of five are failures. Successes first: both edits are unused, 10 is the largest tag;
    # then turn, which is behind, with its largest tag. Of the failures the first has the tag that nothing has yet; then
    # turn is behind again; 6 is what is left.
    assert [one.place for one in choose(known, 5)] == [4, 1, 5, 2, 6]


# ---------------------------------------------------------------------- against stock models


def asked(one: Pair, steps: list[int]) -> tuple[Pair, Answers, str, list[int]]:
    reply = said(one, 0, "nothing", "strict")
    return one, Answers([[reply, reply]]), "about", steps


def nearest(latents_KD: torch.Tensor, features_ND: torch.Tensor, grid: Grid) -> list[int]:
    """Cells by a loop over all pairs, in numpy; tiles side by side, the thumbnail left out."""
    across = grid.cols * grid.tile_cols
    found = []
    for z in latents_KD.double().cpu().numpy():
        best = (-2.0, -1)
        for token, v in enumerate(features_ND.double().cpu().numpy()):
            tile, inside = divmod(token, grid.rows * grid.cols)
            if tile < grid.tile_rows * grid.tile_cols:
                row = tile // grid.tile_cols * grid.rows + inside // grid.cols
                column = tile % grid.tile_cols * grid.cols + inside % grid.cols
                cosine = float(z @ v / np.linalg.norm(z) / np.linalg.norm(v))
                best = max(best, (cosine, row * across + column), key=lambda one: one[0])
        found.append(best[1])
    return found


@pytest.mark.parametrize("family", ["internvl3", "qwen2.5-vl"], indirect=True)
@torch.no_grad()
def test_swapped_spans_and_walks_against_whole_sequences(pair: Any) -> None:
    """A wide picture: own latents before step t, the other picture's from t on, decoded without a cache."""
    ours = pair.ours
    pairs, _ = pair_up(samples(Recipe("counterfactual", count=1, size=(168, 84))))
    one = next(found for found in pairs if found.changed)
    (case,) = build_cases(Model(ModelResponder(ours, SHORT), K), [asked(one, [])], "strict", 2)
    prompts = [ours.prompt([question(view)]) for view in one.views]
    spans = [pair.think(pair.begin([prompt]), K)[1][0] for prompt in prompts]
    features = [ours.encode_images(prompt.images).features_ND for prompt in prompts]
    grid = prompts[0].images[0].grid
    rows, columns = case["views"][0]["grid"]
    assert (rows, columns) == (grid.rows * grid.tile_rows, grid.cols * grid.tile_cols) and rows < columns
    assert grid.thumbnail == (grid.tile_cols > 1)
    for own in (0, 1):
        view = case["views"][own]
        assert view["walk"]["cells"] == nearest(spans[own], features[own], grid) and view["truth"] == one.truths[own]
        for start in range(K):
            mixed = torch.cat([spans[own][:start], spans[1 - own][start:]])
            sequence = pair.begin([prompts[own]])
            sequence = reference.append(pair.stock, sequence, pair.column(1, ours.markers.start))
            for z in mixed:
                slot = pair.column(1, ours.markers.slot)
                sequence = reference.append(pair.stock, sequence, slot, embeds=z[None, None])
            sequence = reference.append(pair.stock, sequence, pair.column(1, ours.markers.end))
            text = ours.tokenizer.decode(greedy(pair, sequence, NEW), skip_special_tokens=True)
            assert view["swaps"][start]["reply"]["text"] == text
            assert view["swaps"][start]["walk"]["cells"] == nearest(mixed[start:], features[own], grid)


# ---------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    write(iter(world_samples(2)), "jsonl", path)
    return path


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model on the first of two pairs of each edit, beside one that has no span."""
    out = tmp_path_factory.mktemp("run") / "cases"
    command = ["diagnose", "cases", "mini", str(data), "--out", str(out), "--second-model", "mini-base"]
    options = ["--examine", "1", "--cases", "3", "--steered", "1", "--at", "4", "--by", "kind", "--device", "cpu"]
    assert main([*command, *options, "--max-new", "24"]) == 0
    return out


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return Backbone.load("mini", device="cpu")


def reply_to(backbone: Backbone, view: Any, **options: Any) -> tuple[str, Any]:
    prompt = backbone.prompt(conversation(view, [image.open() for image in view.images]))
    done = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=24), **options)
    return done.completions[0][0].text, done.latents_BKD[0]


def test_a_run_examines_chooses_and_records(finished: Path, data: Path, mini: Backbone) -> None:
    found = json.loads((finished / "cases.json").read_text())
    pairs, _ = read_pairs(data, 1)
    records = [json.loads(line) for line in (finished / "cases.jsonl").read_text().splitlines()]
    assert [record["pair"] for record in records] == [pair.id for pair in pairs] and found["examined"] == len(
        pairs
    ) == 4
    base = Backbone.load("mini-base", device="cpu")
    for pair, record in zip(pairs, records, strict=True):
        for view in (0, 1):
            texts = [reply_to(mini, pair.views[view])[0], reply_to(base, pair.views[view], latents=0)[0]]
            assert [replies[view]["text"] for replies in record["replies"]] == texts
        right = all(
            parser("strict", "evaluation").read(reply["text"], pair.original.choices) == truth
            for reply, truth in zip(record["replies"][0], pair.truths, strict=True)
        )
        assert record["failed"] is not right
    failures = sum(record["failed"] for record in records)
    assert found["failures"] == failures and found["both_right"][0]["count"] == 4 - failures
    assert [bool(case["views"][0]["steered"]) for case in found["cases"]] == [True, False, False]
    assert all(len(json.dumps(case)) < 60_000 for case in found["cases"])
    assert f"wrongly in {failures} of them" in found["rule"] and "first 1 pairs of each edit" in found["rule"]


def test_swaps_take_the_latents_of_the_other_picture_from_a_step_on(finished: Path, data: Path, mini: Backbone) -> None:
    """One request at a time, on a model whose replies and walks depend on the span."""
    cases = json.loads((finished / "cases.json").read_text())["cases"]
    pairs = {one.id: one for one in read_pairs(data)[0]}
    responder = ModelResponder(mini, Sampling(temperature=0.0, max_new=24))
    moved = 0
    for case in cases:
        views = pairs[case["id"]].views
        spans = [reply_to(mini, view)[1] for view in views]
        turns = [conversation(view, [image.open() for image in view.images]) for view in views]
        for own, view in enumerate(case["views"]):
            features = mini.encode_images(mini.prompt(turns[own]).images).features_ND
            for start, swap in enumerate(view["swaps"]):
                mixed = torch.cat([spans[own][:start], spans[1 - own][start:]])
                request = [Request(views[own], turns[own])]
                ((reply,),) = responder.reply(request, [Plan(len(mixed), [mixed])])
                assert swap["reply"]["text"] == reply.text
                assert swap["walk"]["cells"] == nearest(mixed[start:], features, Grid(6, 6))
                tokens = features[swap["walk"]["cells"]]
                cosine = torch.nn.functional.cosine_similarity(mixed[start:], tokens, dim=-1)
                assert swap["walk"]["cosine"] == pytest.approx(cosine.tolist(), abs=1e-3)
                moved += swap["walk"]["cells"] != view["walk"]["cells"][start:]
    assert moved > 4  # something to get wrong


def test_steering_puts_the_token_of_each_cell(finished: Path, data: Path, mini: Backbone) -> None:
    case = json.loads((finished / "cases.json").read_text())["cases"][0]
    pair = next(one for one in read_pairs(data)[0] if one.id == case["id"])
    for number, view in enumerate(pair.views):
        prompt = mini.prompt(conversation(view, [image.open() for image in view.images]))
        features = mini.encode_images(prompt.images).features_ND
        assert len(features) == 36 == math.prod(case["views"][number]["grid"])
        for steered in case["views"][number]["steered"]:
            step = steered["step"]
            assert steered["grid"] == [6, 6] and len(steered["answers"]) == len(steered["walks"]) == 36
            assert steered["expected"] == [None] * 36  # no trail
            for cell in (0, 8, 35):
                text, z = reply_to(mini, view, interventions={step: features[cell]})
                assert steered["answers"][cell] == parser("strict", "evaluation").read(text, view.choices)
                assert steered["walks"][cell]["cells"] == nearest(z[step - 1 :], features, Grid(6, 6))
                assert steered["walks"][cell]["cells"][0] == cell and steered["walks"][cell]["cosine"][0] == 1.0


@pytest.fixture(scope="module")
def tiny(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_markers(build_tiny("qwen2.5-vl"), tmp_path_factory.mktemp("models") / "tiny")


def test_two_pictures_of_different_shape(build_tiny: Any) -> None:
    """As MMVP has them: each has its own grid, and nothing is said about where they differ. A fine grid is pooled."""
    ours = Backbone.load(build_tiny("qwen2.5-vl"), device="cpu", latents=K)
    shapes = [(84, 56), (56, 336)]
    views = [list(samples(Recipe("counterfactual", seed, 1, shape)))[0] for seed, shape in enumerate(shapes)]
    first, second = (replace(view, pair="p", answer=answer) for view, answer in zip(views, "AB", strict=True))
    edited = replace(second, turns=first.turns, choices=first.choices)
    (case,) = build_cases(
        Model(ModelResponder(ours, SHORT), K), [asked(Pair("other", first, edited), [2])], "strict", 64
    )
    grids = [view["grid"] for view in case["views"]]
    assert grids == [[rows, columns] for rows, columns in (_grid(ours, view) for view in (first, edited))]
    assert grids[0] != grids[1] and max(grids[1]) > 8
    for view in case["views"]:
        assert not view["changed"] and max(view["walk"]["cells"]) < math.prod(view["grid"])
        (steered,) = view["steered"]
        assert steered["grid"] == [min(8, side) for side in view["grid"]] and len(steered["walks"]) == math.prod(
            steered["grid"]
        )


def _grid(backbone: Backbone, view: Any) -> tuple[int, int]:
    grid = backbone.processor(view.images[0].open()).grid
    return grid.rows * grid.tile_rows, grid.cols * grid.tile_cols


def test_a_run_that_was_killed_goes_on_to_the_same_page(tiny: Path, data: Path, tmp_path: Path) -> None:
    """And the second model is a choice."""
    own = Cases.configure({"examine": 2, "cases": 5, "steered": 2, "at": "2,3,9"})
    run = DiagnoseSettings(str(tiny), data, tmp_path / "out", device="cpu", max_new=3)
    found = diagnose([own], run)["cases"]
    journal = tmp_path / "out/cases.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) // 2])  # within a record
    assert diagnose([own], run)["cases"] == found and journal.read_bytes() == whole
    assert len(found["both_right"]) == 1 and len(found["cases"]) == found["shown_failures"] == 5
    for number, case in enumerate(found["cases"]):
        for view in case["views"]:
            assert len(view["replies"]) == 1 and len(view["swaps"]) == LATENTS == len(view["walk"]["cells"])
            assert [one["step"] for one in view["steered"]] == ([2, 3] if number < 2 else [])


def test_a_span_of_one_latent_has_cases(tiny: Path, data: Path, tmp_path: Path) -> None:
    """The usual steps are beyond it; the only one can be moved."""
    run = DiagnoseSettings(str(tiny), data, tmp_path / "out", latents=1, device="cpu", max_new=3)
    found = diagnose([Cases.configure({"examine": 1, "cases": 2, "steered": 1})], run)["cases"]
    for number, case in enumerate(found["cases"]):
        for view in case["views"]:
            assert len(view["walk"]["cells"]) == len(view["swaps"]) == 1
            assert [one["step"] for one in view["steered"]] == ([1] if number < 1 else [])
            assert all(len(walk["cells"]) == 1 for one in view["steered"] for walk in one["walks"])
    assert len(found["cases"]) == 2
    with pytest.raises(UserError, match="--at is 3, but the span has K = 1 latents"):
        diagnose([Cases.configure({"at": "3"})], replace(run, out=tmp_path / "other"))


def test_what_cannot_be_done_is_refused(data: Path, tmp_path: Path) -> None:
    def run(values: dict[str, Any], path: Path = data, model: str = "mini") -> None:
        diagnose([Cases.configure(values)], DiagnoseSettings(model, path, tmp_path / "out", device="cpu"))

    with pytest.raises(UserError, match="--at is '2,x': write steps"):
        run({"at": "2,x"})
    with pytest.raises(UserError, match="steps are counted from 1"):
        run({"at": "0,2"})
    with pytest.raises(UserError, match="--at is 90, but the span has K = 8 latents"):
        run({"at": "90"})
    with pytest.raises(UserError, match="no trained latent span"):
        run({}, model="mini-base")
    double = tmp_path / "double.jsonl"
    twice = [
        replace(one, images=one.images * 2, turns=[Message("user", one.question, (0, 1))]) for one in world_samples(1)
    ]
    write(iter(twice), "jsonl", double)
    with pytest.raises(UserError, match=r"double.jsonl: none of its 4 pairs shows one picture at a time"):
        run({}, double)


# ---------------------------------------------------------------------- parts


def test_the_answer_at_the_end_of_a_trail_is_known_where_latents_suffice() -> None:
    board = [["right", "down", "circle red"], ["up", "right", "circle blue"], ["left", "up", ""]]
    (pair,), _ = pair_up(world_samples(1)[:2])
    trail = {"grid": [3, 3], "board": board}
    views = [
        replace(view, choices=["blue", "red"], answer="A", tags={"kind": "end"}, meta={"trail": trail})
        for view in pair.views
    ]
    pair = Pair("turn", *views)
    # (0,0) → (0,1) → (1,1) → blue; (1,0) goes over (0,0); (2,1) → (1,1) → blue; (2,0) leaves the board.
    assert trail_answers(pair, 0, (3, 3), 8) == ["A", "A", "B", "A", "A", "A", None, "A", None]
    assert trail_answers(pair, 0, (3, 3), 3) == [None, "A", "B", None, "A", "A", None, "A", None]
    assert trail_answers(pair, 0, (6, 6), 8) == [None] * 36  # cells of another grid than the trail's


def test_pictures_are_small_and_edited_cells_are_found() -> None:
    first = Image.new("RGB", (48, 48), "white")
    second = first.copy()
    second.putpixel((9, 47), (0, 0, 0))
    assert changed_cells(first, second, (6, 6)) == [31] and changed_cells(first, first, (6, 6)) == []
    assert changed_cells(first, Image.new("RGB", (48, 48)), (6, 6)) == []  # everything differs: nothing to point at
    assert changed_cells(first, Image.new("RGB", (40, 48)), (6, 6)) == []

    def shown(picture: Image.Image) -> tuple[str, Image.Image]:
        head, _, text = data_address(picture).partition(",")
        return head, Image.open(io.BytesIO(base64.b64decode(text)))

    head, back = shown(second)
    assert head == "data:image/png;base64" and back.size == (48, 48) and back.getpixel((9, 47)) == (0, 0, 0)
    noise = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), dtype=np.uint8)
    head, back = shown(Image.fromarray(noise))
    assert head == "data:image/jpeg;base64" and back.size == (384, 288)
