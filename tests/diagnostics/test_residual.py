"""Residual injection: on small models of every family against stock models over whole sequences; its numbers by hand;
the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tolerance
from pair_cases import world_pairs, world_samples
from pair_reference import greedy, mean_logprob, question
from realvr.answers import parser
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import ImageRef
from realvr.diagnostics.measuring.exchange import ExchangeOptions, exchange_pairs, recipients_of
from realvr.diagnostics.measuring.residual import ResidualOptions, control_seed, residual_pairs
from realvr.diagnostics.measuring.views import read_views
from realvr.diagnostics.pairs import Pair
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.residual import Residual, parse_alphas
from realvr.diagnostics.residual_summary import halves, summarise_residual
from realvr.errors import UserError
from realvr.latent.sampling import Sampling
from realvr.maths.injection import random_direction, residual

K, NEW = 3, 4
SHORT = Sampling(temperature=0.0, max_new=NEW)
ALPHAS = (0.0, 0.5, 1.0, 3.0)
OPTIONS = ResidualOptions(K, ALPHAS, 1, sampling=SHORT)
WAYS = {"edited-to-original": (0, 1), "original-to-edited": (1, 0)}  # recipient, donor


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def changed(count: int) -> list[Pair]:
    return [one for one in world_pairs(count) if one.changed][:count]


def test_the_step_is_exact_at_both_ends_and_the_control_as_long() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        own, other = torch.randn(2, 5, 32).to(dtype)
        assert torch.equal(residual(own, other, 0.0), own) and torch.equal(residual(own, other, 1.0), other)
        assert residual(own, other, 3.0).dtype == dtype
    own, other = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.allclose(residual(own, other, 2.5), own + 2.5 * (other - own))
    like = torch.randn(5, 32) * torch.tensor([0.0, 1e-3, 1, 10, 1e4])[:, None]
    drawn = random_direction(like, 7)
    assert torch.allclose(drawn.norm(dim=-1), like.norm(dim=-1)) and (drawn[0] == 0).all()
    assert torch.equal(drawn, random_direction(like, 7)) and not torch.equal(drawn, random_direction(like, 8))
    many = random_direction(torch.ones(4000, 8), 1)
    assert float((many / 8**0.5).mean(0).abs().max()) < 0.05, "no direction is preferred"


def test_every_alpha_is_the_stock_model_on_that_span(pair: Any) -> None:
    """Answers and margins of both directions, of the injection and of its control."""
    (one,) = changed(1)
    alphas = (0.0, 0.5, 3.0)
    (record,) = residual_pairs(pair.ours, [one], replace(OPTIONS, alphas=alphas, sampling=replace(SHORT, max_new=2)))
    prompts = [pair.begin([pair.ours.prompt([question(view)])]) for view in one.views]
    spans = [pair.think(prompt, K)[1][0] for prompt in prompts]
    truths = [one.original.answer, one.edited.answer]
    drawn = {r.direction: r for r in recipients_of(read_views(pair.ours, [one], [None], K))}
    reader = parser("strict", "evaluation")
    moved = 0.0
    for direction, (recipient, donor) in WAYS.items():
        side, own, step = record["directions"][direction], spans[recipient], spans[donor] - spans[recipient]
        assert (side["recipient_truth"], side["donor_truth"]) == (truths[recipient], truths[donor])
        assert side["step"] == pytest.approx(step.norm(dim=-1).tolist(), rel=1e-3)
        elsewhere = random_direction(step, control_seed(drawn[direction], 0))
        for told, vector in ((side["inject"], step), (side["random"][0], elsewhere)):
            for place, alpha in enumerate(alphas):
                sequence = pair.splice(prompts[recipient], (own + alpha * vector)[None])
                text = pair.ours.tokenizer.decode(greedy(pair, sequence, 2))
                assert told["extracted"][place] == reader.read(text, one.original.choices)
                scores = [mean_logprob(pair, sequence, truths[view]) for view in (recipient, donor)]
                assert told["margin"][place] == pytest.approx(scores[1] - scores[0], abs=tolerance(4e-5))
            moved = max(moved, abs(told["margin"][-1] - told["margin"][0]))
    assert moved > 2e-4, "the span matters to the model, or this would show nothing"


@pytest.fixture(scope="module")
def small(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with trained markers, as far as its files tell."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    return backbone.save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def loaded(small: Path) -> Backbone:
    return Backbone.load(small, dtype=torch.float32, device="cpu")


def test_one_step_is_the_full_exchange_and_none_the_sham(loaded: Backbone) -> None:
    pairs = changed(3)
    exchanged = exchange_pairs(loaded, pairs, [None] * 3, ExchangeOptions(latents=K, ks=(1,), seeds=1, sampling=SHORT))
    by = {(r["pair"], r["direction"], r["condition"], r["selector"]): r for r in exchanged}
    for record in residual_pairs(loaded, pairs, OPTIONS):
        for direction, side in record["directions"].items():
            for place, (condition, selector) in ((0, ("sham", "full")), (2, ("swap", "full"))):
                other = by[record["pair"], direction, condition, selector]
                assert side["inject"]["extracted"][place] == other["extracted"]
                assert side["inject"]["margin"][place] == pytest.approx(other["margin"], abs=1e-5)
            assert side["random"][0]["margin"][0] == side["inject"]["margin"][0]


def test_a_view_injected_into_itself_changes_nothing(loaded: Backbone) -> None:
    """Nor does its control, which is as long: zero."""
    pairs = [replace(one, edited=replace(one.edited, images=one.original.images)) for one in changed(2)]
    found = summarise_residual(residual_pairs(loaded, pairs, OPTIONS))
    zero = {"mean": 0.0, "low": 0.0, "high": 0.0, "pairs": 2}
    for name in ("inject", "random"):
        assert [point["alpha"] for point in found[name]] == list(ALPHAS)
        assert all(point["lift"] == point["margin"] == zero for point in found[name])
    assert found["relative_step"]["mean"] == 0.0


def test_a_pair_that_cannot_be_read_is_counted(loaded: Backbone, tmp_path: Path) -> None:
    first, second = changed(2)
    gone = replace(second, edited=replace(second.edited, images=[ImageRef.from_path(tmp_path / "gone.png")]))
    records = residual_pairs(loaded, [first, gone], OPTIONS)
    assert {r["pair"]: r["error"] is None for r in records} == {first.id: True, gone.id: False}
    found = summarise_residual(records)
    assert found["errors"] == 1 and found["pairs"] == 1 and found["best"]["lift"]["alpha"] is None
    assert "1 pairs are too few" in found["best"]["lift"]["reason"]
    assert found["best"]["lift"]["same_pairs"]["alpha"] in ALPHAS[1:]
    nothing = summarise_residual(records[1:] if records[1]["error"] else records[:1])
    assert nothing["pairs"] == 0 and nothing["inject"] == [] and nothing["best"]["margin"]["alpha"] is None
    assert Residual().figure([Shown("m", nothing)]) is None and Residual().drawn([Shown("m", nothing)])


# ---------------------------------------------------------------------- numbers by hand


def side(own: str, donor: str, extracted: list[Any], margin: list[float], random: list[Any]) -> dict[str, Any]:
    told = {"extracted": extracted, "margin": margin}
    control = {"extracted": random, "margin": [0.0] * len(random)}
    return {
        "recipient_truth": own,
        "donor_truth": donor,
        "step": [1.0, 3.0],
        "norm": [2.0, 4.0],
        "inject": told,
        "random": [control],
    }


def record(name: str, there: list[Any], back: list[Any], edit: str = "e", gain: float = 1.0) -> dict[str, Any]:
    margins = [gain * value for value in (0.0, 1.0, 2.0)]
    return {
        "pair": name,
        "edit": edit,
        "latents": 2,
        "alphas": [0.0, 1.0, 2.0],
        "choices": [],
        "directions": {
            "edited-to-original": side("red", "blue", there, margins, ["red", "red", "blue"]),
            "original-to-edited": side("blue", "red", back, margins, ["blue", None, "green"]),
        },
        "error": None,
    }


def test_curves_by_hand() -> None:
    records = [
        record("a", ["red", "blue", "blue"], ["blue", "blue", "red"]),  # follows once, then twice
        record("b", ["red", "red", None], ["blue", "green", "green"], "f", gain=-2.0),  # never
        # Says blue of both views: it cannot go toward what it says of the other, only away; nor be lifted there.
        record("c", ["blue", "blue", "red"], ["blue", "blue", "blue"]),
    ]
    found = summarise_residual(records)
    lifts = [[point["lift"]["mean"] for point in found[name]] for name in ("inject", "random")]
    assert lifts[0] == pytest.approx([0.0, 50 / 3, (100 + 0 - 50) / 3]) and lifts[1] == pytest.approx([0, 0, 50.0])
    toward = [point["toward"]["mean"] for point in found["inject"]]
    assert toward == pytest.approx([0.0, 50 / 3, (100 + 0 - 50) / 3])
    assert [point["margin"]["mean"] for point in found["inject"]] == pytest.approx([0.0, 0.0, 0.0])
    assert [point["margin"]["mean"] for point in found["edits"]["e"]["inject"]] == pytest.approx([0.0, 1.0, 2.0])
    assert found["inject"][2]["donor"]["count"] == 2 and found["inject"][2]["parsed"]["count"] == 5
    assert found["inject"][0]["recipient"] == found["inject"][0]["recipient"] | {"count": 5, "of": 6}
    assert found["minus_random"][1]["lift"]["mean"] == pytest.approx(50 / 3 - 50)
    assert found["relative_step"]["mean"] == pytest.approx((0.5 + 0.75) / 2)
    unread = summarise_residual([record("d", [None, "blue", "blue"], ["blue", "red", "red"])])
    assert unread["inject"][1]["toward"]["pairs"] == 0 and unread["inject"][1]["lift"]["mean"] == 100.0


def test_the_best_alpha_is_chosen_on_one_half_and_reported_on_the_other() -> None:
    names = [f"pair {number}" for number in range(20)]
    choosing, reporting = halves(names)
    assert not choosing & reporting and choosing | reporting == set(names) and len(choosing) == 10
    assert halves(reversed(names)) == (choosing, reporting)
    follows, stays = ["red", "blue", "red"], ["red", "red", "blue"]
    # The choosing half follows at alpha 1, the reporting half only at 2.
    records = [record(n, follows if n in choosing else stays, ["blue", "blue", "blue"]) for n in names]
    best = summarise_residual(records)["best"]["lift"]
    assert best["alpha"] == 1.0 and best["value"]["mean"] == 0.0 and best["value"]["pairs"] == 10
    assert best["chosen_on"] == 10 and best["same_pairs"]["value"]["mean"] == 25.0


def test_tables_and_figure() -> None:
    summary = summarise_residual([record(str(n), ["red", "blue", "blue"], ["blue", "blue", "red"]) for n in range(6)])
    shown = [Shown("one", summary), Shown("two", summary, 1)]
    figure = Residual().figure(shown)
    assert figure is not None and len(figure.axes) == 3
    assert all(len(axes.lines) >= 5 for axes in figure.axes)
    text = Residual().markdown(summary, "one")
    assert "## Curve over α" in text and "| one | inject | 2 | +100.0" in text and "## Best α" in text


# ---------------------------------------------------------------------- the command


def test_the_command_and_what_it_refuses(
    build_tiny: Callable[[str], Path], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, still, out = tmp_path / "pairs.jsonl", tmp_path / "still.jsonl", tmp_path / "out"
    write(iter(world_samples(2)), "jsonl", data)
    write((s for s in world_samples(12) if s.tags["changed"] == "no"), "jsonl", still)
    given = ["--out", str(out), "--max-new", "3", "--device", "cpu"]
    cases = [
        ((build_tiny("qwen2.5-vl"), data), "has no trained latent span (K = 0)"),
        ((small, still), "changes in none of its"),
        ((small, data, "--alphas", "1,x"), "--alphas is '1,x'"),
        ((small, data, "--alphas", "-1,1"), "none below"),
        ((small, data, "--alphas", "0"), "at least one number above 0"),
        ((small, data, "--alphas", "inf"), "at least one number above 0"),
        ((small, data, "--seeds", "0"), "--seeds is 0"),
    ]
    for args, said in cases:
        assert main(["diagnose", "residual", *map(str, args), *given]) == 2
        assert said in capsys.readouterr().err and not out.exists()
    command = ["diagnose", "residual", str(small), str(data), *given, "--alphas", "1", "--latents", "1"]
    assert main(command) == 0  # K = 1
    summary = json.loads((out / "residual.json").read_text())
    assert [point["alpha"] for point in summary["inject"]] == [0.0, 1.0] and summary["latents"] == 1
    assert (out / "residual.svg").stat().st_size > 2000 and (out / "residual.png").stat().st_size > 2000
    assert main([*command[:-2], "--latents", "1", "--seeds", "2"]) == 2
    assert "seeds" in capsys.readouterr().err


def test_alphas() -> None:
    assert parse_alphas("2,0.5,2") == (0.0, 0.5, 2.0)
    with pytest.raises(UserError, match="write numbers"):
        parse_alphas("")
