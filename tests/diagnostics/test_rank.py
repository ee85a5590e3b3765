"""Effective rank: planted clouds, small models of every family against whole matrices, what is said of few rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pair_cases import world_samples
from pair_reference import question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.cli.diagnose import as_suite
from realvr.data.sample import Box
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.rank import Rank, RankSettings
from realvr.diagnostics.states import StateFiles
from realvr.evaluation.model_responder import ModelResponder
from stage_runs import with_markers, world, write

K = 3


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def whole(rows: np.ndarray) -> dict[str, Any]:
    """The same numbers of the whole matrix, by singular values."""
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    shares = np.cumsum(values) / values.sum()
    ranks = {f"rank{p}": int(np.sum(shares < p / 100 - 1e-12)) + 1 for p in (90, 95, 99)}
    return {**ranks, "pr": pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-6)}


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("rank90", "rank95", "rank99", "pr")}


def records(names: list[str]) -> list[dict[str, Any]]:
    return [{"id": name, "visual": 1, "latents": 1, "error": None} for name in names]


def test_every_cloud_is_that_of_the_stock_spans(pair: Any, tmp_path: Path) -> None:
    """Two batches, one file each; visual tokens, all latents, their mean, the last."""
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:4]
    chosen[2] = replace(chosen[2], turns=[replace(chosen[2].turns[0], text="Something else: how many are there?")])
    rank, model = Rank(), Model(ModelResponder(pair.ours), K)
    files, found = StateFiles(tmp_path / "rank-states"), []
    for place in (2, 0):
        found += list(rank.measure(model, Samples(chosen[place : place + 2], place=place, states=files)))
    summary = rank.extend(rank.summarise(found), {}, tmp_path)
    spans, pictures = [], []
    for sample in chosen:
        prompt = pair.ours.prompt([question(sample)])
        spans.append(pair.think(pair.begin([prompt]), K)[1][0].double().cpu().numpy())
        pictures.append(pair.ours.encode_images(prompt.images).features_ND.double().cpu().numpy())
    clouds = {
        "visual": np.concatenate(pictures),
        "latents": np.concatenate(spans),
        "mean": np.stack([span.mean(0) for span in spans]),
        "last": np.stack([span[-1] for span in spans]),
    }
    assert set(summary["clouds"]) == set(clouds) and summary["questions"] == 4
    for name, rows in clouds.items():
        cloud, right = summary["clouds"][name], whole(rows)
        assert (cloud["rows"], cloud["width"]) == rows.shape and cloud["bound"] == min(len(rows) - 1, rows.shape[1])
        ranks = [cloud[key] - right[key] for key in ("rank90", "rank95", "rank99")]
        assert all(abs(off) <= 1 for off in ranks), (name, ranks)  # a share may lie within rounding of its limit
        assert cloud["pr"] == pytest.approx(right["pr"].expected, rel=1e-3)
        assert cloud["explained"][-1] == [rows.shape[1], pytest.approx(1.0)]


def test_a_planted_cloud_has_its_rank_whatever_the_cut_of_the_files(tmp_path: Path) -> None:
    """Latents on a plane, visual tokens everywhere; the mean of a question lies on the plane too."""
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(12, 2)))[0].T.astype(np.float32)
    latents = {f"q{n}": (rng.normal(size=(4, 2)) @ plane + 5).astype(np.float32) for n in range(60)}
    visual = {name: rng.normal(size=(9, 12)).astype(np.float32) for name in latents}
    names, found = list(latents), []
    for size in (7, 60):
        files = StateFiles(tmp_path / str(size) / "rank-states")
        for place in range(0, 60, size):
            own = names[place : place + size]
            files.write(place, own, {}, {"latents": [latents[n] for n in own], "visual": [visual[n] for n in own]})
        rank = Rank()
        found.append(rank.extend(rank.summarise(records(names)), {}, tmp_path / str(size)))
    assert found[0] == found[1]  # to the bit: files are an accident of the run
    clouds = found[0]["clouds"]
    assert {name: clouds[name]["rank99"] for name in ("latents", "mean", "last")} == {
        "latents": 2,
        "mean": 2,
        "last": 2,
    }
    assert clouds["latents"]["pr"] == pytest.approx(2, rel=0.05) and clouds["visual"]["rank90"] >= 10
    assert numbers(clouds["visual"]) == whole(np.concatenate(list(visual.values())).astype(float))
    halves = [whole(np.concatenate([visual[n] for n in names[start::2]]).astype(float)) for start in (0, 1)]
    assert [dict(half) for half in clouds["visual"]["halves"]] == halves
    figure = Rank().figure([Shown("a", found[0]), Shown("b", found[1], 1)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[0].lines) == 9
    assert "240 x 12" in Rank().side_by_side([Shown("a", found[0])])


def test_few_rows_are_said_and_no_rows_are_no_cloud(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "rank-states")
    rows = np.eye(3, 8, dtype=np.float32)
    none = np.empty((0, 8), dtype=np.float32)
    files.write(0, ["a", "b"], {}, {"latents": [rows[:2], rows[1:]], "visual": [none, none]})
    rank = Rank()
    found = [*records(["a", "b"]), {"id": "c", "error": "gone"}]
    summary = rank.extend(rank.summarise(found), {}, tmp_path)
    assert set(summary["clouds"]) == {"latents", "mean", "last"} and summary["errors"] == 1
    assert summary["clouds"]["latents"]["bound"] == 3 and summary["clouds"]["mean"]["rank99"] == 1
    told = "\n".join(rank.notes(found, summary, 3))
    assert "latents: 4 rows in 8 dimensions, so no rank can be above 3" in told and "1 of 3" in told
    empty = Rank()
    nothing = empty.extend(empty.summarise([]), {}, tmp_path)
    assert (
        nothing["clouds"] == {} and empty.figure([Shown("a", nothing)]) is None and empty.drawn([Shown("a", nothing)])
    )


# ---------------------------------------------------------------------- how many vectors


def test_visual_tokens_are_drawn_by_seed_and_question_alone(build_tiny: Any, tmp_path: Path) -> None:
    """At most ``--visual`` of a question are written; whichever batch it is in, they are the same."""
    samples = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:3]
    model = Model(ModelResponder(Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")), K)

    def stored(name: str, batches: list[slice], **settings: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        rank, found = Rank(RankSettings(**settings)), []
        files = StateFiles(tmp_path / name / "rank-states")
        for batch in batches:
            found += rank.measure(model, Samples(samples[batch], place=batch.start, states=files))
        summary = rank.extend(rank.summarise(found), {}, tmp_path / name)
        lines[name] = "\n".join(rank.notes(found, summary, len(samples)))
        return dict(files.several([sample.id for sample in samples], "visual")), summary

    lines: dict[str, str] = {}
    whole, told = stored("whole", [slice(0, 3)], visual=0)
    count = sum(map(len, whole.values()))
    assert min(map(len, whole.values())) > 3 and told["visual"] == {"kept": count, "of": count}
    few, told = stored("few", [slice(0, 3)], visual=3)
    assert {len(rows) for rows in few.values()} == {3} and told["visual"] == {"kept": 9, "of": count}
    assert told["clouds"]["visual"]["rows"] == 9 and f"9 of {count} visual tokens were drawn" in lines["few"]
    assert "were drawn" not in lines["whole"] and "were drawn" in Rank().side_by_side([Shown("m", told)])
    places = []
    for name, rows in few.items():
        own = [int(np.flatnonzero((np.abs(whole[name] - row) < 1e-5).all(1))[0]) for row in rows]
        assert own == sorted(set(own))
        places.append(own)
    apart, _ = stored("apart", [slice(2, 3), slice(0, 2)], visual=3)
    assert all(np.abs(apart[name] - rows).max() < 1e-5 for name, rows in few.items())
    other, _ = stored("other", [slice(0, 3)], visual=3, seed=1)
    assert any(np.abs(other[name] - rows).max() > 1e-3 for name, rows in few.items())


def test_latents_evidence_gives_every_question_its_number(build_tiny: Any, tmp_path: Path) -> None:
    samples = world(6)[:3]
    boxes = [(0.0, 0.0, 1.0, 1.0), (0.1, 0.1, 0.4, 0.9)]
    samples[:2] = [replace(one, boxes=[Box(0, box)]) for one, box in zip(samples, boxes, strict=False)]
    samples[2] = replace(samples[2], boxes=[])
    model, data = with_markers(build_tiny("qwen2.5-vl"), tmp_path / "model"), write(samples, tmp_path)
    out = tmp_path / "out"
    run = ["diagnose", str(model), "--data", str(data), "--out", str(out), "--device", "cpu", "--max-new", "4"]
    assert main([*run, "--tests", "rank,similarity", "--latents=evidence"]) == 0
    lengths = [json.loads(line)["latents"] for line in (out / "rank.jsonl").read_text().splitlines()]
    assert lengths == [4, 2]  # of 2 x 2 visual tokens
    clouds = json.loads((out / "rank.json").read_text())["clouds"]
    assert clouds["latents"]["rows"] == 6 and clouds["mean"]["rows"] == clouds["last"]["rows"] == 2


@pytest.mark.parametrize(
    "args",
    [
        ["walk", "mini", "DATA", "--latents", "evidence"],
        ["mini", "--data", "DATA", "--tests", "walk,controls", "--latents=evidence"],
    ],
)
def test_where_there_is_no_such_length_it_is_said(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *args, "--out", "OUT"]) == 2
    said = capsys.readouterr().err
    assert "--latents evidence: only" in said and "similarity, rank take as many" in said and "walk" in said


@pytest.mark.parametrize(
    ("words", "tests"),
    [([], {"similarity", "rank"}), (["--tests", "all"], {"similarity", "rank"}), (["--tests=walk,rank"], {"rank"})],
)
def test_a_suite_sets_the_length_of_its_own_tests(words: list[str], tests: set[str]) -> None:
    made = as_suite(["mini", *words, "--latents", "evidence"])
    assert {word.partition(".")[0] for word in made if word.endswith(".length=evidence")} == tests
    assert "--latents" not in made and as_suite(["mini", *words, "--latents", "4"])[-2:] == ["--latents", "4"]
