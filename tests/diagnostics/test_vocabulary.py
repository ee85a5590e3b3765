"""Vocabulary readout: planted latents, every family against the stock head, numbers by hand, bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from helpers import DEVICE, tolerance
from pair_cases import world_samples
from pair_reference import question
from realvr.backbone import Backbone
from realvr.backbone.samples import answer_tokens
from realvr.cli import main
from realvr.data.export import write as export
from realvr.data.sample import ImageRef
from realvr.diagnostics.measuring.vocabulary import Vocabulary as Words
from realvr.diagnostics.measuring.vocabulary import vocabulary_records
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.vocabulary import Vocabulary, shown
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling

K = 3


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(backbone: Backbone) -> Model:
    return Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=2)), K)


def test_a_latent_equal_to_an_unembedding_row_is_read_as_that_token(pair: Any) -> None:
    """Rows are made orthogonal for the tokens in question: a long one then has the largest product with itself."""
    backbone, model = pair.ours, model_of(pair.ours)
    word = backbone.prompts.encode_text("red")[0][0]
    end = backbone.markers.end
    reading = model.read(world_samples(1)[:1])
    weight = backbone.model.lm_head.weight
    before = weight.detach().clone()
    try:
        for place, token in enumerate((word, end)):  # nothing else looks that way
            weight[:, place] = 0
            weight[token] = 0
            weight[token, place] = 20
        assert reading.latents_RKD is not None
        reading.latents_RKD[0, 0], reading.latents_RKD[0, 1] = weight[word], weight[end]
        ((_, found),) = vocabulary_records(model, reading, Words(backbone), 4, 0)
    finally:
        weight.copy_(before)
    assert found["masked"][0][:2] == [word, backbone.tokenizer.decode([word])] and found["masked"][0][2] > 0.999
    assert found["raw"][1][0] == end and found["masked"][1][0] != end and found["end"] >= 1
    assert found["cosine"]["top"][0] == pytest.approx(1, abs=tolerance(1e-5))
    assert found["cosine"]["end"][1] == pytest.approx(1, abs=tolerance(1e-5))
    assert found["cosine"]["end"][0] == pytest.approx(0, abs=tolerance(1e-5))


def test_readings_are_those_of_the_stock_head(pair: Any) -> None:
    """Latents and the right answer behind them, one sample at a time, in the stock model with its own logits."""
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:2]
    chosen[1] = replace(chosen[1], turns=[replace(chosen[1].turns[0], text="A longer question: what is it, please?")])
    diagnostic, model = Vocabulary(), model_of(pair.ours)
    diagnostic.prepare(model, chosen)
    records = {record["id"]: record for record in diagnostic.measure(model, Samples(chosen))}
    special = set(pair.ours.tokenizer.all_special_ids) | set(pair.ours.forbidden_ids().tolist())
    for sample in chosen:
        begun, z_BKD = pair.think(pair.begin([pair.ours.prompt([question(sample)])]), K)
        logits = pair.stock.lm_head(z_BKD[0]).float()
        record = records[sample.id]
        for t in range(K):
            order = logits[t].argsort(descending=True).tolist()
            assert record["raw"][t][0] == order[0]
            assert record["raw"][t][2] == pytest.approx(float(logits[t].softmax(-1).max()), abs=tolerance(1e-5))
            best = next(token for token in order if token not in special)
            assert record["masked"][t][0] == best
            cosine = torch.cosine_similarity(z_BKD[0, t].float(), pair.stock.lm_head.weight[best].float(), dim=0)
            assert record["cosine"]["top"][t] == pytest.approx(float(cosine), abs=tolerance(1e-5))
        ids, inside = answer_tokens(pair.ours, sample.answer, sample.choices)
        whole = reference.append(pair.stock, begun, torch.tensor([ids], device=DEVICE))
        logits = pair.stock.lm_head(reference.hidden(pair.stock, whole))[0, -len(ids) - 1 : -1].float()
        known, said = len(pair.ours.tokenizer), logits.argmax(-1).tolist()
        assert [one[1] for one in record["answer"]] == [
            pair.ours.tokenizer.decode([i]) if i < known else f"[row {i}]" for i in said
        ]
        assert [one[3] for one in record["answer"]] == [i == token for i, token in zip(said, ids, strict=True)]
        assert [one[4] for one in record["answer"]] == inside
        right = logits.softmax(-1).amax(-1).tolist()
        assert [one[2] for one in record["answer"]] == pytest.approx(right, abs=tolerance(1e-5))


def test_random_rows_depend_on_seed_and_sample_alone(backbone: Backbone) -> None:
    words = Words(backbone)
    first = words.drawn(50, 0, "a")
    assert torch.equal(first, Words(backbone).drawn(50, 0, "a"))
    assert not torch.equal(first, words.drawn(50, 0, "b")) and not torch.equal(first, words.drawn(50, 1, "a"))
    assert not set(first.tolist()) & set(words.special.tolist())


def test_a_checkpoint_without_the_marker_has_no_cosine_to_it(backbone: Backbone) -> None:
    """`backbone` is the released checkpoint: its markers were added when it was read."""
    assert backbone.markers_added
    diagnostic, model = Vocabulary(), model_of(backbone)
    samples = world_samples(1)[:1]
    diagnostic.prepare(model, samples)
    records = list(diagnostic.measure(model, Samples(samples)))
    assert records[0]["cosine"]["end"] is None and records[0]["end"] is None
    summary = diagnostic.summarised(records)
    assert summary["cosine"]["end"]["mean"] is None and summary["end_top1"]["mean"] is None
    assert any("no <|lvr_end|> of its own" in line for line in diagnostic.notes(records, summary, 1))
    assert diagnostic.drawn([Shown("m", summary)]) and diagnostic.figure([Shown("m", summary)]) is not None


def test_a_tokenizer_without_the_marker_from_the_command(
    build_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by name; with a number of latents it is measured, and the markers that it has not are said."""
    export(iter(world_samples(1)), "jsonl", tmp_path / "data.jsonl")
    run = [str(build_tiny("qwen2.5-vl")), str(tmp_path / "data.jsonl"), "--limit", "2", "--device", "cpu"]
    run += ["--max-new", "2", "--out", str(tmp_path / "out")]
    assert main(["diagnose", "vocabulary", *run]) == 2
    said = capsys.readouterr().err
    assert "Its tokenizer has no <|lvr_end|>; --latents K measures it" in said and not (tmp_path / "out").exists()
    assert main(["diagnose", "vocabulary", *run, "--latents", "2"]) == 0
    said = capsys.readouterr().err
    assert "has no <|lvr_end|>: its 2 latents stand between untrained markers" in said
    assert "no <|lvr_end|> of its own: there is no cosine to it" in said
    summary = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert summary["latents"] == 2 and summary["states"] == 4 and summary["cosine"]["end"]["mean"] is None
    assert summary["cosine"]["random"]["pairs"] == 2
    for test in ("variation", "saliency"):
        assert main(["diagnose", test, *run, "--latents", "2"]) == 2
    told = capsys.readouterr().err
    assert "Its tokenizer has no <|lvr_end|>\n" in told and "would read untrained markers" in told
    suite = ["diagnose", run[0], "--data", *run[1:-1], str(tmp_path / "suite"), "--latents", "2", "--tests"]
    assert main([*suite, "vocabulary,saliency"]) == 2 and "untrained markers" in capsys.readouterr().err
    assert main([*suite, "vocabulary"]) == 0 and (tmp_path / "suite" / "vocabulary.json").is_file()


