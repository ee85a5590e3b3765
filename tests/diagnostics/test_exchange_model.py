"""Latent exchange on small models of every family, against stock models over whole sequences; and the command."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forked import Forked
from helpers import tolerance
from pair_cases import world_pairs, world_samples
from pair_reference import content, greedy, mean_logprob, question, readout
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.data.sample import ImageRef
from realvr.diagnostics import Shown
from realvr.diagnostics.exchange import Exchange, ExchangeSettings, ordered_evidence, usual_steps
from realvr.diagnostics.exchange_summary import record_key, summarise_exchange
from realvr.diagnostics.measuring.exchange import Answers, ExchangeOptions, exchange_pairs, recipients_of
from realvr.diagnostics.measuring.views import read_views
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

K, NEW = 3, 4
SHORT = Sampling(temperature=0.0, max_new=NEW)
OPTIONS = ExchangeOptions(latents=K, ks=(1, 2, 4, 8), seeds=2, sampling=SHORT)
STEPS = (2, 3)
WAYS = {"edited-to-original": (0, 1), "original-to-edited": (1, 0)}  # recipient, donor


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def changed_pairs(count: int) -> list[Pair]:
    found = [one for one in world_pairs(count) if one.changed]
    return found[:count]


def free_answers(one: Pair, original: str, edited: str) -> Pair:
    views = (replace(view, choices=[], answer=y) for view, y in zip(one.views, (original, edited), strict=True))
    return Pair(one.edit, *views)


def by_key(records: list[Any]) -> dict[Any, Any]:
    found = {record_key(record): record for record in records}
    assert len(found) == len(records)
    return found


def test_every_condition_is_the_stock_model_on_the_mixed_span(pair: Any) -> None:
    """Texts, scores, contrast and positions of all conditions, for both directions of two pairs in one batch.

    The second has free answers of several tokens, of different length.
    """
    pairs = changed_pairs(2)
    pairs[1] = free_answers(pairs[1], "two small gray circles", "none at all")
    lengths = [len(content(pair, answer)[1]) for answer in pairs[1].truths]
    assert min(lengths) > 1 and lengths[0] != lengths[1]
    controls = unrelated(pairs)
    records = exchange_pairs(pair.ours, pairs, controls, replace(OPTIONS, from_steps=STEPS))
    names = {("unmodified", "none", 0), ("sham", "full", K), ("swap", "full", K), ("unrelated", "full", K)}
    names |= {("swap", selector, k) for selector in ("contrast", "random", "from-step") for k in (1, 2)}
    assert {(r["condition"], r["selector"], r["k"]) for r in records} == names
    assert len(by_key(records)) == 2 * 2 * (4 + 2 * (1 + 2) + 2)
    late = {(r["k"], tuple(r["positions"])) for r in records if r["selector"] == "from-step"}
    assert late == {(2, (2, 3)), (1, (3,))}
    for one, control in zip(pairs, controls, strict=True):
        assert control is not None
        asked = [question(one.original), question(one.edited), question(one.original, control.original)]
        prompts = [pair.begin([pair.ours.prompt([turn])]) for turn in asked]
        spans = [pair.think(prompt, K)[1][0] for prompt in prompts]
        truths = [one.original.answer, one.edited.answer]
        for record in (r for r in records if r["pair"] == one.id):
            recipient, donor = WAYS[record["direction"]]
            assert (record["recipient_truth"], record["donor_truth"]) == (truths[recipient], truths[donor])
            given = {"swap": spans[donor], "unrelated": spans[2]}.get(record["condition"], spans[recipient])
            mixed = spans[recipient].clone()
            for slot in record["positions"]:
                mixed[slot - 1] = given[slot - 1]
            sequence = pair.splice(prompts[recipient], mixed[None])
            assert record["text"] == pair.ours.tokenizer.decode(greedy(pair, sequence, NEW)), record
            own, other = (mean_logprob(pair, sequence, truths[view]) for view in (recipient, donor))
            assert record["recipient_score"] == pytest.approx(own, abs=tolerance(2e-5))
            assert record["donor_score"] == pytest.approx(other, abs=tolerance(2e-5))
            assert record["margin"] == record["donor_score"] - record["recipient_score"]
        for direction, (recipient, donor) in WAYS.items():
            sequence = pair.splice(prompts[recipient], spans[recipient][None])
            r_own, r_donor = (readout(pair, sequence, truths[view], K) for view in (recipient, donor))
            check_ranking([r for r in records if (r["pair"], r["direction"]) == (one.id, direction)], r_own - r_donor)


def check_ranking(records: list[Any], difference_K: Tensor) -> None:
    """The recorded contrast is the reference's, and the chosen slots are its largest, the first of equals first."""
    gamma = [max(float(value), 0.0) for value in difference_K]
    (free,) = [r for r in records if r["condition"] == "unmodified"]
    assert free["contrast"] == pytest.approx(gamma, abs=tolerance(1e-6))
    for record in records:
        if record["selector"] == "contrast":
            left = dict(enumerate(free["contrast"], 1))
            for slot in record["positions"]:
                best = max(left.values())
                assert slot == min(t for t, value in left.items() if value == best)
                del left[slot]
            assert len(left) == K - record["k"]


