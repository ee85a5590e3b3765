"""Cases of questions without a pair and of several benchmarks: what is read, chosen, asked and recorded."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realvr.answers import canonical_answer, parser
from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.cli import main
from realvr.data.export import write
from realvr.data.readers.base import ReadOptions
from realvr.data.reading import Report
from realvr.data.sample import Box, Message
from realvr.diagnostics import DIAGNOSTICS, DiagnoseSettings, diagnose
from realvr.diagnostics.cases import Candidate, Cases, case_ids, choose
from realvr.diagnostics.data import Source, read_data
from realvr.diagnostics.folders import benchmarks_in, read_all
from realvr.diagnostics.measuring.cases import Answers, build_cases, said
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair, Single
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples
from stage_runs import LATENTS, with_markers

OPTIONS = ReadOptions(check_images="none", broken_images="keep")

# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize("seed", range(80))
def test_every_benchmark_has_a_case(seed: int) -> None:
    """Also one on which the model only fails, or never does, whatever the shares of failures."""
    rng = np.random.default_rng(seed)
    names = [f"b{number}" for number in range(int(rng.integers(1, 9)))]
    chance = {name: float(rng.choice([0.0, 0.05, 0.5, 1.0])) for name in names}
    known = []
    for place in range(int(rng.integers(len(names), 60))):
        name = names[place] if place < len(names) else str(rng.choice(names))
        known.append(Candidate(place, f"e{rng.integers(3)}", "", bool(rng.random() < chance[name]), name))
    wanted = int(rng.integers(1, 14))
    chosen = choose(known, wanted)
    assert {one.benchmark for one in chosen} == {one.benchmark for one in known}
    assert len(chosen) == len(set(chosen)) == min(max(wanted, len(names)), len(known))
    assert [one.failed for one in chosen] == sorted(one.failed for one in chosen)  # failures stand last


def test_a_benchmark_with_one_kind_of_outcome_goes_first() -> None:
    known = [
        Candidate(0, "", "", False, "mixed"),
        Candidate(1, "", "", True, "mixed"),
        Candidate(2, "", "", False, "easy"),
        Candidate(3, "", "", True, "hard"),
    ]
    # Two cases would be one success and one failure of the first benchmark; three are needed, half of them failures.
    assert [one.place for one in choose(known, 2)] == [2, 1, 3] or [one.place for one in choose(known, 2)] == [2, 3, 1]


# ---------------------------------------------------------------------- reading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two benchmarks in the layout of `world make`, one as its published files, and a folder that is none."""
    made = tmp_path_factory.mktemp("world")
    for split, count in (("mmvp", 3), ("blink", 5)):
        assert main(["world", "make", str(made), "--split", split, "--count", str(count), "--size", "56"]) == 0
    (made / "blink/samples.jsonl").unlink()
    (made / "notes").mkdir()
    write(samples(Recipe("validation", 3, 4, (56, 56))), "jsonl", made / "own/samples.jsonl")
    return made


def test_a_folder_of_benchmarks_is_read_one_after_the_other(folder: Path) -> None:
    assert list(benchmarks_in(folder)) == ["blink", "mmvp", "own"]
    found = list(read_all(folder, OPTIONS, Report()))
    assert Counter(one.tags["benchmark"] for one in found) == {"blink": 5, "mmvp": 6, "own": 4}
    assert len({one.id for one in found}) == len(found) and all(
        one.id.startswith(one.tags["benchmark"]) for one in found
    )
    assert {one.pair for one in found} == {None, "mmvp/1", "mmvp/2", "mmvp/3"}
    assert benchmarks_in(folder / "own") == {} and benchmarks_in(folder / "own/samples.jsonl") == {}


def test_pairs_and_questions_of_no_pair_are_both_taken(folder: Path) -> None:
    source = Source(folder)
    data = source.take(Cases(), None)
    assert Counter(type(one) for one in data.items) == {Pair: 3, Single: 9}
    assert data.left_out["single"] == 0  # none of them is left out
    settings = DiagnoseSettings("mini", folder, "out")
    assert [one.id for one in read_data(Cases(), settings).items] == [one.id for one in data.items]
    few = Cases.configure({"examine": 1}).select(data.items, folder)
    edits = {one.edit for one in data.items if isinstance(one, Pair)}
    assert len(few) == len(edits) + 2
    # Tests on samples get the original views and the questions of no pair, benchmark by benchmark in turn.
    first = source.take(DIAGNOSTICS.get("steer")(), 2 + len(edits)).items
    assert {one.tags["benchmark"] for one in first} == {"mmvp", "blink", "own"}
    assert not {one.id for one in first} & {one.views[1].id for one in data.items if isinstance(one, Pair)}


