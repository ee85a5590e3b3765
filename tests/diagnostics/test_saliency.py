"""Saliency of generated answers: records against one pass over everything, summaries by hand, figures and panels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.export import write
from realvr.data.reading import read
from realvr.data.sample import Sample
from realvr.diagnostics import DiagnoseSettings, diagnose
from realvr.diagnostics.cases import case_ids
from realvr.diagnostics.measuring import looking
from realvr.diagnostics.measuring.attributing import attribute_whole
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.run import measure_all
from realvr.diagnostics.saliency import CASES, Saliency
from realvr.diagnostics.saliency_maps import values
from realvr.diagnostics.suite import Suite, run_suite
from realvr.evaluation.model_responder import ModelResponder
from realvr.imaging.types import Grid
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.runs.journal import Journal
from realvr.widgets import tables_of
from realvr.widgets.browser import Bars, Facts, Matrix, Overlay
from realvr.widgets.figures import rendered
from realvr.world.splits import Recipe, samples

COUNT, LATENTS, NEW = 5, 3, 6


def world(folder: Path, count: int = COUNT) -> Path:
    """Questions with evidence boxes; their prompts differ in length."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe("validation", seed=1, count=count, size=(96, 48), kinds=("color", "shape", "relation_x"))
    write(samples(recipe), "jsonl", folder / "samples.jsonl")
    return folder / "samples.jsonl"


def covered(rows: int, cols: int, sample: Sample) -> np.ndarray:
    """Cells that share some area with a box, (rows, cols)."""
    found = np.zeros((rows, cols), dtype=bool)
    for x0, y0, x1, y1 in (box.xyxy for box in sample.boxes):
        for row in range(rows):
            for col in range(cols):
                wide = min(x1, (col + 1) / cols) - max(x0, col / cols)
                high = min(y1, (row + 1) / rows) - max(y0, row / rows)
                found[row, col] |= wide > 1e-9 and high > 1e-9
    return found


def expected(backbone: Backbone, sample: Sample, kind: str) -> dict[str, float]:
    """One sample alone, from the whole matrix of its sequence: shares of columns told apart by their ids."""
    prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
    done = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=NEW), latents=LATENTS)
    ids = done.completions[0][0].reply_ids
    whole = attribute_whole(backbone, prompt, done.latents_BKD[0], ids, range(len(ids)))
    score = getattr(whole, kind)[-len(ids) :].mean(0).double().numpy()
    text = prompt.ids.numpy()
    image = np.flatnonzero(text == backbone.image_id)
    first = len(text) + 1
    total = score.sum()
    grid = prompt.images[0].grid
    canvas = score[image][: grid.rows * grid.tile_rows * grid.cols * grid.tile_cols]
    tiles = canvas.reshape(grid.tile_rows, grid.tile_cols, grid.rows, grid.cols)
    shown = np.concatenate([np.concatenate(list(line), axis=1) for line in tiles], axis=0)
    inside = covered(*shown.shape, sample)
    return {
        "image": score[image].sum() / total,
        "text": (score[: len(text)].sum() - score[image].sum()) / total,
        "latents": score[first : first + LATENTS].sum() / total,
        "reply": (score[len(text)] + score[first + LATENTS :].sum()) / total,
        "inside": shown[inside].sum() / shown.sum(),
        "area": inside.mean(),
        "hit": bool(inside[np.unravel_index(shown.argmax(), shown.shape)]),
        "each": [value / total for value in score[first : first + LATENTS]],
    }


