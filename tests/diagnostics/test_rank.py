"""Effective rank: planted clouds, small models of every family against whole matrices, what is said of few rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pair_cases import world_samples
from pair_reference import question
from realvr.diagnostics.base import Samples, Shown
from realvr.diagnostics.model import Model
from realvr.diagnostics.rank import Rank
from realvr.diagnostics.states import StateFiles
from realvr.evaluation.model_responder import ModelResponder

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
