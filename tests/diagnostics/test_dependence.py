"""Fixed-context dependence: against loops over stock forwards, on models that ignore their latents, and by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE
from pair_cases import world_samples
from pair_reference import content, question, readout
from realvr.backbone import Backbone
from realvr.data.sample import Sample
from realvr.diagnostics.dependence import Dependence, DependenceSettings
from realvr.diagnostics.measuring.forcing import Answers, Spans
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown, Skip
from realvr.diagnostics.replacements import REPLACEMENTS
from realvr.evaluation.ablation import matched_noise
from realvr.evaluation.model_responder import ModelResponder
from realvr.widgets.figures import files

K = 3


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def asked(count: int) -> list[Sample]:
    """Questions about different pictures, the second with a free answer of several tokens."""
    found = [sample for sample in world_samples(count) if sample.tags["view"] == "original"][:count]
    found[1] = replace(found[1], choices=[], answer="two small gray circles")
    return found


def records(model: Model, samples: Sequence[Sample], batch: int = 8, **settings: Any) -> list[Any]:
    diagnostic = Dependence(DependenceSettings(**settings))
    diagnostic.prepare(model, samples)
    parts = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    return [record for part in parts for record in diagnostic.measure(model, Samples(part))]


def test_utilities_and_probabilities_are_those_of_stock_forwards(exact: Any, pair: Any) -> None:
    """Every span of every replacement, one stock forward each in float64; readouts from eager attention."""
    samples = asked(2)
    found = records(Model(ModelResponder(exact.ours), K), samples, seed=5)
    with reference.wide_softmax():
        prompts = [exact.begin([exact.ours.prompt([question(sample)])]) for sample in samples]
        spans = [exact.think(prompt, K)[1][0] for prompt in prompts]
    given = {
        "position-mean": [torch.stack(spans).mean(0)] * 2,
        "another": [spans[1], spans[0]],
        "noise": [matched_noise(z, 5, sample.id).double() for z, sample in zip(spans, samples, strict=True)],
    }
    sizes = []
    for row, (sample, record) in enumerate(zip(samples, found, strict=True)):
        assert (record["id"], record["error"], record["donor"]) == (sample.id, None, samples[1 - row].id)
        ids, places = content(exact, sample.answer)
        assert record["answer_tokens"] == len(ids)

        seen: dict[bytes, Tensor] = {}

        def tokens(z_KD: Tensor, row: int = row, ids: list[int] = ids, seen: dict[bytes, Tensor] = seen) -> Tensor:
            key = z_KD.cpu().numpy().tobytes()
            if key not in seen:
                sequence = exact.splice(prompts[row], z_KD[None])
                with reference.wide_softmax():
                    answer = torch.tensor([ids], device=DEVICE)
                    seen[key] = reference.answer_logprobs(exact.stock, sequence, answer)[0]
            return seen[key]

        own = tokens(spans[row])
        assert record["logp"] == pytest.approx(float(own.sum()), rel=1e-5)
        assert record["content"] == pytest.approx(float(own[places].mean()), rel=1e-5)
        single = pair.splice(pair.begin([pair.ours.prompt([question(sample)])]), spans[row][None].to(pair.ours.dtype))
        r = readout(pair, single, sample.answer, K).tolist()
        assert record["readout"] == pytest.approx(r, abs=1e-6)
        assert record["order"] == sorted(range(1, K + 1), key=lambda t: -record["readout"][t - 1])
        for kind in REPLACEMENTS:
            for t in range(K):
                mixed = spans[row].clone()
                mixed[t] = given[kind][row][t]
                u = float(own.sum() - tokens(mixed).sum())
                assert record["utility"][kind][t] == pytest.approx(u, abs=2e-6, rel=1e-5), (kind, t)
                sizes.append(abs(u))
            mixed = spans[row].clone()
            for k in range(K + 1):
                after = tokens(mixed)
                lost = {"loss": float((own - after).sum()), "content": float((own - after)[places].mean())}
                for name, loss in lost.items():
                    assert record["top"][kind][name][k] == pytest.approx(loss, abs=2e-6, rel=1e-5)
                if k < K:
                    mixed[record["order"][k] - 1] = given[kind][row][record["order"][k] - 1]
    assert max(sizes) > 1e-3  # far more than the tolerance: latents matter to these models


def test_an_answer_that_ignores_the_latents_has_no_dependence(fresh: Backbone) -> None:
    """Attention writes nothing into the residual stream, so an answer's tokens depend on the token before them."""
    samples = asked(3)
    free = records(Model(ModelResponder(fresh), K), samples)
    for layer in fresh.decoder.layers:
        layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
    found = records(Model(ModelResponder(fresh), K), samples)
    for before, record in zip(free, found, strict=True):
        for kind in REPLACEMENTS:
            assert max(map(abs, before["utility"][kind])) > 1e-4
            assert record["utility"][kind] == [0.0] * K
            assert record["top"][kind] == dict.fromkeys(("loss", "content"), [0.0] * (K + 1))
    summary = Dependence().summarise(found)
    for kind in REPLACEMENTS:
        one = summary["replacements"][kind]
        assert one["drop"] == one["loss"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "pairs": 3}