def test_the_span_matters_to_the_small_models(pair: Any) -> None:
    """A guard of the test above: swaps move the margins by far more than its tolerance."""
    records = exchange_pairs(pair.ours, changed_pairs(2), unrelated(changed_pairs(2)), OPTIONS)
    rows = {(r["condition"], r["selector"], r["k"]): r for r in summarise_exchange(records)["rows"]}
    assert abs(rows["swap", "full", K]["margin_shift"]["mean"]) > 2e-4
    assert rows["sham", "full", K]["margin_shift"]["mean"] == 0.0


@pytest.fixture(scope="module")
def small(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with trained markers, as far as its files tell."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = K
    return backbone.save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def loaded(small: Path) -> Backbone:
    return Backbone.load(small, dtype=torch.float32, device="cpu")


def test_an_exchange_with_itself_is_exactly_zero(loaded: Backbone) -> None:
    pairs = [replace(one, edited=replace(one.edited, images=one.original.images)) for one in changed_pairs(3)]
    records = exchange_pairs(loaded, pairs, unrelated(pairs), replace(OPTIONS, seeds=3))
    found = summarise_exchange(records)
    for row in found["rows"]:
        if row["condition"] in ("sham", "swap"):
            for name in ("donor_lift", "margin_shift"):
                assert row[name] == {"mean": 0.0, "low": 0.0, "high": 0.0, "pairs": 3}, row
    unrelated_row = found["rows"][-1]
    assert unrelated_row["condition"] == "unrelated" and unrelated_row["margin_shift"]["mean"] != 0.0
    assert found["sham"]["equal_replies"]["rate"] == 1.0
    assert found["sham"]["largest_margin_difference"] < 1e-4


def test_latents_swapped_from_the_first_step_on_are_the_whole_span(loaded: Backbone) -> None:
    """And pairs of trails say from where on their latents differ."""
    pairs = changed_pairs(2)
    pairs[1] = replace(pairs[1], original=replace(pairs[1].original, meta={"trail": {"parts_at": 2}}))
    records = exchange_pairs(loaded, pairs, unrelated(pairs), replace(OPTIONS, from_steps=(1, 2, 3)))
    found = {(r["pair"], r["direction"], r["selector"], r["k"]): r for r in records if r["condition"] == "swap"}
    for (name, direction, selector, k), record in found.items():
        if (selector, k) == ("from-step", K):
            whole = found[name, direction, "full", K]
            assert (record["text"], record["margin"]) == (whole["text"], whole["margin"])
        known = selector == "from-step" and name == pairs[1].id
        assert record.get("parts_at") == (2 if known else None)
    assert [(row["offset"], row["answers"]) for row in summarise_exchange(records)["parting"]] == [
        (-1, 2),
        (0, 2),
        (1, 2),
    ]


def test_answers_are_scored_in_the_form_the_model_was_taught(loaded: Backbone) -> None:
    pairs = changed_pairs(2)
    taught = {}
    for loaded.spell_out in (True, False):
        recipients = recipients_of(read_views(loaded, pairs, unrelated(pairs), K))
        answers = Answers(loaded, recipients)
        taught[loaded.spell_out] = [
            [loaded.tokenizer.decode(ids[real]) for ids, real in zip(*both, strict=True)]
            for both in zip(answers.ids_BYS, answers.real_BYS, strict=True)
        ]
    for recipient, spelled, letters in zip(recipients, taught[True], taught[False], strict=True):
        options = dict(zip("ABCD", recipient.pair.original.choices, strict=False))
        assert letters == [f"<answer>{y}</answer>" for y in recipient.truths]
        assert spelled == [f"{options[y]}\n<answer>{y}</answer>" for y in recipient.truths]


def test_batches_and_rows_do_not_matter(loaded: Backbone) -> None:
    pairs = changed_pairs(3)
    controls = unrelated(pairs)
    together = by_key(exchange_pairs(loaded, pairs, controls, OPTIONS))
    options = replace(OPTIONS, rows=2)
    alone = by_key([r for p, c in zip(pairs, controls, strict=True) for r in exchange_pairs(loaded, [p], [c], options)])
    assert together.keys() == alone.keys()
    for key, record in together.items():
        assert record["text"] == alone[key]["text"] and record["positions"] == alone[key]["positions"]
        assert record["margin"] == pytest.approx(alone[key]["margin"], abs=1e-5)


def test_random_slots_are_fixed_by_their_seed_and_nested(loaded: Backbone) -> None:
    pairs = changed_pairs(4)
    options = ExchangeOptions(latents=8, seeds=4, sampling=Sampling(temperature=0.0, max_new=1))
    found = by_key(exchange_pairs(loaded, pairs, unrelated(pairs), options))
    chosen: dict[int, list[int]] = {1: [], 2: [], 4: []}
    for (name, direction, condition, k, selector, seed), record in found.items():
        if selector in ("random", "contrast"):
            assert len(set(record["positions"])) == k and set(record["positions"]) <= set(range(1, 9))
            wider = found.get((name, direction, condition, 2 * k, selector, seed))
            assert wider is None or wider["positions"][:k] == record["positions"]
        if selector == "random":
            chosen[k] += record["positions"]
    # 32 draws of one of eight slots: all alike would mean that seed, pair or direction is ignored.
    assert len(set(chosen[1])) >= 6 and len(chosen[4]) == 128
    again = by_key(exchange_pairs(loaded, pairs[1:2], [pairs[3]], options))
    assert all(found[key]["positions"] == record["positions"] for key, record in again.items())


def test_a_pair_that_cannot_be_read_is_an_error_of_its_own(loaded: Backbone, tmp_path: Path) -> None:
    pairs = changed_pairs(3)
    gone = replace(pairs[1].edited, images=[ImageRef.from_path(tmp_path / "gone.png")])
    pairs[1] = replace(pairs[1], edited=gone)
    found = summarise_exchange(exchange_pairs(loaded, pairs, unrelated(pairs), OPTIONS))
    assert found["errors"] == 1 and found["rows"][0]["donor_lift"]["pairs"] == 2
    assert exchange_pairs(loaded, pairs[:1], [None], OPTIONS)[-1]["condition"] == "swap"  # no unrelated picture


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "samples.jsonl"
    write(iter(world_samples(4)), "jsonl", path)
    return path


def arguments(*args: Any) -> list[str]:
    return ["exchange", *map(str, args), "--max-new", "3", "--device", "cpu", "--batch", "1"]


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_numbers(
    small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*arguments(small, data, "--out", whole), "--k", "1,2,8"]) == 2
    assert "--k asks for 8 positions, but the span has K = 3 slots" in capsys.readouterr().err and not whole.exists()
    assert main(arguments(small, data, "--out", whole)) == 0  # of the usual 1, 2, 4 and 8 those that it has
    assert json.loads((whole / "exchange_settings.json").read_text())["k"] == [1, 2]
    process, records = Forked(arguments(small, data, "--out", cut)), cut / "exchange.jsonl"
    process.until(lambda: records.exists() and records.read_bytes().count(b"\n") >= 24)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = records.read_bytes()
    assert left.count(b"\n") < (whole / "exchange.jsonl").read_bytes().count(b"\n")
    records.write_bytes(left + b'{"pair": "color_ch')  # a line that was being written
    assert main(arguments(small, data, "--out", cut)) == 0
    assert records.read_bytes().startswith(left)
    assert records.read_text() == (whole / "exchange.jsonl").read_text()
    for name in ("exchange.json", "exchange.md", "exchange.csv", "exchange_settings.json"):
        assert (cut / name).read_text() == (whole / name).read_text()
    summary = json.loads((cut / "exchange.json").read_text())
    pairs = [one for one in world_pairs(4) if one.changed]
    assert summary["rows"][0]["answers"] == 2 * len(pairs) and len(summary["edits"]) == 4
    assert "| Unrelated donor | 3 |" in (cut / "exchange.md").read_text()