@pytest.fixture(scope="module", params=["internvl3", "gemma3"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory, build_tiny: Callable[[str], Path]) -> Any:
    """A run of the diagnostic on a tiny model: folder, summary, backbone, samples, records."""
    folder = tmp_path_factory.mktemp(request.param)
    plain = Backbone.load(build_tiny(request.param), device="cpu")
    plain.latents = LATENTS  # as if it had been trained with a span
    model, data = str(plain.save(folder / "model")), world(folder / "data")
    settings = DiagnoseSettings(model, data, folder / "out", batch=3, device="cpu", max_new=NEW)
    summary = diagnose(["saliency"], settings)["saliency"]
    records = [json.loads(line) for line in (folder / "out" / "saliency.jsonl").read_text().splitlines()]
    return folder / "out", summary, Backbone.load(model, device="cpu"), list(read(data)), records


def test_records_are_those_of_each_question_alone(run: Any) -> None:
    _, summary, backbone, asked, records = run
    assert [record["id"] for record in records] == [sample.id for sample in asked]
    assert len({len(backbone.prompt(conversation(s, [i.open() for i in s.images]))) for s in asked}) > 1, "padding"
    for kind in ("attention", "saliency"):
        right = [expected(backbone, sample, kind) for sample in asked]
        for record, one in zip(records, right, strict=True):
            for name in ("image", "text", "latents", "reply", "inside", "each"):
                assert record[kind][name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
            assert record["area"] == pytest.approx(one["area"], rel=1e-5) and record[kind]["hit"] == one["hit"]
        found = summary["groups"]["all"][kind]
        ratios = [one["inside"] / one["area"] for one in right]
        assert found["concentration"]["mean"] == pytest.approx(np.mean(ratios), rel=1e-3)
        assert found["concentration"]["low"] <= np.mean(ratios) <= found["concentration"]["high"]
        assert found["pointing"]["count"] == sum(one["hit"] for one in right) and found["pointing"]["of"] == COUNT
        total = sum(found[name]["mean"] for name in ("image", "text", "latents", "reply"))
        assert total == pytest.approx(1, abs=1e-4)
    assert summary["questions"] == COUNT and summary["latents"] == LATENTS


def test_the_first_questions_are_the_cases_and_their_maps_are_the_scores(run: Any) -> None:
    folder, summary, backbone, asked, records = run
    assert [case["id"] for case in summary["cases"]] == [sample.id for sample in asked][:12]
    assert all((folder / f"saliency{end}").stat().st_size > 2000 for end in (".svg", "-tokens.png", "-shares.svg"))
    panel = Saliency().panel(records[0])
    assert panel is not None
    overlays = {one.name: one for one in panel.parts if isinstance(one, Overlay)}
    assert list(overlays) == ["saliency", "attention"]
    keys = [(one.query, one.layer) for one in overlays["saliency"].maps]
    layers = list(range(1, backbone.layers + 1))
    other = looking.maps(torch.zeros(backbone.layers, 6), [Grid(2, 3)])
    assert [one["layer"] for one in other] == ["mean", *layers], "overlays of all diagnostics number layers alike"
    assert keys == [("answer", layer) for layer in ("mean", *layers)] + [(t, "mean") for t in (1, 2, 3)]
    grids = {(one.query, one.layer): np.array(one.grids[0]) for one in overlays["attention"].maps}
    by_layer = np.mean([grids["answer", layer] for layer in layers], axis=0)
    assert by_layer == pytest.approx(grids["answer", "mean"], abs=0.02 * by_layer.max())
    tokens = len(grids["answer", "mean"].reshape(-1))
    share = records[0]["attention"]["image"]
    thumbnail = any(
        image.grid.thumbnail for image in backbone.prompt(conversation(asked[0], [asked[0].images[0].open()])).images
    )
    if not thumbnail and tokens:
        assert grids["answer", "mean"].sum() == pytest.approx(share, rel=0.02)
    kinds = [type(one) for one in panel.parts]
    assert kinds == [Overlay, Overlay, Bars, Facts, Matrix, Matrix]
    matrix = panel.parts[-1]
    assert isinstance(matrix, Matrix) and matrix.name.startswith("attention")
    assert np.array(matrix.values).sum(1) == pytest.approx(1, abs=0.05), "rows of attention keep their sum"
    assert Saliency().panel({**records[0], "detail": None}) is None
    json.dumps(panel.as_json())


def test_a_sequence_that_is_too_long_has_no_token_pairs(run: Any, tmp_path: Path) -> None:
    _, _, backbone, asked, _ = run
    model = Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=NEW)), LATENTS)
    diagnostic = Saliency.configure({"pair_tokens": 20})
    (record,) = diagnostic.measure(model, Samples(asked[:1], detailed=[asked[0].id]))
    assert record["detail"]["pairs"] is None and "more than 20" in record["detail"]["no_pairs"]
    assert [one["query"] for one in record["detail"]["maps"]["saliency"]] == ["answer"] * (1 + backbone.layers)
    assert diagnostic.panel(record) is not None
    drawn = diagnostic.figure([Shown("tiny", diagnostic.summarise([record]))])
    assert isinstance(drawn, dict) and sorted(drawn) == ["", "shares"]