# ---------------------------------------------------------------------- numbers by hand


def record(name: str, tokens: list[tuple[int, str, float]], answer: list[list[Any]] | None = None) -> dict[str, Any]:
    entries = [list(token) for token in tokens]
    cosine = {"top": [0.4] * len(tokens), "end": [0.2] * len(tokens), "opening": None, "random": [0.0] * len(tokens)}
    said = [["a", "a", 0.9, True, True], ["b", "c", 0.5, False, False]] if answer is None else answer
    more = {"latents": len(tokens), "raw": entries, "masked": entries, "cosine": cosine, "end": 1, "answer": said}
    return {"id": name, **more, "error": None}


RECORDS = [
    record("1", [(7, "<", 1.0), (7, "<", 0.5)]),
    record("2", [(7, "<", 0.9), (9, " red", 0.2)]),
    record("3", [(7, "<", 0.4), (9, " red", 0.6)], []),
    {"id": "4", "error": "gone"},
]


def test_modal_tokens_by_hand() -> None:
    found = Vocabulary().summarise(RECORDS)
    assert (found["questions"], found["latents"], found["states"], found["errors"]) == (3, 2, 6, 1)
    masked = found["masked"]
    assert masked["token"] == "<" and masked["share"]["mean"] == pytest.approx(4 / 6) and masked["distinct"] == 2
    assert masked["probability"]["mean"] == pytest.approx((1 + 0.5 + 0.9 + 0.2 + 0.4 + 0.6) / 6)
    assert masked["modal_probability"]["mean"] == pytest.approx((1 + 0.5 + 0.9 + 0.4) / 4)  # not those of " red"
    assert masked["modal_probability"]["pairs"] == 3
    assert [one["modal_probability"]["mean"] for one in masked["positions"]] == pytest.approx([2.3 / 3, 0.4])
    assert masked["positions"][1]["probability"]["mean"] == pytest.approx(1.3 / 3)
    assert masked["tokens"] == [{"id": 7, "token": "<", "states": 4}, {"id": 9, "token": " red", "states": 2}]
    assert [one["token"] for one in masked["positions"]] == ["<", " red"]
    assert masked["positions"][1]["share"]["mean"] == pytest.approx(2 / 3)
    assert found["end_top1"]["mean"] == 0.5 and found["cosine"]["opening"]["mean"] is None
    assert found["answer"]["right"]["mean"] == 0.5 and found["answer"]["content_right"]["mean"] == 1.0
    assert found["answer"]["right"]["pairs"] == 2  # an answer without a token has no prediction