def test_steps_are_added_to_a_folder_made_without(
    small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = [*arguments(small, data, "--out", out), "--k", "1", "--seeds", "1", "--limit", "1"]
    assert main(given) == 0
    before, settings = (out / "exchange.jsonl").read_text(), (out / "exchange_settings.json").read_text()
    assert main([*given, "--from-step", "3,2"]) == 0
    assert "From step 2" in capsys.readouterr().out
    after = (out / "exchange.jsonl").read_text()
    assert set(before.splitlines()) < set(after.splitlines())
    assert (out / "exchange_settings.json").read_text() == settings
    added = [json.loads(line) for line in set(after.splitlines()) - set(before.splitlines())]
    assert {(r["selector"], tuple(r["positions"])) for r in added} == {("from-step", (2, 3)), ("from-step", (3,))}
    rows = json.loads((out / "exchange.json").read_text())["rows"]
    assert [row["from_step"] for row in rows if "from_step" in row] == [2, 3]
    assert "| From step 2 | 2 |" in (out / "exchange.md").read_text()
    assert main([*given, "--k", "1"]) == 0 and (out / "exchange.jsonl").read_text() == after


def test_ordered_evidence_is_swapped_from_every_step_unless_told_otherwise(small: Path, tmp_path: Path) -> None:
    """Of trails, whose views part at a known step, the figure has its panels (c) and (d) by default; of questions about
    single objects it has not."""
    trails, objects = tmp_path / "trails.jsonl", tmp_path / "objects.jsonl"
    write(iter(samples(Recipe("trails-pairs", count=1, size=(48, 48)))), "jsonl", trails)
    write((one for one in world_samples(1) if one.tags["edit"] == "color_change"), "jsonl", objects)
    usual = ("--k", "1", "--seeds", "1", "--limit", "1")
    for name, data, steps, panels in (("trails", trails, [2, 3], "abcd"), ("objects", objects, [], "ab")):
        assert main([*arguments(small, data, "--out", tmp_path / name), *usual]) == 0
        summary = json.loads((tmp_path / name / "exchange.json").read_text())
        assert [row["from_step"] for row in summary["rows"] if "from_step" in row] == steps, name
        assert bool(summary.get("parting")) == (name == "trails"), name
        printed = Exchange().figure([Shown(name, summary)])
        assert printed is not None and len(printed.axes) == len(panels), name
    for ordered in (True, False):
        assert ExchangeSettings(from_step=None).steps(3, ordered) == ()
        assert ExchangeSettings(from_step="3").steps(3, ordered) == (3,)


def test_steps_of_a_long_span_are_spread_over_it() -> None:
    assert [usual_steps(latents) for latents in (1, 2, 4, 8)] == [(), (2,), (2, 3, 4), (2, 3, 4, 5, 6, 7, 8)]
    assert usual_steps(32) == (2, 7, 12, 17, 22, 27, 32)
    pairs = changed_pairs(2)
    two = [replace(view, boxes=[*view.boxes[:1]] * 2) for view in pairs[0].views]
    several = replace(pairs[0], original=two[0], edited=two[1])
    assert ordered_evidence([several]) and not ordered_evidence([several, pairs[1]])
    assert not ordered_evidence([replace(several, edited=replace(two[1], ordered=False))])


def test_a_model_without_a_span_is_refused(
    build_tiny: Callable[[str], Path], small: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = tmp_path / "still.jsonl"
    write((s for s in world_samples(12) if s.tags["changed"] == "no"), "jsonl", still)
    cases = [
        ((build_tiny("qwen2.5-vl"), data), "has no trained latent span (K = 0)"),
        ((small, data, "--latents", "0"), "do not ask for --latents 0"),
        ((small, still), "changes in none of its"),
        ((small, data, "--seeds", "0"), "--seeds is 0"),
        ((small, data, "--from-step", "2,4"), "--from-step: there is no step 4; the span has K = 3 latents"),
        ((small, data, "--from-step", "0"), "--from-step is '0': steps are counted from 1"),
        ((small, data, "--from-step", "2;3"), "--from-step is '2;3': write steps"),
    ]
    for args, said in cases:
        assert main(arguments(*args, "--out", tmp_path / "out")) == 2
        assert said in capsys.readouterr().err
    assert main(["exchange", str(small), str(data), "--out", str(tmp_path / "out"), "--k", "1,x"]) == 2
    assert "--k is '1,x'" in capsys.readouterr().err and not (tmp_path / "out").exists()