def test_diagnostics_on_pairs_alone_do_not_share_the_reading(folder: Path, tmp_path: Path) -> None:
    """They would be given questions without a pair."""
    with pytest.raises(UserError, match="cases and counterfactual need different data: run one after the other"):
        diagnose(["cases", "counterfactual"], DiagnoseSettings("mini", folder, tmp_path / "out"))
    assert Cases.how().startswith("realvr diagnose cases MODEL DATA ") and str(Cases.needs) == "a trained latent span"


def test_rotations_of_one_question_are_one_case() -> None:
    (one,) = samples(Recipe("validation", 3, 1, (56, 56)))
    turned = [Single(replace(one, id=f"q{row}", cycle=str(row % 4), task="hr")) for row in range(8)]
    assert [kept.id for kept in Cases().select(turned, Path("x"))] == ["q0", "q4"]
    with pytest.raises(UserError, match="the right answer names no option"):
        _ = Single(replace(one, choices=["a", "b"], answer="Q")).truths


# ---------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def tiny(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_markers(build_tiny("qwen2.5-vl"), tmp_path_factory.mktemp("models") / "tiny")


def test_a_run_on_several_benchmarks_takes_one_question_of_each(tiny: Path, folder: Path, tmp_path: Path) -> None:
    own = Cases.configure({"examine": 1, "cases": 2, "steered": 1, "at": "2"})
    found = diagnose([own], DiagnoseSettings(str(tiny), folder, tmp_path / "out", device="cpu", max_new=3))["cases"]
    assert {case["task"] for case in found["cases"]} == {"blink", "mmvp", "own"} and len(found["cases"]) == 3
    assert "Every benchmark has at least one case." in found["rule"]
    ids = case_ids(found)
    for case in found["cases"]:
        assert len(case["views"]) == len(case["ids"]) == (2 if case["task"] == "mmvp" else 1) and ids >= {*case["ids"]}
        for view in case["views"]:
            assert len(view["swaps"]) == (LATENTS if case["task"] == "mmvp" else 0)
    known = {one.id: one for one in read_all(folder, OPTIONS, Report())}
    backbone = Backbone.load(tiny, device="cpu")
    for record in map(json.loads, (tmp_path / "out/cases.jsonl").read_text().splitlines()):
        if record["edit"]:
            continue
        sample = known[record["pair"]]
        prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
        text = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=3)).completions[0][0].text
        ((reply,),) = record["replies"]
        assert reply["text"] == text[:200]
        answer = parser("strict", "evaluation").read(text, sample.choices)
        assert record["failed"] is (answer != canonical_answer(sample.answer, sample.choices))


@torch.no_grad()
def test_the_walk_over_two_pictures_counts_cells_on(build_tiny: Any) -> None:
    """Cells of the second picture come behind those of the first; each has its own boxes."""
    ours = Backbone.load(build_tiny("qwen2.5-vl"), device="cpu", latents=3)
    one, other = (
        next(iter(samples(Recipe("validation", seed, 1, size)))) for seed, size in ((3, (84, 56)), (4, (56, 112)))
    )
    both = replace(
        one,
        images=[*one.images, *other.images],
        turns=[Message("user", one.question, (0, 1))],
        boxes=[Box(1, (0.0, 0.0, 0.5, 0.5)), Box(0, (0.5, 0.5, 1.0, 1.0))],
    )
    item = Single(both)
    model = Model(ModelResponder(ours, Sampling(temperature=0.0, max_new=2)), 3)
    reply = said(item, 0, "nothing", "strict")
    (case,) = build_cases(model, [(item, Answers([[reply]]), "about", [2])], "strict", 4)
    (view,) = case["views"]
    (second,) = view["more"]
    assert view["evidence"] == [[0.5, 0.5, 1.0, 1.0]] and second["evidence"] == [[0.0, 0.0, 0.5, 0.5]]
    assert (view["size"], second["size"]) == ([84, 56], [56, 112]) and view["steered"] == []
    prompt = ours.prompt(conversation(both, [image.open() for image in both.images]))
    tokens = ours.encode_images(prompt.images).features_ND.double().numpy()
    assert len(tokens) == math.prod(view["grid"]) + math.prod(second["grid"])
    spans = rollout(ours, [prompt], sampling=Sampling(temperature=0.0, max_new=1), latents=3).latents_BKD[0]
    cosines = [[float(z @ v / np.linalg.norm(z) / np.linalg.norm(v)) for v in tokens] for z in spans.double().numpy()]
    assert view["walk"]["cells"] == [int(np.argmax(row)) for row in cosines]
