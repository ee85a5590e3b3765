"""Representation consistency: changes of pictures, small models of every family against stock spans, what counts."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import DEVICE, picture, tolerance
from pair_cases import world_samples
from pair_reference import question
from realvr.backbone import Backbone
from realvr.data.sample import ImageRef, Sample
from realvr.diagnostics.base import Samples, Shown
from realvr.diagnostics.consistency import Consistency, ConsistencySettings, conditions_of
from realvr.diagnostics.measuring.consistency import Case, changed, consistency_records
from realvr.diagnostics.model import Model
from realvr.diagnostics.states import StateFiles
from realvr.evaluation.model_responder import ModelResponder
from realvr.imaging import perturbing
from realvr.latent.sampling import Sampling

K = 2
SHORT = Sampling(temperature=0.0, max_new=3)
CHANGES = ("brightness", "contrast", "rotation", "crop", "mask", "blur_jitter", "affine")


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def with_image(sample: Sample, image: Image.Image, name: str) -> Sample:
    data = io.BytesIO()
    image.save(data, "PNG")
    return replace(sample, id=name, images=[ImageRef(name, data=data.getvalue())])


# ---------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_keeps_the_size_depends_on_the_draw_alone_and_grows_with_its_strength(name: str) -> None:
    change: perturbing.Change = getattr(perturbing, name)
    original = picture(4).convert("RGB")

    def away(strength: float) -> float:
        found = [np.asarray(change(original, strength, random.Random(n)), dtype=float) for n in range(8)]
        return float(np.mean([np.abs(one - np.asarray(original, dtype=float)).mean() for one in found]))

    first, again, other = (change(original, 0.3, random.Random(seed)) for seed in (1, 1, 2))
    assert first.size == original.size and first.mode == "RGB" and first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes() and first.tobytes() != original.tobytes()
    assert 0 < away(0.05) < away(0.4)


def test_a_mask_covers_its_share_and_a_crop_is_the_inner_part() -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (200, 200, 3), dtype=np.uint8))
    for share in (0.05, 0.30):
        covered = [
            (np.asarray(perturbing.mask(noise, share, random.Random(n))) != np.asarray(noise)).any(-1).mean()
            for n in range(5)
        ]
        assert covered == pytest.approx([share] * 5, rel=0.1)
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[:, None, None], (1, 200, 3)))
    low, high = perturbing.crop(ramp, 0.2, random.Random(0)).getextrema()[0]
    assert 0.78 * 200 < high - low < 0.92 * 200


def test_what_is_destroyed() -> None:
    assert perturbing.destroyed(Image.new("RGB", (1, 1))) and perturbing.destroyed(picture(0).resize((1, 50)))
    assert perturbing.destroyed(Image.new("RGB", (30, 30), (7, 8, 9))) and not perturbing.destroyed(picture(0))


# ---------------------------------------------------------------------- models


def test_consistency_is_that_of_the_stock_spans_and_one_without_a_change(pair: Any) -> None:
    chosen = [sample for sample in world_samples(1) if sample.tags["view"] == "original"][:2]
    conditions = {one.name: one for one in conditions_of(2) if one.name in ("reference", "augmentation", "mask 0.30")}
    model = Model(ModelResponder(pair.ours, SHORT), K)
    records = list(consistency_records(model, chosen, list(conditions.values()), 0, None))

    def mean_of(sample: Sample, pictures: list[Image.Image]) -> torch.Tensor:
        turn = replace(question(sample), images=pictures)
        return pair.think(pair.begin([pair.ours.prompt([turn])]), K)[1][0].double().mean(0)

    cosine = torch.nn.functional.cosine_similarity
    for sample, (named, record, vector) in zip(chosen, records, strict=True):
        assert named == sample and isinstance(record, dict) and vector is not None
        found = record["conditions"]
        assert found["reference"]["rcs"] == pytest.approx(1, abs=tolerance(1e-6)) and found["reference"]["views"] == 2
        case = Case(sample, [image.open().convert("RGB") for image in sample.images])
        original = mean_of(sample, case.pictures)
        torch.testing.assert_close(vector, original.cpu(), atol=tolerance(2e-4), rtol=1e-3)
        for name in ("mask 0.30", "augmentation"):
            views = [mean_of(sample, changed(case, view, 0)) for view in conditions[name].views]
            pairs = [float(cosine(a, b, dim=0)) for n, a in enumerate(views) for b in views[n + 1 :]]
            assert found[name]["rcs"] == pytest.approx(np.mean(pairs), abs=tolerance(1e-5))
            own = [float(cosine(view, original, dim=0)) for view in views]
            assert found[name]["to_original"] == pytest.approx(np.mean(own), abs=tolerance(1e-5))
            assert min(pairs) < 1 - 1e-7 and found[name]["kept"] == [] and record["correct"] is None


def test_destroyed_views_are_counted_and_answers_and_other_questions_compared(build_tiny: Any, tmp_path: Path) -> None:
    """A picture of one row of pixels: nothing is left of any change of it."""
    good, other = (sample for sample in world_samples(1)[:4] if sample.tags["view"] == "original")
    thin = with_image(good, picture(0).convert("RGB").resize((40, 1)), "thin")
    text = replace(good, id="text", images=[], turns=[replace(good.turns[0], images=())], boxes=[])
    consistency = Consistency(ConsistencySettings(repeats=2))
    model = Model(ModelResponder(Backbone.load(build_tiny("qwen2.5-vl"), device=DEVICE), SHORT), K)
    files = StateFiles(tmp_path / "consistency-states")
    found = list(consistency.measure(model, Samples([good, thin, text, other], states=files)))
    records = {record["id"]: record for record in found}
    assert "no picture" in records["text"]["error"]
    whole, lost = records[good.id]["conditions"], records["thin"]["conditions"]
    assert all(one["destroyed"] == 0 for one in whole.values())
    assert len(whole["mask 0.05"]["kept"]) == 2 and len(whole["augmentation"]["kept"]) == 4
    assert lost["reference"]["rcs"] == pytest.approx(1, abs=tolerance(1e-6)) and lost["reference"]["destroyed"] == 0
    assert lost["mask 0.05"] == {"rcs": None, "to_original": None, "views": 0, "destroyed": 2, "kept": []}
    summary = consistency.extend(consistency.summarise(found), {}, tmp_path)
    assert summary["rows"][2]["destroyed"] == 2 and summary["rows"][2]["rcs"]["pairs"] == 2 and summary["errors"] == 1
    told = "\n".join(consistency.notes(found, summary, 4))
    assert "24 changed views show nothing any more" in told and "1 of 4 questions cannot be read" in told
    means = np.stack([rows[0] for _, rows in files.several([good.id, "thin", other.id], "mean")]).astype(float)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    right = (means @ means.T)[~np.eye(3, dtype=bool)].mean()
    assert summary["other_questions"]["mean"] == pytest.approx(right) and summary["other_questions"]["pairs"] == 3


# ---------------------------------------------------------------------- numbers


def record(name: str, rcs: float, kept: list[bool], destroyed: int = 0) -> dict[str, Any]:
    found = {"rcs": rcs, "to_original": rcs, "views": 2, "destroyed": destroyed, "kept": kept}
    return {"id": name, "conditions": {one.name: found for one in conditions_of(2)}, "correct": True, "error": None}


def test_numbers_by_hand_and_the_figure() -> None:
    consistency = Consistency(ConsistencySettings(repeats=2))
    records = [record("a", 0.9, [True, True]), record("b", 0.7, [True, False], 1), {"id": "c", "error": "gone"}]
    summary = consistency.summarise(records)
    row = next(row for row in summary["rows"] if row["condition"] == "mask 0.30")
    assert row["rcs"]["mean"] == pytest.approx(0.8) and row["kept"]["mean"] == 0.75 and row["strength"] == 0.3
    assert (row["views"], row["destroyed"], summary["errors"]) == (4, 1, 1)
    figure = consistency.figure([Shown("a", summary), Shown("b", summary, 1)])
    assert figure is not None and len(figure.axes) == 8 and all(ax.lines or ax.patches for ax in figure.axes)
    table = consistency.side_by_side([Shown("a", summary)])
    assert "blur + jitter 0.50" in table and "other questions" in table
    panel = consistency.panel(records[0])
    assert panel is not None and consistency.panel(records[-1]) is None
    nothing = consistency.summarise([])
    assert consistency.figure([Shown("a", nothing)]) is None and consistency.drawn([Shown("a", nothing)])


def test_conditions_are_those_of_the_paper() -> None:
    names = [condition.name for condition in conditions_of(3)]
    assert names[0] == "reference" and {"mask 0.05", "mask 0.30", "blur_jitter 0.10", "blur_jitter 0.50"} <= set(names)
    assert [view.change for view in conditions_of(3)[1].views] == ["brightness", "contrast", "rotation", "crop"]
    assert sum(name.startswith("affine") for name in names) == 3
