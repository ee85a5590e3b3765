"""Counterfactual sensitivity: the same answers and distances as the diagnostics it joins; flips by hand; seeds; the
broken axis; the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

from pair_cases import world_pairs, world_samples
from pair_reference import greedy, question
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import ImageRef
from realvr.diagnostics.counterfactual import Counterfactual
from realvr.diagnostics.edits import broken_groups
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.diagnostics.measuring.sensitivity import sensitivity_pairs
from realvr.diagnostics.measuring.views import measure_distances, read_views
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import unrelated
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.seeds import across, arms
from realvr.diagnostics.sensitivity import Sensitivity
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.widgets import tables_of

K, NEW = 3, 4
SHORT = Sampling(temperature=0.0, max_new=NEW)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_answers_and_slot_distances_are_those_of_the_stock_model(pair: Any) -> None:
    one = world_pairs(1)[1]
    (record,) = sensitivity_pairs(Model(ModelResponder(pair.ours, SHORT), K), [one], [None], "strict")
    spans, texts = [], []
    for view in one.views:
        sequence, z = pair.think(pair.begin([pair.ours.prompt([question(view)])]), K)
        spans.append(z[0].double())
        texts.append(pair.ours.tokenizer.decode(greedy(pair, sequence, NEW)))
    assert record["texts"] == texts
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(*spans, strict=True)]
    assert record["per_slot"] == pytest.approx(1 - sum(cosines) / K, abs=1e-5) and record["per_slot"] > 1e-6


def test_it_joins_separate_conversations_and_distances(build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """The same replies and distances as the two diagnostics give, also for a pair that cannot be read."""
    backbone = Backbone.load(build_tiny("qwen3-vl"), dtype=torch.float32, device="cpu")
    pairs = world_pairs(2)[:6]
    gone = replace(pairs[1].edited, images=[ImageRef.from_path(tmp_path / "gone.png")])
    pairs[1] = replace(pairs[1], edited=gone)
    controls = unrelated(pairs)
    for latents in (0, K):
        model = Model(ModelResponder(backbone, SHORT), latents)
        records = {record["pair"]: record for record in sensitivity_pairs(model, pairs, controls, "strict")}
        apart = measure_distances(read_views(backbone, pairs, controls, latents))
        for other in apart:
            assert records[other["pair"]].items() >= other.items()
        for other in ask_pairs(model.responder, pairs, [("separate", "none")], latents):
            record = records[other["pair"]]
            assert record["truths"] == other["truths"]
            if record["error"] is None:
                assert record["texts"] == other["texts"] and record["extracted"] == other["extracted"]
        broken = records[pairs[1].id]
        assert "gone.png" in broken["error"] and broken["extracted"] == [None, None] and broken["latent"] is None
        summary = Sensitivity().summarise(list(records.values()))
        assert summary["errors"] == 1 and summary["all"]["pairs"] == 6 and summary["all"]["final"]["pairs"] == 5
        assert (summary["all"]["latent"]["mean"] is None) == (latents == 0)
        assert "count as wrong, and as no flip" in Sensitivity().notes(list(records.values()), summary, 6)[0]
        assert Sensitivity().figure([Shown("m", summary)]) is not None


# ---------------------------------------------------------------------- numbers by hand


def record(name: str, edit: str, truths: str, said: str, latent: float, final: float) -> dict[str, Any]:
    """Truths and answers as two letters each, ``-`` where nothing can be parsed."""
    extracted = [None if letter == "-" else letter for letter in said]
    return {
        "pair": name,
        "edit": edit,
        "latents": 2,
        "truths": list(truths),
        "extracted": extracted,
        "choices": ["red", "blue", "green"],
        "latent": latent,
        "latent_unrelated": 10 * latent,
        "per_slot": 2 * latent,
        "final": final,
        "final_unrelated": None,
        "no_control": None,
        "errors": [None, None],
        "error": None,
    }


RECORDS = [
    record("1", "turn", "AB", "AB", 0.4, 0.8),  # flips, and rightly
    record("2", "turn", "AB", "AC", 0.2, 0.6),  # flips elsewhere
    record("3", "turn", "AB", "BB", 0.1, 0.1),  # reaches the edited truth without a flip
    record("4", "turn", "AA", "AC", 0.3, 0.2),  # a false flip
    record("5", "turn", "AB", "A-", 0.1, 0.3),
    record("6", "still", "AA", "AA", 0.0, 0.0),
]


def test_flips_by_hand() -> None:
    found = Sensitivity().summarise(RECORDS)
    turn, still = found["edits"]["turn"], found["edits"]["still"]
    counts = {name: (turn[name]["count"], turn[name]["of"]) for name in ("should_flip", "model_flip")}
    assert counts == {"should_flip": (4, 5), "model_flip": (3, 5)}
    reached = [
        (turn[f"correct_flip_of_{of}"]["count"], turn[f"correct_flip_of_{of}"]["of"]) for of in ("all", "changed")
    ]
    assert reached == [(2, 5), (2, 4)]
    assert (turn["strict_correct_flip"]["count"], turn["false_flip"]["of"]) == (1, 1)
    assert turn["latent"]["mean"] == pytest.approx(0.22) and turn["latent_unrelated"]["mean"] == pytest.approx(2.2)
    assert turn["final_unrelated"] == {"mean": None, "low": None, "high": None, "pairs": 0}
    # Flipped: 1, 2, 4; kept: 3, 5.
    assert turn["flipped_minus_kept"]["latent"]["mean"] == pytest.approx(0.3 - 0.1)
    assert turn["flipped_minus_kept"]["final"]["mean"] == pytest.approx(1.6 / 3 - 0.2)
    assert still["flipped_minus_kept"]["latent"]["mean"] is None and still["strict_correct_flip"]["rate"] is None
    assert found["macro"]["model_flip"]["rate"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["macro"]["false_flip"]["edits"] == 2 and found["macro"]["strict_correct_flip"]["edits"] == 1


def test_distance_can_grow_without_the_answer() -> None:
    """Latents that move far under answers that stay: large distances, no flip, and a difference that says so."""
    records = [record(str(n), "turn", "AB", "AA" if n % 2 else "AB", 0.5 + 0.1 * (n % 2), 0.5) for n in range(40)]
    turn = Sensitivity().summarise(records)["edits"]["turn"]
    assert turn["latent"]["mean"] == pytest.approx(0.55)
    assert turn["flipped_minus_kept"]["latent"]["high"] < 0 and turn["flipped_minus_kept"]["final"]["mean"] == 0.0


# ---------------------------------------------------------------------- seeds


def scaled(factor: float, flips: str = "AB") -> Any:
    records = [record(r["pair"], r["edit"], "AB", flips, factor * r["latent"], factor * r["final"]) for r in RECORDS]
    return Sensitivity().summarise(records)


def test_names_that_differ_in_their_seed_are_one_arm() -> None:
    names = [
        "realvr-seed0",
        "lvr",
        "realvr-seed1",
        "realvr_seed-12",
        "direct-s1",
        "direct-s2",
        "lone-seed3",
        "mini-short",
    ]
    found = {
        arm.name: [one.number for one in arm.results] for arm in arms([Shown(n, {}, i) for i, n in enumerate(names)])
    }
    assert found == {"realvr": [0, 2, 3], "lvr": [1], "direct": [4, 5], "lone-seed3": [6], "mini-short": [7]}
    assert across([1.0, 4.0, None, 7.0]) == {"mean": 4.0, "std": pytest.approx(stdev([1, 4, 7])), "seeds": 3}
    assert across([2.0]) == {"mean": 2.0, "std": None, "seeds": 1} and across([None])["mean"] is None


def test_seeds_are_shown_as_mean_and_deviation() -> None:
    results = [Shown("a-seed0", scaled(1.0), 0), Shown("a-seed1", scaled(1.0, "AA"), 1), Shown("b", scaled(1.0), 2)]
    (table,) = [t for t in tables_of(Sensitivity().drawn(results)) if t.caption.startswith("Over training seeds")]
    (row,) = table.rows
    cells = dict(zip(table.header, row, strict=True))
    assert cells["arm"] == "a" and cells["seeds"] == "2"
    assert cells["model flip, %"].text == "50.0" and cells["model flip, %"].below == "± 70.7"  # type: ignore[union-attr]
    figure = Sensitivity().figure(results)
    assert figure is not None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["should flip", "a (2 seeds)", "b"]
    whole = Counterfactual()
    rates = {"edits": {}, "all": {"changed": 1, "unchanged": 1}}
    for name, value in (("two", 0.2), ("four", 0.4)):
        macro = {key: {"edits": 4, "rate": value, "low": value, "high": value} for key in _MACRO}
        rates[name] = {"protocols": {"two-turn/keep": rates | {"macro": macro}}, "distances": None}  # type: ignore[assignment]
    drawn = whole.drawn([Shown("r-seed1", rates["two"]), Shown("r-seed2", rates["four"])])
    (table,) = [t for t in tables_of(drawn) if "seeds" in t.caption]
    assert table.rows[0][2].text == "30.0" and table.rows[0][2].below == "± 14.1"  # type: ignore[union-attr]


_MACRO = (
    "original_accuracy",
    "edited_accuracy",
    "prediction_change",
    "strict_correct_flip",
    "false_flip",
    "parse_coverage",
)


# ---------------------------------------------------------------------- the figure


def test_the_axis_is_broken_only_where_models_are_far_apart() -> None:
    assert broken_groups([0.5, 0.06, 0.3]) == [[0, 1, 2]] and broken_groups([0.5]) == [[0]]
    assert broken_groups([0.0003, 0.5, 0.0002, 0.4]) == [[1, 3], [0, 2]]
    assert broken_groups([0.5, 0.0]) == [[0], [1]] and broken_groups([0.0, 0.0]) == [[0, 1]]
    near = Sensitivity().figure([Shown("a", scaled(1.0), 0), Shown("b", scaled(0.2), 1)])
    far = Sensitivity().figure([Shown("a", scaled(1.0), 0), Shown("b", scaled(0.001), 1)])
    assert near is not None and far is not None and len(near.axes) == 4 and len(far.axes) == 6
    upper, lower = [axes for axes in far.axes if axes.get_subplotspec().get_gridspec().nrows == 2][-2:]  # type: ignore[union-attr]
    assert lower.get_ylim()[0] == 0.0 and lower.get_ylim()[1] < upper.get_ylim()[0]
    assert Sensitivity().figure([]) is None
    spanless = scaled(1.0)
    for row in (*spanless["edits"].values(), spanless["all"]):
        row["latent"] = {"mean": None, "low": None, "high": None, "pairs": 0}
    figure = Sensitivity().figure([Shown("direct", spanless)])
    assert figure is not None and any("no model has a span" in t.get_text() for a in figure.axes for t in a.texts)


# ---------------------------------------------------------------------- the command


def test_the_command(build_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, single, out = tmp_path / "pairs.jsonl", tmp_path / "single.jsonl", tmp_path / "out"
    write(iter(world_samples(2)), "jsonl", data)
    write((replace(s, pair=None) for s in world_samples(1)), "jsonl", single)
    given = ["--out", str(out), "--max-new", "2", "--device", "cpu"]
    model = str(build_tiny("qwen2.5-vl"))  # without a span
    assert main(["diagnose", "sensitivity", model, str(single), *given]) == 2
    assert "no counterfactual pair found" in capsys.readouterr().err and not out.exists()
    assert main(["diagnose", "sensitivity", model, str(data), *given]) == 0
    summary = json.loads((out / "sensitivity.json").read_text())
    assert len(summary["edits"]) == 4 and summary["all"]["pairs"] == 8 and summary["latents"] == 0
    assert summary["all"]["latent"]["mean"] is None and summary["all"]["final"]["mean"] > 0
    assert (out / "sensitivity.svg").stat().st_size > 2000 and "## Distances" in (out / "sensitivity.md").read_text()