@pytest.fixture(scope="module")
def tiny(build_tiny: Callable[[str], Path]) -> Backbone:
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")


def test_a_latent_replaced_by_itself_has_no_utility(tiny: Backbone) -> None:
    model, samples = Model(ModelResponder(tiny), K), asked(3)
    reading = model.read(samples)
    assert reading.prompt is not None and reading.latents_RKD is not None
    spans = Spans(tiny, reading.prompt, Answers.of(tiny, samples), rows=2)
    own = [spans.add(row, z_KD) for row, z_KD in enumerate(reading.latents_RKD)]
    again = [spans.replaced(row, z_KD, z_KD.clone(), [[0], [0, 2]]) for row, z_KD in enumerate(reading.latents_RKD)]
    other = spans.replaced(1, reading.latents_RKD[1], torch.zeros_like(reading.latents_RKD[1]), [[0]])
    spans.run()
    assert [[one] * 2 for one in own] == again
    assert spans.scored(other[0]) != spans.scored(own[1])
    spans.replaced(1, reading.latents_RKD[1], torch.zeros_like(reading.latents_RKD[1]), [[0], [1]])
    spans.run()  # adds what is new, and keeps what was there
    assert [[one] * 2 for one in own] == again


def test_questions_that_all_show_one_picture_have_no_other_sample(tiny: Backbone) -> None:
    first = asked(2)[0]
    samples = [first, replace(first, id="again")]
    found = records(Model(ModelResponder(tiny), K), samples)
    for record in found:
        assert record["utility"]["position-mean"] == [0.0] * K  # the mean of two equal spans
        assert record["utility"]["another"] is None and record["top"]["another"] is None
        assert record["donor"] is None and record["donor_same"] is None
    diagnostic = Dependence()
    summary = diagnostic.summarise(found)
    assert summary["replacements"]["another"]["drop"]["mean"] is None
    assert summary["donors_same_answer"]["rate"] is None
    assert "2 of 2 questions have no other sample" in diagnostic.notes(found, summary, 2)[0]
    check_drawn(diagnostic, [Shown("one", summary)])
    assert diagnostic.panel(found[0]) is not None


def test_a_single_latent_and_any_batches(tiny: Backbone) -> None:
    model, samples = Model(ModelResponder(tiny), 1), asked(3)
    together, alone = records(model, samples), records(model, samples, batch=1)
    for one, other in zip(together, alone, strict=True):
        assert len(one["utility"]["noise"]) == 1 and len(one["top"]["noise"]["loss"]) == 2
        # One latent: replacing the most read one is replacing all, and replacing it alone.
        assert one["top"]["noise"]["loss"] == [0.0, *one["utility"]["noise"]]
        for kind in REPLACEMENTS:
            assert one["utility"][kind] == pytest.approx(other["utility"][kind], abs=1e-4)
    summary = Dependence().summarise(together)
    assert summary["latents"] == 1
    longer = Dependence().summarise(records(Model(ModelResponder(tiny), K), samples))
    check_drawn(Dependence(), [Shown("K = 1", summary), Shown("K = 3", longer, 1)])


