"""Latent health: planted latents with known numbers, stock models over whole sequences, the summary, bad input."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from helpers import DEVICE, difference, tolerance
from pair_reference import content, question, readout
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import Sample
from realvr.diagnostics import Samples, Shown
from realvr.diagnostics.health import HealthTest
from realvr.diagnostics.health_summary import smallest_k, summarise_health
from realvr.diagnostics.measuring.health import Answering, HealthOptions, _drifts, _seed, drift, geometry, incomparable
from realvr.diagnostics.model import Model
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

K = 3
OPTIONS = HealthOptions(eta=0.3, group=0, temperature=0.6, seed=0, max_new=24)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def trails(count: int) -> list[Sample]:
    return list(samples(Recipe("trails", seed=3, count=count)))


def model_of(backbone: Backbone, latents: int = K, second: Model | None = None) -> Model:
    return Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=24)), latents, second)


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return Backbone.load("mini", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def tiny(build_tiny: Callable[[str], Path]) -> Backbone:
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")


# ---------------------------------------------------------------------- stock forwards


def test_readout_and_credit_are_the_stock_attention(pair: Any) -> None:
    """Of the right answer and of all wrong options, whichever is right; a question without options has no credit."""
    (first,) = trails(1)
    chosen = [replace(first, id=letter, answer=letter) for letter in "ABCD"]
    free = Sample.ask("free", first.images, "What is here?", "two small circles")
    answering = Answering(pair.ours, model_of(pair.ours).read([*chosen, free]), OPTIONS)
    others = answering.other_options()
    assert others == [["B", "C", "D"], ["A", "C", "D"], ["A", "B", "D"], ["A", "B", "C"], []]
    own_RK, gamma_RK = answering.readouts(others)
    sequence, _ = pair.think(pair.begin([pair.ours.prompt([question(first)])]), K)
    read = {letter: readout(pair, sequence, letter, K) for letter in "ABCD"}
    for row, letter in enumerate("ABCD"):
        assert difference(own_RK[row], read[letter]) < tolerance(1e-6)
        mean_K = torch.stack([read[answer] for answer in others[row]]).mean(0)
        assert difference(gamma_RK[row], (read[letter] - mean_K).clamp(min=0)) < tolerance(1e-6)
    assert float(gamma_RK.max()) > 30 * tolerance(1e-6)  # else nothing was compared
    sequence, _ = pair.think(pair.begin([pair.ours.prompt([question(free)])]), K)
    assert difference(own_RK[4], readout(pair, sequence, free.answer, K)) < tolerance(1e-6)
    assert gamma_RK[4].tolist() == [0] * K


def test_the_restored_curve_is_the_stock_model_on_each_mixed_span(pair: Any) -> None:
    """The whole formatted answer, from all means to all own latents."""
    chosen = trails(2)
    reading = model_of(pair.ours).read(chosen)
    assert reading.latents_RKD is not None
    mean_KD = reading.latents_RKD.float().mean(0)
    curve_RK = Answering(pair.ours, reading, OPTIONS).restored(mean_KD)
    assert curve_RK.shape == (2, K + 1)
    for row, sample in enumerate(chosen):
        begun = pair.begin([pair.ours.prompt([question(sample)])])
        ids, _ = content(pair, sample.answer)
        for k in range(K + 1):
            mixed = torch.cat([reading.latents_RKD[row, :k], mean_KD[k:].to(reading.latents_RKD)])
            sequence = pair.splice(begun, mixed[None])
            logp = reference.answer_logprobs(pair.stock, sequence, torch.tensor([ids], device=DEVICE))
            assert float(curve_RK[row, k]) == pytest.approx(float(logp.double().sum()), abs=tolerance(1e-4)), k
    assert float((curve_RK[:, 0] - curve_RK[:, -1]).abs().max()) > 1e-3  # the span matters here


# ---------------------------------------------------------------------- planted


def test_norms_and_neighbours_of_planted_latents() -> None:
    z = torch.tensor([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, -2.0]])
    found = geometry(z, [torch.tensor([[1.0, 0, 0], [0, 3.0, 0]]), torch.tensor([[0, 0, 5.0], [3.0, 0, 0]])])
    assert found["norm"] == [5, 10, 2, 2] and found["visual_norm"] == 3
    assert found["ratio"] == pytest.approx([5 / 3, 10 / 3, 2 / 3, 2 / 3], rel=1e-5)
    assert found["adjacent"] == pytest.approx([1, 0, -1])
    alone = geometry(z[:1].bfloat16(), [])
    assert alone["adjacent"] == [] and alone["ratio"] is None and alone["visual_norm"] is None


def test_drift_of_planted_latents() -> None:
    own = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    found = drift(own, torch.tensor([[2.0, 0.0], [0.0, -1.0]]))  # of another K: the first two
    assert found["cosine"] == pytest.approx([1, -1]) and found["relative"] == pytest.approx([0.5, 3])
    assert drift(own, own)["relative"] == [0, 0, 0]
    nothing = drift(own, torch.zeros(3, 2))
    assert nothing["cosine"] == [0, 0, 0] and all(map(math.isfinite, nothing["relative"]))


def test_models_that_cannot_be_compared(mini: Backbone, tiny: Backbone) -> None:
    assert incomparable(model_of(mini)) == "no second model was given"
    assert "has no latent span" in incomparable(model_of(mini, 8, model_of(mini, 0)))
    assert re.search(r"has width \d+, .* has 128", incomparable(model_of(mini, 8, model_of(tiny))))
    assert incomparable(model_of(mini, 8, model_of(mini, 3))) == ""


def test_the_smallest_k() -> None:
    assert smallest_k([-2.0, -1.5, -1.04, -1.0]) == 2  # 0.96 of 1
    assert smallest_k([-2.0, -1.5, -1.2, -1.0]) == 3
    assert smallest_k([-2.0, -0.5, -3.0, -1.0]) == 1  # it need not rise at every step
    assert smallest_k([-1.0, -1.0]) is None and smallest_k([-1.0, -0.9, -2.0]) is None
    assert smallest_k([-1.0, -1.0 + 1e-6]) is None  # rounding is no gain
    assert smallest_k([-1.0, -0.5]) == 1


def test_sampled_wrong_answers_are_those_of_a_rollout_with_the_same_seeds(mini: Backbone) -> None:
    """Question by question: neither the batch nor its order changes them."""
    chosen = trails(4)
    options = HealthOptions(eta=0.3, group=6, temperature=3.0, seed=5, max_new=24)
    found = Answering(mini, model_of(mini, 8).read(chosen), options).sampled_wrong()
    assert any(found)
    for sample, wrong in zip(chosen, found, strict=True):
        sampling = Sampling(temperature=3.0, max_new=24)
        done = rollout(mini, [mini.prompt([question(sample)])], group=6, sampling=sampling, seed=[_seed(5, sample.id)])
        said = [re.findall(r"<answer>([A-D])</answer>", one.text) for one in done.completions[0]]
        expected = dict.fromkeys(one[0] for one in said if len(one) == 1 and one[0] != sample.answer)
        assert wrong == list(expected)


# ---------------------------------------------------------------------- the summary


def record(id: str, **fields: Any) -> dict[str, Any]:
    credit = {"wrong": 1, "gamma": [0.1, 0.0], "movable": 0.2}
    usual = {"norm": [1.0, 3.0], "visual_norm": 2.0, "ratio": [0.5, 1.5], "adjacent": [0.5], "drift": None}
    more = {"logp": [-3.0, -2.0, -1.0], "readout": [0.1, 0.2], "sampled": credit, "options": credit}
    return {
        "id": id,
        "latents": 2,
        "group": "",
        **usual,
        **more,
        "no_drift": "no second model was given",
        "error": None,
        **fields,
    }


def test_the_summary_by_hand() -> None:
    none = {"wrong": 0, "gamma": [0.0, 0.0], "movable": 0.0}
    records = [
        record("1"),
        record("2", logp=[-1.0, -1.0, -2.0], sampled=none, options=None),
        record("3", logp=[-2.0, -1.0, -1.0], ratio=None, visual_norm=None, sampled=none),
        {"id": "4", "error": "broken"},
    ]
    summary = summarise_health(records, 0.3, 8, 0)
    assert summary["questions"] == 3 and summary["errors"] == 1 and summary["latents"] == 2
    assert summary["norm"]["mean"] == 2 and summary["ratio"] | {"low": 0, "high": 0} == {
        "mean": 1,
        "low": 0,
        "high": 0,
        "pairs": 2,
    }
    assert summary["gain"]["mean"] == pytest.approx((2 - 1 + 1) / 3) and summary["without_gain"] == 1
    assert summary["k95"]["mean"] == 1.5 and summary["k95"]["pairs"] == 2
    assert {k: one["count"] for k, one in summary["k95_shares"].items()} == {"1": 1, "2": 1, "none": 1}
    assert summary["k95_of_mean"] == 1  # -2, -4/3, -4/3
    assert summary["readout_mass"]["mean"] == pytest.approx(0.3)
    sampled, options = summary["sampled"], summary["options"]
    assert (sampled["questions"], sampled["with_wrong"], options["questions"]) == (3, 1, 2)
    assert sampled["gamma"]["mean"] == pytest.approx(0.1 / 3) and sampled["gamma_with_wrong"]["mean"] == 0.1
    assert (
        summary["steps"][1]["gain"]["mean"] == summary["gain"]["mean"] and summary["steps"][1]["adjacent"]["pairs"] == 0
    )
    assert summary["drift"]["reason"] == "no second model was given" and summary["drift"]["cosine"]["mean"] is None
    grouped = summarise_health([record("1", group="7"), record("2", group="x"), record("3", group="7")], 0.3, 8, 0, "t")
    assert {name: one["questions"] for name, one in grouped["groups"].items()} == {"7": 2, "x": 1}
    assert grouped["groups"]["7"]["k95"]["mean"] == 2 and grouped["by"] == "t" and not summary["groups"]
    moved = [record(str(n), drift={"cosine": [1.0], "relative": [0.5]}, no_drift="") for n in range(2)]
    drifted = HealthTest().summarise(moved)
    assert drifted["drift"]["reason"] == "" and drifted["drift"]["latents"] == 1
    assert drifted["drift"]["relative"]["mean"] == 0.5 and drifted["steps"][1]["drift"]["mean"] is None
    assert any("first 1 of 2 latents" in line for line in HealthTest().notes(moved, drifted, 2))


def test_nothing_to_show_is_drawn_as_nothing() -> None:
    one_latent = record("1", latents=1, norm=[1.0], ratio=[1.0], adjacent=[], logp=[-1.0, -1.0], readout=[0.1])
    for records in ([record("1")], [one_latent], [{"id": "1", "error": "broken"}], []):
        summary = HealthTest().summarise(records)
        json.dumps(summary, allow_nan=False)
        assert HealthTest().drawn([Shown("a model", summary), Shown("another", summary, 1)])
    for records, drawn in (([record("1")], [True, True, False, True]), ([one_latent], [True, False, False, True])):
        summary = HealthTest().summarise(records)
        figure = HealthTest().figure([Shown("a model", summary), Shown("another", summary, 1)])
        assert figure is not None and len(figure.axes) == 6
        assert [len(axes.lines) == 2 for axes in figure.axes[:4]] == drawn
        words = [[text.get_text() for text in axes.texts] for axes in figure.axes[:4]]
        assert [found == ["none"] for found in words] == [not one for one in drawn]
        assert len(figure.axes[4].patches) == 2 * (summary["latents"] + 1) and len(figure.axes[5].patches) == 2 * 5
    panel = HealthTest().panel(record("1", drift={"cosine": [0.5], "relative": [0.1]}))
    assert panel is not None and [len(one.values) for one in panel.parts[0].series] == [2] * 5  # type: ignore[union-attr]
    assert HealthTest().panel({"id": "1", "error": "broken"}) is None


# ---------------------------------------------------------------------- runs


def test_an_answer_without_content_is_an_error_of_that_question(tiny: Backbone) -> None:
    (first,) = trails(1)
    empty = Sample.ask("empty", first.images, "What?", "")
    model = model_of(tiny)
    test = HealthTest.configure({"group": 0})
    test.prepare(model, [first, empty])
    found = {record["id"]: record["error"] for record in test.measure(model, Samples([first, empty]))}
    assert found[first.id] is None and "no token of its own" in str(found["empty"])


def test_a_run_of_the_packaged_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Latents of the size of visual tokens that gain; a second model without a span cannot be compared."""
    write(iter(trails(8)), "jsonl", tmp_path / "data.jsonl")
    command = ["diagnose", "health", "mini", str(tmp_path / "data.jsonl"), "--second-model", "mini-base"]
    assert main([*command, "--out", str(tmp_path / "out"), "--group", "2", "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "out" / "health.json").read_text())
    assert 0.8 < found["ratio"]["mean"] < 1.2 and found["gain"]["mean"] > 0.5
    assert "mini-base has no latent span" in found["drift"]["reason"] and found["drift"]["cosine"]["mean"] is None
    assert "no drift: mini-base has no latent span" in capsys.readouterr().err
    assert (tmp_path / "out" / "health.svg").stat().st_size and (tmp_path / "out" / "health.png").stat().st_size


def test_drift_is_measured_on_the_same_questions(mini: Backbone) -> None:
    """Against itself with a shorter span there is none."""
    chosen = trails(2)
    model = model_of(mini, 8, model_of(mini, 5))
    found = _drifts(model, model.read(chosen))
    assert set(found) == {sample.id for sample in chosen}
    for one in found.values():
        assert len(one["cosine"]) == 5 and max(one["relative"]) < 1e-4
