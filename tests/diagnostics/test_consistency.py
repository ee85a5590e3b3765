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
from realvr.diagnostics.consistency import Consistency, ConsistencySettings, conditions_of
from realvr.diagnostics.measuring.consistency import Case, Destroyed, changed, consistency_records
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import hashed
from realvr.diagnostics.parts import Samples, Shown
from realvr.diagnostics.states import StateFiles
from realvr.errors import UserError
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


def test_answers_and_other_questions_are_compared_and_what_cannot_change_is_an_error(
    build_tiny: Any, tmp_path: Path
) -> None:
    good, other = (sample for sample in world_samples(1)[:4] if sample.tags["view"] == "original")
    thin = with_image(good, picture(0).convert("RGB").resize((40, 1)), "thin")
    text = replace(good, id="text", images=[], turns=[replace(good.turns[0], images=())], boxes=[])
    consistency = Consistency(ConsistencySettings(repeats=2))
    model = Model(ModelResponder(Backbone.load(build_tiny("qwen2.5-vl"), device=DEVICE), SHORT), K)
    files = StateFiles(tmp_path / "consistency-states")
    found = list(consistency.measure(model, Samples([good, thin, text, other], states=files)))
    records = {record["id"]: record for record in found}
    assert "no picture" in records["text"]["error"] and "narrower than two pixels" in records["thin"]["error"]
    whole = records[good.id]["conditions"]
    assert all(one["destroyed"] == 0 and one["refused"] == [] for one in whole.values())
    assert len(whole["mask 0.05"]["kept"]) == 2 and len(whole["augmentation"]["kept"]) == 4
    summary = consistency.extend(consistency.summarise(found), {}, tmp_path)
    told = "\n".join(consistency.notes(found, summary, 4))
    assert "changed views" not in told and "2 of 4 questions cannot be read" in told and summary["errors"] == 2
    means = np.stack([rows[0] for _, rows in files.several([good.id, other.id], "mean")]).astype(float)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert summary["other_questions"]["mean"] == pytest.approx(means[0] @ means[1])
    assert summary["other_questions"]["pairs"] == 2


def dotted(place: int) -> Image.Image:
    """White but for a grey spot of three pixels, so small that the mean colour is white."""
    board = Image.new("RGB", (56, 56), "white")
    board.paste((200, 200, 200), (place, place, place + 3, place + 3))
    return board


def test_a_picture_that_a_change_destroys(build_tiny: Any) -> None:
    """A crop cuts off a spot in the corner, light leaves it; a mask covers one in the middle or does not."""
    good = world_samples(1)[0]
    corner, middle, both = (with_image(good, dotted(place), f"at {place}") for place in (0, 26, 0))
    white = with_image(good, Image.new("RGB", (56, 56), "white"), "white").images
    both = replace(both, id="both", images=[*both.images, *white], turns=[replace(good.turns[0], images=(0, 1))])
    consistency = Consistency(ConsistencySettings(repeats=6, answers=False))
    model = Model(ModelResponder(Backbone.load(build_tiny("qwen2.5-vl"), device=DEVICE), SHORT), K)
    records = list(consistency.measure(model, Samples([corner, middle, both])))
    cut, masked, two = (record["conditions"] for record in records)
    assert cut["reference"]["destroyed"] == 0 and cut["reference"]["rcs"] == pytest.approx(1, abs=tolerance(1e-6))
    for sample, place, own in ((corner, 0, cut), (middle, 26, masked)):
        for condition in conditions_of(6)[1:]:
            seen = 0
            for view in condition.views:
                name = f"0\n{sample.id}\n{view.condition}\n{view.change}\n{view.number}\n0"
                change: perturbing.Change = getattr(perturbing, str(view.change))
                if np.ptp(np.asarray(change(dotted(place), view.strength, random.Random(hashed(name))))):
                    seen += 1
                else:
                    with pytest.raises(Destroyed):
                        changed(Case(sample, [dotted(place)]), view, 0)
            found, whole = own[condition.name], len(condition.views)
            assert (found["views"], found["destroyed"], found["refused"]) == (seen, whole - seen, [])
    assert 2 <= cut["augmentation"]["views"] < 4 == masked["augmentation"]["views"]
    assert 0 < masked["mask 0.30"]["views"] < 6 and 2 <= two["augmentation"]["views"] < 4  # white before is no loss
    summary = consistency.summarise(records)
    count = sum(one["destroyed"] for record in records for one in record["conditions"].values())
    told = "\n".join(consistency.notes(records, summary, 3))
    assert f"{count} changed views show nothing any more and were left out (augmentation " in told
    assert "could not be read" not in told and summary["rows"][1]["rcs"]["pairs"] == 3
    table = consistency.side_by_side([Shown("m", summary)])
    assert next(line for line in table.split("\n") if "| augmentation |" in line).endswith(
        f"| {summary['rows'][1]['destroyed']} |"
    )


def test_a_view_that_the_processor_refuses(build_tiny: Any) -> None:
    """One that takes no picture lighter or darker than the original by more than a twentieth."""
    good = next(sample for sample in world_samples(1) if sample.tags["view"] == "original")
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), device=DEVICE)
    inner, level = backbone.processor, np.asarray(good.images[0].open().convert("RGB"), dtype=float).mean()

    def odd(image: Image.Image) -> bool:
        return abs(np.asarray(image, dtype=float).mean() / level - 1) > 0.05

    class Picky:
        def __call__(self, image: Any) -> Any:
            if isinstance(image, Image.Image) and odd(image):
                raise UserError("the light is wrong")
            return inner(image)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    backbone.processor = Picky()  # type: ignore[assignment]
    consistency = Consistency(ConsistencySettings(repeats=4, answers=False))
    (found,) = consistency.measure(Model(ModelResponder(backbone, SHORT), K), Samples([good]))
    case, count = Case(good, [good.images[0].open().convert("RGB")]), 0
    for condition in conditions_of(4):
        refused = sum(odd(changed(case, view, 0)[0]) for view in condition.views)
        own = found["conditions"][condition.name]
        assert own["refused"] == ["the light is wrong"] * refused and own["destroyed"] == 0
        assert own["views"] == len(condition.views) - refused
        count += refused
    assert found["conditions"]["augmentation"]["refused"] and not found["conditions"]["reference"]["refused"]
    summary = consistency.summarise([found])
    told = "\n".join(consistency.notes([found], summary, 1))
    assert f"{count} changed views could not be read and were left out (augmentation 1, " in told
    assert "first: the light is wrong" in told and "show nothing" not in told


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