def test_figure_tables_and_panel() -> None:
    summary = Vocabulary().summarise(RECORDS)
    figure = Vocabulary().figure([Shown("one", summary), Shown("$two_{x}$", summary, 1)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[0].lines) == 4
    assert Vocabulary().drawn([Shown("one", summary)])
    panel = Vocabulary().panel(RECORDS[1])
    assert panel is not None and "‘␣red’" in str(panel.as_json())
    assert Vocabulary().panel(RECORDS[3]) is None
    table = Vocabulary().side_by_side([Shown("one", summary)])
    assert "| its probability there | top-1 probability, all states |" in table and "0.700 [" in table
    for reading in ("masked", "raw"):  # as earlier versions wrote it
        for found in (summary[reading], *summary[reading]["positions"]):
            del found["modal_probability"]
    assert Vocabulary().drawn([Shown("one", summary)])
    empty = Vocabulary().summarise([])
    assert Vocabulary().figure([Shown("m", empty)]) is None and Vocabulary().drawn([Shown("m", empty)])
    assert shown("\n") == "‘↵’" and shown("") == "‘∅’" and shown("\x00") == "‘�’" and shown(None) == "–"


def test_a_picture_that_cannot_be_read_is_counted(backbone: Backbone, tmp_path: Any) -> None:
    gone = replace(world_samples(1)[0], images=[ImageRef.from_path(tmp_path / "gone.png")])
    diagnostic, model = Vocabulary(), model_of(backbone)
    diagnostic.prepare(model, [gone])
    (found,) = diagnostic.measure(model, Samples([gone]))
    assert "gone.png" in found["error"] and diagnostic.summarise([found])["questions"] == 0
