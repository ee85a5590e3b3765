"""Position-wise variation: planted states, small models of every family against the stock span, groups by picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import DEVICE, tolerance
from pair_cases import world_samples
from pair_reference import question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Sample
from realvr.diagnostics.data import picture_key
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.states import StateFiles
from realvr.diagnostics.variation import Variation
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.maths.variation import unit

K = 3


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def planted(folder: Path, z: np.ndarray, pictures: list[str], batch: int = 4) -> dict[str, Any]:
    """The summary of states that are known: (n, K, D) of examples that show these pictures."""
    files, ids = StateFiles(folder / "variation-states"), [f"q{n}" for n in range(len(z))]
    rows = unit(np.concatenate([z, z.mean(1, keepdims=True)], axis=1)).astype(np.float16)
    for place in range(0, len(z), batch):
        files.write(place, ids[place : place + batch], {"units": rows[place : place + batch]})
    diagnostic = Variation()
    facts = zip(ids, pictures, strict=True)
    records = [{"id": name, "latents": z.shape[1], "picture": picture, "error": None} for name, picture in facts]
    return diagnostic.extend(diagnostic.summarise(records), {}, folder)


def pairwise(z: np.ndarray, pairs: list[tuple[int, int]], t: int) -> float:
    u = unit(z)
    return float(np.mean([1 - u[i, t] @ u[j, t] for i, j in pairs]))


def test_one_position_varies_and_the_gap_finds_it(tmp_path: Path) -> None:
    """Latent 2 has a direction of its own in every example, the others are fixed: V is 0, 1, 0, 0 and the gap 3/4."""
    z = np.ones((6, 4, 8)) * np.arange(1, 7)[:, None, None]
    z[:, 1] = np.eye(8)[:6]
    found = planted(tmp_path, z, [f"p{n}" for n in range(6)])
    assert [one["mean"] for one in found["examples"]["positions"]] == pytest.approx([0, 1, 0, 0], abs=2e-3)
    assert found["examples"]["gap"]["mean"] == pytest.approx(0.75, abs=2e-3) and found["examples"]["top"] == 2
    assert found["examples"]["chance"] < 0.3
    assert found["examples"]["pooled"]["mean"] < 0.05  # the mean latent hides it
    assert found["questions"]["count"] == 0 and found["questions"]["gap"]["mean"] is None


def test_groups_by_picture_against_loops_over_pairs(tmp_path: Path) -> None:
    z = np.random.default_rng(3).normal(size=(7, 2, 5)) + 1
    pictures = ["a", "b", "a", "c", "b", "a", "d"]
    found = planted(tmp_path, z, pictures)
    assert (found["pictures"], found["shared"], found["examples_read"]) == (4, 2, 7)
    for t in range(2):
        same = {
            name: [(i, j) for i in range(7) for j in range(7) if i != j and pictures[i] == pictures[j] == name]
            for name in "ab"
        }
        right = np.mean([pairwise(z, pairs, t) for pairs in same.values()])
        assert found["questions"]["positions"][t]["mean"] == pytest.approx(right, abs=2e-3)
        each = [np.mean([pairwise(z, [(i, j)], t) for j in range(7) if pictures[j] != pictures[i]]) for i in range(7)]
        assert found["examples"]["positions"][t]["mean"] == pytest.approx(np.mean(each), abs=2e-3)
    assert found["questions"]["count"] == 2 and found["examples"]["count"] == 7


PICTURES = [str(n) for n in range(30)]


def drawn(rng: np.random.Generator, spread: list[float], count: int = 30) -> np.ndarray:
    """Latents about a common direction, as far from it as each position's spread says."""
    return np.array([2.0, 0, 0, 0]) + np.array(spread)[:, None] * rng.normal(size=(count, len(spread), 4))


