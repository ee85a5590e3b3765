"""Ranking against intervention: against loops over stock forwards, wrong answers, correlations, and numbers by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE
from pair_cases import world_samples
from pair_reference import content, question, readout
from realvr.backbone import Backbone
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.ranking import NO_OTHER
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown, Skip
from realvr.diagnostics.ranking import NO_WRONG, Ranking, RankingSettings, open_answers, wrong_answers
from realvr.diagnostics.ranking_summary import ORDERS, spearman
from realvr.evaluation.model_responder import ModelResponder
from realvr.widgets.figures import files

K = 3


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def tiny(build_tiny: Callable[[str], Path]) -> Backbone:
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")


def asked(count: int) -> list[Sample]:
    return [sample for sample in world_samples(count) if sample.tags["view"] == "original"][:count]


def records(model: Model, samples: Sequence[Sample], batch: int = 8, **settings: Any) -> list[Any]:
    diagnostic = Ranking(RankingSettings(**settings))
    diagnostic.prepare(model, samples)
    parts = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    return [record for part in parts for record in diagnostic.measure(model, Samples(part))]


def test_readouts_and_losses_are_those_of_stock_forwards(exact: Any, pair: Any) -> None:
    """One question with options and two open ones; latents are those of another sample."""
    samples = asked(3)
    samples[1] = replace(samples[1], choices=[], answer="two small gray circles")
    samples[2] = replace(samples[2], choices=[], answer="none at all", task=samples[1].task)
    found = records(Model(ModelResponder(exact.ours), K), samples, replacement="another", seeds=2)
    with reference.wide_softmax():
        prompts = [exact.begin([exact.ours.prompt([question(sample)])]) for sample in samples]
        spans = [exact.think(prompt, K)[1][0] for prompt in prompts]
    wrong = [["ABCDEFGH"[n] for n in range(len(samples[0].choices))], ["none at all"], ["two small gray circles"]]
    wrong[0].remove(samples[0].answer)
    sizes = []
    for row, (sample, record) in enumerate(zip(samples, found, strict=True)):
        assert (record["id"], record["error"], record["skipped"]) == (sample.id, None, None)
        assert record["wrong"] == len(wrong[row])
        start = pair.begin([pair.ours.prompt([question(sample)])])
        sequence = pair.splice(start, spans[row][None].to(pair.ours.dtype))
        right = readout(pair, sequence, sample.answer, K)
        others = torch.stack([readout(pair, sequence, answer, K) for answer in wrong[row]]).mean(0)
        gamma = (right - others).clamp(min=0)
        for name, value in {"correct": right, "incorrect": others, "contrast": gamma}.items():
            assert record[name] == pytest.approx(value.tolist(), abs=1e-6), name
        ids = torch.tensor([content(exact, sample.answer)[0]], device=DEVICE)

        seen: dict[bytes, float] = {}

        def logp(z_KD: Tensor, row: int = row, ids: Tensor = ids, seen: dict[bytes, float] = seen) -> float:
            key = z_KD.cpu().numpy().tobytes()
            if key not in seen:
                with reference.wide_softmax():
                    sequence = exact.splice(prompts[row], z_KD[None])
                    seen[key] = float(reference.answer_logprobs(exact.stock, sequence, ids).sum())
            return seen[key]

        donor = next(n for n in range(3) if losses_fit(record, logp, spans[row], spans[n]))
        assert donor != row
        mixed = [spans[row].clone() for _ in range(K)]
        for t in range(K):
            mixed[t][t] = spans[donor][t]
        single = [logp(spans[row]) - logp(one) for one in mixed]
        assert record["single"] == pytest.approx(single, abs=2e-6, rel=1e-5)
        sizes += [abs(value) for value in single]
        scores = {"contrast": record["contrast"], "attention": record["correct"], "utility": record["single"]}
        for name, score in scores.items():
            order = sorted(range(K), key=lambda t: -score[t])
            if name in record["order"]:
                order = [t - 1 for t in record["order"][name]]
                assert [score[t] for t in order] == sorted(score, reverse=True)
            for k in range(K + 1):
                z_KD = spans[row].clone()
                for t in order[:k]:
                    z_KD[t] = spans[donor][t]
                loss = logp(spans[row]) - logp(z_KD)
                assert record["losses"][name][k] == pytest.approx(loss, abs=2e-6, rel=1e-5), (name, k)
        assert len(record["random"]) == 2
    assert max(sizes) > 1e-3


def losses_fit(record: Any, logp: Callable[[Tensor], float], own_KD: Tensor, given_KD: Tensor) -> bool:
    """Whether the loss of the whole span is that with these latents."""
    return math.isclose(record["losses"]["contrast"][-1], logp(own_KD) - logp(given_KD), rel_tol=1e-5, abs_tol=2e-6)


def test_all_orders_coincide_at_both_ends(tiny: Backbone) -> None:
    """Exactly: equal spans are scored once."""
    samples = asked(4)
    found = records(Model(ModelResponder(tiny), 4), samples, seeds=3)
    for record in found:
        curves = [*record["losses"].values(), *record["random"]]
        assert len(curves) == 6 and {len(one) for one in curves} == {5}
        assert {one[0] for one in curves} == {0.0} and len({one[-1] for one in curves}) == 1
        assert {one[1] for one in curves} <= set(record["single"])  # one latent replaced is one latent replaced
        assert record["losses"]["utility"][1] == max(record["single"])
    summary = Ranking(RankingSettings(seeds=3)).summarise(found)
    assert len({summary["losses"][name][-1]["mean"] for name in ORDERS}) == 1


def test_one_latent_and_batches(tiny: Backbone) -> None:
    model, samples = Model(ModelResponder(tiny), 1), asked(3)
    together, alone = records(model, samples), records(model, samples, batch=1)
    for one, other in zip(together, alone, strict=True):
        assert one["losses"]["contrast"] == one["losses"]["utility"] == [0.0, *one["single"]]
        assert one["single"] == pytest.approx(other["single"], abs=1e-4)
        assert one["correct"] == pytest.approx(other["correct"], abs=1e-6)
    summary = Ranking().summarise(together)
    assert summary["over_random"]["contrast"]["mean"] is None  # nothing between the ends
    assert summary["correlation"]["contrast"]["positions"]["rho"] is None
    check_drawn(Ranking(), [Shown("K = 1", summary)])


def test_questions_without_a_wrong_answer_or_another_sample_are_left_out(tiny: Backbone, tmp_path: Path) -> None:
    samples = asked(3)
    samples[1] = replace(samples[1], choices=[], answer="alone", task="of its own")
    samples[2] = replace(samples[2], answer="")
    model = Model(ModelResponder(tiny), K)
    found = {record["id"]: record for record in records(model, samples, replacement="noise")}
    assert found[samples[0].id]["skipped"] is None
    assert found[samples[1].id]["skipped"] == NO_WRONG and "no right answer" in found[samples[2].id]["error"]
    diagnostic = Ranking()
    summary = diagnostic.summarise(list(found.values()))
    assert (summary["questions"], summary["skipped"]) == (1, {NO_WRONG: 1})
    assert f"1 of 3 questions are left out: {NO_WRONG}" in diagnostic.notes(list(found.values()), summary, 3)
    assert [diagnostic.panel(record) is None for record in found.values()].count(True) == 2
    same = [samples[0], replace(samples[0], id="again")]
    assert [record["skipped"] for record in records(model, same, replacement="another")] == [NO_OTHER] * 2
    with pytest.raises(Skip, match="none of its 1 questions has a wrong answer"):
        diagnostic.select([samples[1]], tmp_path)
    assert diagnostic.select(samples, tmp_path) == samples


def test_wrong_answers_are_other_options_or_other_answers_of_the_task() -> None:
    base = asked(1)[0]
    options = replace(base, choices=["red", "blue", "green"], answer="B")
    assert wrong_answers(options, {}, 2, 0) == ["A", "C"]
    numbers = [replace(base, id=str(n), choices=[], answer=str(n), task="count") for n in range(9)]
    numbers.append(replace(base, id="other", choices=[], answer="a dog", task="name"))
    pool = open_answers([options, *numbers, numbers[0]])
    assert pool == {"count": [str(n) for n in range(9)], "name": ["a dog"]}
    found = wrong_answers(numbers[3], pool, 4, 0)
    assert len(found) == 4 and set(found) < set(pool["count"]) - {"3"}
    assert wrong_answers(numbers[3], pool, 4, 0) == found != wrong_answers(numbers[3], pool, 4, 1)
    assert wrong_answers(numbers[9], pool, 4, 0) == []
    half = replace(base, choices=[], answer="1/2", task="half")
    assert wrong_answers(half, {"half": ["1/2", "0.5", "0.25"]}, 4, 0) == ["0.25"]  # the same in other words


# ---------------------------------------------------------------------- by hand


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(0.9486833)  # ties share their mean rank
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1], [2]) is None


def made(name: str, contrast: list[float], single: list[float], boxes: int | None = None) -> dict[str, Any]:
    """A question whose losses add up."""

    def by(order: Sequence[int]) -> list[float]:
        return [0.0, *np.cumsum([single[t] for t in order]).tolist()]

    def order(score: Sequence[float]) -> list[int]:
        return sorted(range(3), key=lambda t: (-score[t], t))

    correct = [0.1, 0.2, 0.3]
    orders = {"contrast": contrast, "attention": correct, "utility": single}
    return {
        "id": name,
        "latents": 3,
        "boxes": boxes,
        "skipped": None,
        "wrong": 3,
        "correct": correct,
        "incorrect": [r - c for r, c in zip(correct, contrast, strict=True)],
        "contrast": contrast,
        "single": single,
        "order": {key: [t + 1 for t in order(orders[key])] for key in ("contrast", "attention")},
        "losses": {key: by(order(score)) for key, score in orders.items()},
        "random": [by([0, 1, 2]), by([2, 1, 0])],
        "logp": -0.5,
        "error": None,
    }


def test_the_numbers_by_hand() -> None:
    rows = [
        made("a", [0.3, 0.2, 0.1], [3.0, 2.0, 1.0], boxes=3),
        made("b", [0.0, 0.0, 0.0], [0.0, 4.0, 2.0], boxes=2),
        {"id": "c", "skipped": NO_WRONG, "error": None},
        {"id": "d", "error": "gone"},
    ]
    found = Ranking().summarise(rows)
    assert found["questions"] == 2 and found["skipped"] == {NO_WRONG: 1}
    assert [one["mean"] for one in found["single"]] == pytest.approx([1.5, 3.0, 1.5])
    # a: [0, 3, 5, 6] by contrast; b, all equal, in the order of its record: [0, 0, 4, 6].
    assert [one["mean"] for one in found["losses"]["contrast"]] == pytest.approx([0, 1.5, 4.5, 6])
    assert [one["mean"] for one in found["losses"]["attention"]] == pytest.approx([0, 1.5, 4.5, 6])
    assert [one["mean"] for one in found["losses"]["utility"]] == pytest.approx([0, 3.5, 5.5, 6])
    # a at random: 2, 4; b: 1, 5. a over it: (1 + 1) / 2; b: (-1 - 1) / 2.
    assert found["over_random"]["contrast"]["mean"] == pytest.approx(0.0)
    assert found["over_random"]["utility"]["mean"] == pytest.approx((1 + (3 + 1) / 2) / 2)
    contrast, attention = (found["correlation"][name] for name in ("contrast", "attention"))
    assert contrast["within"]["mean"] == 1.0 and contrast["within"]["pairs"] == 1  # b's contrast does not vary
    assert attention["within"]["mean"] == pytest.approx((-1.0 + 0.5) / 2) and attention["within"]["pairs"] == 2
    assert contrast["positions"]["rho"] == pytest.approx(spearman([0.15, 0.1, 0.05], [1.5, 3.0, 1.5]))
    assert found["top"]["contrast"]["count"] == 1 and found["top"]["attention"]["count"] == 0
    assert found["top_on_last"]["contrast"]["count"] == 0 and found["top_on_last"]["attention"]["count"] == 2
    assert found["share_on_last"]["mean"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert found["zero_contrast"]["mean"] == 0.5
    assert found["contrast_mass"]["mean"] == pytest.approx(0.3) and len(found["points"]) == 6
    check_drawn(Ranking(), [Shown("m", found), Shown("nothing", Ranking().summarise([]), 1)], rendered=True)


def check_drawn(diagnostic: Ranking, results: list[Shown], rendered: bool = False) -> None:
    """Tables, page figures and three panels a model; the summary has the shape that its file is checked by."""
    for one in results:
        diagnostic.result_file().validate(json.loads(json.dumps(one.summary)))
        diagnostic.markdown(one.summary, one.name)
    assert diagnostic.drawn(results)
    figure = diagnostic.figure(results)
    assert figure is not None and len([axes for axes in figure.axes if axes.get_title()]) == 3 * len(results)
    if not rendered:
        return
    written = files(lambda: diagnostic.figure(results), "ranking")
    assert sorted(map(str, written)) == ["ranking.png", "ranking.svg"]
    assert all(len(content) > 5000 for content in written.values())
