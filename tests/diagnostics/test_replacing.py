"""What latents are replaced by: against loops, whatever the batches, and for samples that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realvr.backbone import Backbone
from realvr.data.sample import ImageRef, Sample
from realvr.diagnostics.measuring.replacing import Replacing, replaced
from realvr.diagnostics.model import Model
from realvr.evaluation.model_responder import ModelResponder
from realvr.world.splits import Recipe, samples

K = 3


@pytest.fixture(scope="module")
def model(build_tiny: Callable[[str], Path]) -> Model:
    return Model(ModelResponder(Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")), K)


@pytest.fixture(scope="module")
def asked() -> list[Sample]:
    return list(samples(Recipe("validation", count=7, size=(48, 48))))


def test_each_kind_is_what_it_says_whatever_the_batches(model: Model, asked: list[Sample]) -> None:
    alone = {sample.id: model.read([sample]).latents_RKD[0] for sample in asked}  # type: ignore[index]
    replacing = Replacing(model, asked, seed=3, batch=2)
    mean_KD = torch.stack(list(alone.values())).mean(0)
    for part in (asked[:4], asked[4:]):
        reading = model.read(part)
        for (_, own_KD), given in zip(reading.spans(), replacing.given("position-mean", reading), strict=True):
            torch.testing.assert_close(given, mean_KD, atol=1e-5, rtol=0)
            assert not torch.allclose(own_KD, mean_KD, atol=1e-3)  # samples differ by more than the tolerance
        for sample, given in zip(part, replacing.given("another", reading), strict=True):
            donor = replacing.donors[sample.id]
            assert donor != sample.id
            torch.testing.assert_close(given, alone[donor], atol=1e-5, rtol=0)
        noises = replacing.given("noise", reading)
        for (_, own_KD), noise in zip(reading.spans(), noises, strict=True):
            assert noise is not None
            torch.testing.assert_close(noise.norm(dim=-1), own_KD.norm(dim=-1))
            assert float(torch.cosine_similarity(noise, own_KD, dim=-1).abs().max()) < 0.9
    assert sorted(replacing.donors.values()) == sorted(alone)  # everyone's latents are given once
    assert Replacing(model, asked, ["another"], seed=4).donors != replacing.donors
    again = Replacing(model, asked, ["noise"], seed=3).given("noise", model.read(asked[4:]))
    torch.testing.assert_close(again, noises, atol=1e-4, rtol=0)
    other = Replacing(model, asked, ["noise"], seed=4).given("noise", model.read(asked[4:]))
    assert not torch.allclose(torch.stack(again), torch.stack(other), atol=1e-2)  # type: ignore[arg-type]


def test_the_mean_is_of_so_many_samples_spread_over_the_run(model: Model, asked: list[Sample]) -> None:
    few = Replacing(model, asked, ["position-mean"], most=3)
    spans = [model.read([asked[place]]).latents_RKD for place in (0, 2, 4)]
    torch.testing.assert_close(few.mean_KD, torch.cat(spans).mean(0), atol=1e-5, rtol=0)  # type: ignore[arg-type]


def test_what_cannot_be_read_gives_nothing(model: Model, asked: list[Sample], tmp_path: Path) -> None:
    gone = replace(asked[1], images=[ImageRef.from_path(tmp_path / "gone.png")])
    two = [asked[0], gone]
    replacing = Replacing(model, two)
    assert replacing.donors == {asked[0].id: gone.id, gone.id: asked[0].id}
    reading = model.read(two)
    assert [sample.id for sample in reading.samples] == [asked[0].id]
    assert replacing.given("another", reading) == [None]
    assert torch.equal(replacing.given("position-mean", reading)[0], reading.latents_RKD[0])  # type: ignore
    nothing = Replacing(model, [gone])
    assert nothing.mean_KD is None and nothing.donors == {}
    assert nothing.given("position-mean", model.read([gone])) == []


def test_only_the_chosen_positions_change() -> None:
    own, given = torch.zeros(4, 2), torch.arange(8.0).view(4, 2)
    assert replaced(own, given, [2, 0]).tolist() == [[0, 1], [0, 0], [4, 5], [0, 0]]
    assert torch.equal(replaced(own, given, []), own) and own.sum() == 0