@pytest.mark.parametrize("questions", [1, 2])
def test_intervals_are_as_wide_as_new_data_would_vary(tmp_path: Path, questions: int) -> None:
    """Thirty samples of one population; with two questions on each picture that hardly differ, there are half as many
    values. Row means with their partners fixed would give half of the width."""
    rng, found = np.random.default_rng(7), []
    for number in range(30):
        z = drawn(rng, [0.5, 1.0, 2.0]).repeat(questions, axis=0) + 0.01 * rng.normal(size=(30 * questions, 3, 4))
        pictures = [str(n // questions) for n in range(len(z))]
        found.append(planted(tmp_path / str(number), z, pictures, 99)["examples"])
    assert found[0]["count"] == found[0]["gap"]["pairs"] == 30 * questions and found[0]["top"] == 3

    def close(numbers: list[dict[str, Any]]) -> None:
        width = np.mean([one["high"] - one["low"] for one in numbers]) / (2 * 1.96)
        assert width == pytest.approx(np.std([one["mean"] for one in numbers]), rel=0.25)

    for t in range(3):
        close([one["positions"][t] for one in found])
    close([one["all"] for one in found])
    close([one["gap"] for one in found])


def test_the_gap_of_equal_positions_is_chance(tmp_path: Path) -> None:
    """Positions that differ in nothing have a gap by noise alone, and the chance gap is of its size: over many samples
    of them the means agree. One position that varies more is far above it."""
    rng, gaps, chances = np.random.default_rng(4), [], []
    for number in range(40):
        found = planted(tmp_path / f"equal{number}", drawn(rng, [1.0] * 6), PICTURES, 99)["examples"]
        gaps.append(found["gap"]["mean"])
        chances.append(found["chance"])
    assert 0.01 < np.mean(chances) < 0.1
    assert np.mean(chances) == pytest.approx(np.mean(gaps), rel=0.1)
    found = planted(tmp_path / "one", drawn(rng, [1.0] * 5 + [2.0]), PICTURES)["examples"]
    assert found["top"] == 6 and found["gap"]["low"] > 2 * found["chance"]


def test_the_chance_gap_across_questions_shuffles_pictures(tmp_path: Path) -> None:
    """Two questions on each picture, latent 1 the same in both: 0 and 1 in one order or the other, 20 times."""
    z = np.zeros((40, 2, 40))
    z[:, 0, 0] = 1
    z[np.arange(40), 1, np.arange(40)] = 1
    found = planted(tmp_path, z, [str(n // 2) for n in range(40)])["questions"]
    assert found["gap"]["mean"] == pytest.approx(0.5, abs=1e-3) and found["count"] == 20
    coins = np.random.default_rng(0).binomial(20, 0.5, 100_000) / 20
    assert found["chance"] == pytest.approx(np.abs(coins - 0.5).mean(), abs=0.03)  # 0.088


def test_one_picture_and_one_latent(tmp_path: Path) -> None:
    one_picture = planted(tmp_path / "a", np.random.default_rng(5).normal(size=(3, 2, 4)), ["p"] * 3)
    assert one_picture["examples"]["count"] == 0 and one_picture["questions"]["count"] == 1
    single = planted(tmp_path / "b", np.random.default_rng(5).normal(size=(3, 1, 4)), list("abc"))
    assert single["examples"]["gap"]["mean"] is None and single["examples"]["chance"] is None
    assert any("K = 1" in line for line in Variation().notes([], single, 3))
    assert any("no two questions share a picture" in line for line in Variation().notes([], single, 3))
    for summary in (one_picture, single):
        figure = Variation().figure([Shown("m", summary)])
        assert figure is not None and Variation().drawn([Shown("m", summary)])
        assert "none" in str([text.get_text() for ax in figure.axes for text in ax.texts])


def test_nothing_was_read(tmp_path: Path) -> None:
    diagnostic = Variation()
    summary = diagnostic.extend(diagnostic.summarise([{"id": "x", "error": "gone"}]), {}, tmp_path)
    assert (
        summary["errors"] == 1
        and summary["examples"]["count"] == 0
        and diagnostic.figure([Shown("m", summary)]) is None
    )


def test_states_are_those_of_the_stock_span(pair: Any, tmp_path: Path) -> None:
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:2]
    model = Model(ModelResponder(pair.ours, Sampling(temperature=0.0, max_new=2)), K)
    states = StateFiles(tmp_path / "variation-states")
    records = list(Variation().measure(model, Samples(chosen, place=0, states=states)))
    rows = states.rows([sample.id for sample in chosen], "units")
    for sample, found in zip(chosen, rows, strict=True):
        _, z_BKD = pair.think(pair.begin([pair.ours.prompt([question(sample)])]), K)
        z = z_BKD[0].double().cpu().numpy()
        right = unit(np.concatenate([z, z.mean(0, keepdims=True)]))
        assert np.abs(found - right).max() < max(1e-3, tolerance(1e-3))
    assert [record["picture"] for record in records] == [picture_key(sample) for sample in chosen]


def test_questions_on_one_picture_from_the_command(
    build_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches of a run; the same picture under another file name is the same picture."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    small = backbone.save(tmp_path / "small")
    first, second = world_samples(1)[:2]
    asked = replace(first.turns[0], text="Is there anything blue?")
    data: list[Sample] = [first, replace(first, id="other question", turns=[asked]), second]
    write((replace(sample, pair=None) for sample in data), "jsonl", tmp_path / "data.jsonl")
    args = ["diagnose", "variation", str(small), str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*args, "--batch", "2", "--device", DEVICE]) == 0
    found = Variation.read(tmp_path / "out")
    assert found is not None
    summary = found[1]
    assert (summary["shared"], summary["pictures"]) == (1, 2) and summary["questions"]["count"] == 1
    assert 0 < summary["questions"]["all"]["mean"] < 2 and (tmp_path / "out" / "variation.svg").stat().st_size > 2000
    assert sorted(file.name for file in (tmp_path / "out" / "variation-states").iterdir()) == [
        "000000.safetensors",
        "000002.safetensors",
    ]
    assert "no two questions" not in capsys.readouterr().err


def test_two_models_of_another_k_are_drawn_side_by_side(tmp_path: Path) -> None:
    draw = np.random.default_rng(6).normal
    shown = [
        Shown(name, planted(tmp_path / name, draw(size=(5, k, 4)), list("aabcd")), number)
        for number, (name, k) in enumerate({"one": 2, "two": 12}.items())
    ]
    figure = Variation().figure(shown)
    assert figure is not None and len(figure.axes) == 4  # three panels and a scale
    tables = [widget for widget in Variation().drawn(shown) if hasattr(widget, "rows")]
    assert len(tables[0].rows) == 4 and len(tables[1].header) == 14