def test_samples_without_an_answer_or_picture_are_errors_of_their_own(tiny: Backbone, tmp_path: Path) -> None:
    samples = asked(3)
    samples[1] = replace(samples[1], answer="")
    found = {record["id"]: record for record in records(Model(ModelResponder(tiny), K), samples)}
    assert "no right answer" in found[samples[1].id]["error"]
    assert [found[samples[place].id]["error"] for place in (0, 2)] == [None, None]
    diagnostic = Dependence()
    assert diagnostic.panel(found[samples[1].id]) is None
    with pytest.raises(Skip, match="at least two"):
        diagnostic.select(samples[:1], tmp_path)


# ---------------------------------------------------------------------- by hand


def made(name: str, logps: Sequence[float], u: Sequence[float], boxes: int | None, group: str) -> dict[str, Any]:
    lost = [logps[0] - value for value in logps]
    top = {"loss": lost, "content": [value / 2 for value in lost]}
    return {
        "id": name,
        "latents": 2,
        "boxes": boxes,
        "group": group,
        "logp": logps[0],
        "content": logps[0] / 2,
        "readout": [0.1, 0.2],
        "utility": dict.fromkeys(REPLACEMENTS, list(u)),
        "top": dict.fromkeys(REPLACEMENTS, top),
        "donor": "x",
        "donor_same": group == "1",
        "error": None,
    }


def test_the_numbers_by_hand() -> None:
    rows = [
        made("a", [math.log(0.8), math.log(0.4), math.log(0.2)], [1.0, 3.0], 2, "1"),
        made("b", [math.log(0.6), math.log(0.6), math.log(0.4)], [2.0, 5.0], 1, "2"),
        {"id": "c", "error": "gone"},
    ]
    rows[1]["boxes"] = None
    found = Dependence().summarise(rows)
    one = found["replacements"]["another"]
    assert found["questions"] == one["questions"] == 2
    assert [k["mean"] for k in one["probability"]] == pytest.approx([0.7, 0.5, 0.3])
    assert one["content_probability"][2]["mean"] == pytest.approx((0.2**0.5 + 0.4**0.5) / 2)
    assert one["drop"]["mean"] == pytest.approx(0.4) and one["drop"]["pairs"] == 2
    assert one["loss"]["mean"] == pytest.approx((math.log(4) + math.log(1.5)) / 2)
    assert [u["mean"] for u in one["utility"]] == [1.5, 4.0] and one["summed"]["mean"] == 5.5
    assert one["before_last"]["mean"] == 1.0 and one["before_last"]["pairs"] == 1
    assert one["only_last"]["mean"] == 3.0 and one["on_last"]["mean"] is None
    rows[1]["boxes"] = 1
    one = Dependence().summarise(rows)["replacements"]["another"]
    assert one["on_last"]["mean"] == 3.5 and one["before_last"]["pairs"] == 1
    assert found["groups"]["2"]["utility"]["noise"][1]["mean"] == 5.0
    assert found["donors_same_answer"]["rate"] == 0.5
    header, table = Dependence().table(found, "m")
    assert table[0][:2] == ["position-mean", "2"] and "z2: +4.000" in table[0][-1] and len(header) == len(table[0])
    check_drawn(Dependence(), [Shown("m", found)])
    check_drawn(Dependence(), [Shown("m", found), Shown("none", Dependence().summarise([]), 1)], rendered=True)


def check_drawn(diagnostic: Dependence, results: list[Shown], rendered: bool = False) -> None:
    """Tables, page figures and six panels; the summary has the shape that its file is checked by."""
    for one in results:
        diagnostic.result_file().validate(json.loads(json.dumps(one.summary)))
        diagnostic.markdown(one.summary, one.name)
    assert diagnostic.drawn(results)
    figure = diagnostic.figure(results)
    assert figure is not None and len([axes for axes in figure.axes if axes.get_title()]) == 6
    if not rendered:
        return
    written = files(lambda: diagnostic.figure(results), "dependence")
    assert sorted(map(str, written)) == ["dependence.png", "dependence.svg"]
    assert all(len(content) > 5000 for content in written.values())