def test_an_empty_answer_is_counted_and_a_text_question_has_no_picture(run: Any) -> None:
    _, _, backbone, asked, _ = run
    model = Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=NEW)), LATENTS)
    diagnostic, eos = Saliency(), backbone.eos_ids
    everything = Samples(asked[:2], detailed=[asked[0].id])
    try:
        backbone.eos_ids = list(range(backbone.model.lm_head.out_features))  # whatever it says first ends the reply
        silent = list(diagnostic.measure(model, everything))
    finally:
        backbone.eos_ids = eos
    summary = diagnostic.summarised(silent)
    assert (summary["questions"], summary["without_content"]) == (0, 2)
    assert summary["groups"]["all"]["saliency"]["image"]["mean"] is None
    assert any("no content tokens" in line for line in diagnostic.notes(silent, summary, 2))
    assert diagnostic.figure([Shown("silent", summary)]) in (None, {})
    text = Sample(id="words", images=[], turns=[_text(asked[0])], answer="x")
    (record,) = diagnostic.measure(model, Samples([text], detailed=["words"]))
    assert record["saliency"]["image"] == 0 and record["area"] is None and record["saliency"]["inside"] is None
    drawn = diagnostic.figure([Shown("tiny", diagnostic.summarised([record]))])
    assert isinstance(drawn, dict) and sorted(drawn) == ["shares", "tokens"]
    assert diagnostic.panel(record) is not None


def _text(sample: Sample) -> Any:
    from dataclasses import replace

    return replace(sample.turns[0], images=())


def test_a_picture_that_cannot_be_read_is_left_out(run: Any, tmp_path: Path) -> None:
    _, _, backbone, _, _ = run
    data = world(tmp_path / "data", 2)
    broken = next((tmp_path / "data").rglob("*.png"))
    broken.write_bytes(b"no picture")
    model = Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=NEW)), LATENTS)
    from realvr.data.readers.base import ReadOptions

    asked = list(read(data, options=ReadOptions(check_images="none", broken_images="keep")))
    found = Saliency().summarise(list(Saliency().measure(model, Samples(asked))))
    assert found["unread"] >= 1 and found["questions"] == len(asked) - found["unread"]


