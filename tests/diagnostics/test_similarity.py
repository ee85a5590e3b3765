"""Similarity of latents: small models of every family against stock states, normalisations against direct linear
algebra, bad input, ``--latents evidence``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
from helpers import DEVICE, tolerance
from pair_cases import world_samples
from pair_reference import greedy, question
from realvr.cli import main
from realvr.data.sample import Box
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown, Skip
from realvr.diagnostics.similarity import Similarity, SimilaritySettings
from realvr.diagnostics.similarity_states import tasks
from realvr.diagnostics.states import StateFiles
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from stage_runs import with_markers, world, write

K = 3
SHORT = Sampling(temperature=0.0, max_new=5)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def neighbours(rows: np.ndarray) -> float:
    directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float(np.mean(np.sum(directions[1:] * directions[:-1], axis=1)))


def test_states_are_those_of_the_stock_model(pair: Any, tmp_path: Path) -> None:
    """Latents, dummy tokens and the reply of two questions in one batch."""
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:2]
    chosen[1] = replace(chosen[1], turns=[replace(chosen[1].turns[0], text="A longer question: what is it, please?")])
    files = StateFiles(tmp_path / "similarity-states")
    model = Model(ModelResponder(pair.ours, SHORT), K)
    records = {r["id"]: r for r in Similarity().measure(model, Samples(chosen, states=files))}
    stored = {
        kind: dict(files.several([sample.id for sample in chosen], kind))
        for kind in ("latents", "dummies", "ordinary", "context")
    }
    stop = pair.ours.tokenizer.encode(".", add_special_tokens=False)
    for sample in chosen:
        prompt = pair.begin([pair.ours.prompt([question(sample)])])
        begun, z = pair.think(prompt, K)
        ids = greedy(pair, begun, K)
        fake = reference.append(
            pair.stock, prompt, torch.tensor([[pair.ours.markers.start, *(stop * K)[:K]]]).to(DEVICE)
        )
        reply = reference.append(pair.stock, begun, torch.tensor([ids], device=DEVICE)) if ids else begun
        right = {
            "latents": z[0],
            "dummies": reference.hidden(pair.stock, fake)[0, -K:],
            "ordinary": reference.hidden(pair.stock, reply)[0, reply.ids.shape[1] - len(ids) :],
            "context": reference.hidden(pair.stock, prompt)[0, -1:],
        }
        for kind, rows in right.items():
            found = torch.from_numpy(stored[kind][sample.id])
            assert found.shape == rows.shape, kind
            torch.testing.assert_close(found, rows.float().cpu(), atol=tolerance(2e-4), rtol=1e-3)
        record, z_KD = records[sample.id], z[0].double().cpu().numpy()
        assert record["adjacent"]["latents"] == pytest.approx(neighbours(z_KD), abs=tolerance(1e-5))
        unit = z_KD / np.linalg.norm(z_KD, axis=1, keepdims=True)
        different = (unit @ unit.T)[~np.eye(K, dtype=bool)]
        assert record["off_diagonal"] == pytest.approx(different.mean(), abs=tolerance(1e-5))
        assert record["maximum"] == pytest.approx(different.max(), abs=tolerance(1e-5))


# ---------------------------------------------------------------------- constructed states

WIDTH = 6


def constructed(folder: Path, count: int, latents: int = 4) -> tuple[Similarity, dict[str, Any], dict[str, np.ndarray]]:
    """States of ``count`` questions of two tasks: latents follow the context and their task."""
    rng = np.random.default_rng(1)
    names = [f"q{n}" for n in range(count)]
    context = rng.normal(size=(count, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH))
    z = context[:, None] @ rng.normal(size=(WIDTH, WIDTH)) + rng.normal(size=(count, latents, WIDTH)) * 0.5 + 3
    z[::2] += 2 * rng.normal(size=WIDTH)
    kinds = {
        "latents": z,
        "dummies": rng.normal(size=(count, latents, WIDTH)) + 1,
        "ordinary": rng.normal(size=(count, 3, WIDTH)),
    }
    arrays = {kind: rows.astype(np.float32) for kind, rows in (kinds | {"context": context[:, None]}).items()}
    files = StateFiles(folder / "similarity-states")
    for place in range(0, count, 5):
        files.write(
            place, names[place : place + 5], {}, {kind: list(rows[place : place + 5]) for kind, rows in arrays.items()}
        )
    records = [
        {
            "id": name,
            "group": "even" if n % 2 == 0 else "odd",
            "latents": latents,
            "off_diagonal": 0.5,
            "maximum": 0.9,
            "adjacent": {kind: neighbours(arrays[kind][n]) if arrays[kind].shape[1] > 1 else None for kind in kinds},
            "error": None,
        }
        for n, name in enumerate(names)
    ]
    similarity = Similarity()
    summary = similarity.extend(similarity.summarise(records), {}, folder)
    return similarity, summary, {kind: rows.astype(np.float64) for kind, rows in arrays.items()}


def test_normalisations_are_those_of_direct_linear_algebra(tmp_path: Path) -> None:
    """Eigendecomposition of the whole covariance, least squares over all rows, cosines of all pairs."""
    _, summary, states = constructed(tmp_path, 40)
    for kind in ("latents", "dummies", "ordinary"):
        rows = states[kind].reshape(-1, WIDTH)
        values, vectors = np.linalg.eigh(np.cov(rows.T))
        white = vectors @ np.diag(values**-0.5) @ vectors.T
        centred = states[kind] - rows.mean(0)
        assert summary["adjacent"]["centred"][kind]["mean"] == pytest.approx(np.mean([neighbours(z) for z in centred]))
        told = summary["adjacent"]["whitened"][kind]["mean"]
        assert told == pytest.approx(np.mean([neighbours(z @ white) for z in centred]))
        assert summary["shrinkage"][kind] == {"rows": len(rows), "width": WIDTH, "amount": 0.0}
    count, latents = states["latents"].shape[:2]
    design = np.concatenate([np.ones((count * latents, 1)), states["context"].repeat(latents, 1).reshape(-1, WIDTH)], 1)
    z = states["latents"].reshape(-1, WIDTH)
    residual = (z - design @ np.linalg.lstsq(design, z, rcond=None)[0]).reshape(count, latents, WIDTH)
    assert summary["residualised"]["mean"] == pytest.approx(np.mean([neighbours(one) for one in residual]))
    means = states["latents"].mean(1)
    norms = np.linalg.norm(means, axis=1)
    cosine = means @ means.T / np.outer(norms, norms)
    same = np.equal.outer(np.arange(count) % 2, np.arange(count) % 2) & ~np.eye(count, dtype=bool)
    other = np.not_equal.outer(np.arange(count) % 2, np.arange(count) % 2)
    assert summary["same_task"]["mean"] == pytest.approx(cosine[same].mean())
    assert summary["different_task"]["mean"] == pytest.approx(cosine[other].mean())
    assert summary["same_task"]["mean"] > summary["different_task"]["mean"] and summary["tasks"] == 2
    raw, minus = summary["adjacent"]["raw"], summary["minus_ordinary"]["raw"]["mean"]
    assert minus == pytest.approx(raw["latents"]["mean"] - raw["ordinary"]["mean"])


def test_cosines_between_questions_have_intervals_as_wide_as_new_questions_would_vary(tmp_path: Path) -> None:
    """Thirty samples of one population of two tasks. A question is a partner of all others: resampling the means of
    single questions with their partners fixed would give half of the width."""
    rng, found = np.random.default_rng(5), []
    names = {f"q{n}": "even" if n % 2 == 0 else "odd" for n in range(30)}
    for number in range(30):
        z = rng.normal(size=(30, 2, 4)) + np.array([2.0, 0, 0, 0])
        files = StateFiles(tmp_path / str(number))
        files.write(0, list(names), {}, {"latents": list(z.astype(np.float32))})
        found.append(tasks(files, names) | {"all": tasks(files, dict.fromkeys(names, ""))["same_task"]})
    for key in ("same_task", "different_task", "all"):
        width = np.mean([one[key]["high"] - one[key]["low"] for one in found]) / (2 * 1.96)
        assert width == pytest.approx(np.std([one[key]["mean"] for one in found]), rel=0.3), key
        assert found[0][key]["pairs"] == 30


def test_fewer_questions_than_dimensions_are_said_with_the_shrinkage(tmp_path: Path) -> None:
    similarity, summary, _ = constructed(tmp_path, 4)
    found = summary["shrinkage"]["contexts"]
    assert found["rows"] == 4 and 0 < found["amount"] <= 1 and summary["shrinkage"]["latents"]["amount"] == 0
    assert all(np.isfinite(one["mean"]) for own in summary["adjacent"].values() for one in own.values())
    assert any("contexts: 4 in 6 dimensions; covariance shrunk by" in line for line in similarity.notes([], summary, 4))
    assert "shrinkage: contexts" in str(similarity.drawn([Shown("m", summary)]))
    fixed = Similarity(SimilaritySettings(shrinkage=0.3))
    fixed._good = similarity._good
    assert {one["amount"] for one in fixed.extend(summary, {}, tmp_path)["shrinkage"].values()} == {0.3}


def test_one_task_one_latent_and_nothing(tmp_path: Path) -> None:
    similarity, summary, _ = constructed(tmp_path, 8, latents=1)
    assert summary["adjacent"]["whitened"]["latents"]["mean"] is None and summary["residualised"]["mean"] is None
    told = "\n".join(similarity.notes([], summary, 8))
    assert "one latent has no neighbour" in told
    similarity._good = tuple((name, "all") for name, _ in similarity._good)
    alone = similarity.extend(summary | {"tasks": 1}, {}, tmp_path)
    assert alone["different_task"]["mean"] is None and alone["same_task"]["mean"] is not None
    assert "all questions are of one task" in "\n".join(similarity.notes([], alone, 8))
    assert similarity.figure([Shown("m", alone)]) is not None and "–" in similarity.side_by_side([Shown("m", alone)])
    empty = Similarity()
    nothing = empty.extend(empty.summarise([{"id": "x", "error": "gone"}]), {}, tmp_path)
    assert (
        nothing["questions"] == 0 and empty.figure([Shown("m", nothing)]) is None and empty.drawn([Shown("m", nothing)])
    )


def test_the_figure_has_a_panel_for_each_model_and_two_more(tmp_path: Path) -> None:
    similarity, summary, _ = constructed(tmp_path, 12)
    for count in (1, 3, 27):
        figure = similarity.figure([Shown(f"m{n}", summary, n) for n in range(count)])
        assert figure is not None and len(figure.axes) == count + 2 and all(ax.patches for ax in figure.axes)
        titles = [(ax.get_title(loc="left") or ax.get_title()).partition(" ")[0] for ax in figure.axes]
        assert titles[:2] == ["(a)", "(b)"] and len(set(titles)) == count + 2
    assert titles[25:29] == ["(z)", "(aa)", "(ab)", "(ac)"]


# ---------------------------------------------------------------------- as many latents as evidence tokens


def test_latents_evidence_takes_the_number_of_evidence_tokens(build_tiny: Any, tmp_path: Path) -> None:
    """From the command line; samples without boxes are left out, and data without any is refused."""
    samples = world(6)[:3]
    samples[0] = replace(samples[0], boxes=[Box(0, (0.0, 0.0, 1.0, 1.0))])
    samples[1] = replace(samples[1], boxes=[Box(0, (0.1, 0.1, 0.4, 0.9))])
    samples[2] = replace(samples[2], boxes=[])
    model, data = with_markers(build_tiny("qwen2.5-vl"), tmp_path / "model"), write(samples, tmp_path)
    out = tmp_path / "out"
    run = ["diagnose", "similarity", str(model), str(data), "--out", str(out), "--device", "cpu", "--max-new", "4"]
    assert main([*run, "--latents", "evidence"]) == 0
    lengths = [json.loads(line)["latents"] for line in (out / "similarity.jsonl").read_text().splitlines()]
    assert lengths == [4, 2]  # of 2 x 2 visual tokens
    summary = json.loads((out / "similarity.json").read_text())
    assert summary["length"] == "evidence" and summary["latents"]["mean"] == sum(lengths) / 2
    with pytest.raises(Skip, match="no sample has evidence boxes"):
        Similarity(SimilaritySettings(length="evidence")).select(samples[2:], data)