@pytest.mark.parametrize("latents", [2, 0])
def test_cases_are_the_first_questions_whatever_the_case_browser_asks_for(
    latents: int, tmp_path: Path, build_tiny: Callable[[str], Path]
) -> None:
    """The browser's cases differ from model to model, and a model without a span has none."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), device="cpu")
    model = Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=2)), latents)
    asked = list(samples(Recipe("validation", seed=1, count=15, size=(48, 48))))
    names = [sample.id for sample in asked]
    shown = {names[1], names[13]} if latents else None
    diagnostic, journal = (
        Saliency.configure({"pair_tokens": 0}),
        Journal(tmp_path / "saliency.jsonl", lambda r: r["id"]),
    )
    measure_all(diagnostic, model, asked, journal, 5, detailed=shown)
    records = journal.records
    scored = [record["id"] for record in records if "saliency" in record]
    detail = [record["id"] for record in records if record.get("detail")]
    assert detail == [name for name in scored if name in {*names[:12], *(shown or ())}] and len(detail) > 6
    found = diagnostic.summarise(records)
    assert [case["id"] for case in found["cases"]] == [name for name in scored if name in names[:12]]
    assert found["rule"].startswith("The first 12 questions of the run") and names[13] in (detail if latents else names)


@pytest.mark.slow  # twelve cases of two models are drawn
def test_a_suite_with_the_case_browser_draws_the_same_questions_for_both_models(
    tmp_path: Path, build_tiny: Callable[[str], Path]
) -> None:
    spanned = Backbone.load(build_tiny("qwen2.5-vl"), device="cpu")
    spanned.latents = 2
    paths = [str(spanned.save(tmp_path / "span")), str(build_tiny("qwen2.5-vl"))]
    data = tmp_path / "samples.jsonl"
    write(samples(Recipe("validation", seed=1, count=15, size=(48, 48))), "jsonl", data)
    settings = DiagnoseSettings(paths[0], data, tmp_path / "out", limit=15, device="cpu", max_new=2)
    chosen = {"cases": {"cases": 14, "examine": 15, "steered": 0}, "saliency": {"pair_tokens": 0}}
    suite = Suite(settings, ("cases", "saliency"), (paths[1],), chosen)
    overview = run_suite(suite)
    assert overview is not None
    assert [one["status"] for one in overview["tests"]["cases"].values()] == ["measured", "skipped"]
    first = [sample.id for sample in read(data)][:CASES]
    assert case_ids(json.loads((tmp_path / "out" / "span" / "cases.json").read_text())) - set(first)
    for folder in suite.folders.values():
        found = json.loads((folder / "saliency.json").read_text())
        records = [json.loads(line) for line in (folder / "saliency.jsonl").read_text().splitlines()]
        scored = {record["id"] for record in records if "saliency" in record}
        assert [case["id"] for case in found["cases"]] == [name for name in first if name in scored]


# ---------------------------------------------------------------------- summaries and figures, by hand


def record(name: str, correct: bool, image: float, inside: float | None, area: float | None = 0.25) -> dict[str, Any]:
    """A record with its shares; latents have the rest of the saliency."""
    kind = {
        "total": 0.5,
        "image": image,
        "text": 0.0,
        "latents": 1 - image,
        "reply": 0.0,
        "each": [1 - image, 0.0],
        "inside": inside,
        "hit": None if inside is None else inside > 0.5,
    }
    return {
        "id": name,
        "latents": 2,
        "answer": "A",
        "text": "A",
        "correct": correct,
        "tokens": 1,
        "error": None,
        "loss": 1.0,
        "area": area,
        "attention": kind,
        "saliency": dict(kind),
    }


def detailed(one: dict[str, Any], seed: int) -> dict[str, Any]:
    from PIL import Image

    from realvr.diagnostics.measuring.cases import data_address
    from realvr.diagnostics.saliency_maps import KINDS, levels

    rng = np.random.default_rng(seed)
    picture = data_address(Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)))
    maps = {kind: [{"query": "answer", "layer": "mean", **levels([rng.random((3, 3)).tolist()])}] for kind in KINDS}
    pairs = {kind: levels([np.tril(rng.random((5, 5))).tolist()]) for kind in KINDS}
    groups = ["text", "image", "image", "latents", "reply"]
    return one | {
        "detail": {
            "question": "What color is it?",
            "choices": [],
            "truth": "A",
            "pictures": [picture],
            "shown": 0,
            "boxes": [{"image": 0, "xyxy": [0.0, 0.0, 0.5, 0.5]}],
            "maps": maps,
            "pairs": {"groups": groups, "labels": list("abcde"), "sizes": [1] * 5, **pairs},
            "no_pairs": None,
        }
    }


def test_right_and_wrong_answers_apart() -> None:
    records = [record("a", True, 0.8, 0.5), record("b", True, 0.4, 1.0), record("c", False, 0.2, 0.25)]
    found = Saliency().summarised([*records, {"id": "d", "error": "no picture"}])
    where = {name: found["groups"][name]["saliency"] for name in ("all", "correct", "incorrect")}
    assert where["correct"]["image"]["mean"] == pytest.approx(0.6)
    assert where["incorrect"]["image"]["mean"] == pytest.approx(0.2)
    assert where["correct"]["concentration"]["mean"] == pytest.approx((2 + 4) / 2)
    assert where["incorrect"]["concentration"]["mean"] == pytest.approx(1)
    assert (where["all"]["pointing"]["count"], where["all"]["pointing"]["of"]) == (1, 3)
    assert found["groups"]["all"]["latents"]["saliency"][0]["mean"] == pytest.approx((0.2 + 0.6 + 0.8) / 3)
    assert (found["questions"], found["unread"]) == (3, 1)


def test_all_right_no_boxes_no_slope() -> None:
    flat = record("flat", True, 0.0, None)
    flat["saliency"] |= {"total": 0.0, "image": None, "text": None, "latents": None, "reply": None, "each": []}
    records = [record("a", True, 0.8, None, None), flat]
    diagnostic = Saliency()
    found = diagnostic.summarised(records)
    wrong = found["groups"]["incorrect"]
    assert wrong["questions"] == 0 and wrong["saliency"]["image"]["mean"] is None
    assert wrong["attention"]["pointing"]["rate"] is None and found["without_boxes"] == 1
    assert found["without_slope"] == 1 and found["groups"]["all"]["saliency"]["image"]["pairs"] == 1
    text = " ".join(diagnostic.notes(records, found, 2))
    assert "without any slope" in text and "no evidence boxes" in text
    drawn = diagnostic.figure([Shown("m", found)])
    assert isinstance(drawn, dict) and list(drawn) == ["shares"]
    assert "NaN" not in json.dumps(found) and len(list(tables_of(diagnostic.drawn([Shown("m", found)])))) == 2
    assert Saliency().summarised([])["questions"] == 0


@pytest.mark.parametrize("models", [1, 2, 3])
def test_panels_are_in_the_papers_order(models: int, recwarn: pytest.WarningsRecorder) -> None:
    names = ["first", "second", "third"][:models]
    results = []
    for number, name in enumerate(names):
        own = [detailed(record(str(i), i % 2 == number % 2, 0.5, 0.5), 10 * number + i) for i in range(12 + number)]
        results.append(Shown(name, Saliency().summarised(own), number))
    drawn = Saliency().figure(results)
    assert isinstance(drawn, dict) and list(drawn) == ["", "tokens", "shares"]
    for key in ("", "tokens"):
        shown = [one for one in drawn[key].axes if one.axison]
        assert len(shown) == 12 * 2 * models, "twelve cases, alike for every model"
        titles = [one.get_title().split("\n") for one in shown[: 2 * models]]
        order = [(kind, name) for kind in ("attention", "saliency") for name in names]
        assert [(title[-1], title[0] if models > 1 else names[0]) for title in titles] == order
        said = [one.get_xlabel() for one in shown[: 2 * models]]
        right = ["right" if number % 2 == 0 else "wrong" for number in range(models)] * 2
        assert said == [f"A ({word})" for word in right]
    assert len(drawn["shares"].axes) == 3
    case = results[-1].summary["cases"][0]
    painted = next(one for one in drawn[""].axes if one.axison and len(one.images) == 2)
    first = results[0].summary["cases"][0]
    assert np.asarray(painted.images[1].get_array()) == pytest.approx(values(first["maps"]["attention"])[0])
    assert case["id"] == first["id"]
    if models == 2:
        assert len(rendered(drawn[""], ".png")) > 20000 and len(rendered(drawn["tokens"], ".svg")) > 20000
    assert not [one for one in recwarn if "layout" in str(one.message)]
