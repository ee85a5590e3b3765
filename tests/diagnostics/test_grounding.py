"""The margin and the cosine to the evidence, against a slow computation one question at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.backbone.types import Prompt
from realvr.data.export import write
from realvr.data.reading import read
from realvr.data.sample import Sample
from realvr.diagnostics import DiagnoseSettings, diagnose
from realvr.diagnostics import grounding as grounding_module
from realvr.diagnostics.grounding import Grounding
from realvr.diagnostics.model import Model
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

COUNT, LATENTS = 5, 3


def _evidence(features: np.ndarray, rows: int, cols: int, boxes: list[tuple[float, float, float, float]]) -> np.ndarray:
    """Mean of the visual tokens that share some area with a box."""
    inside = []
    for row in range(rows):
        for col in range(cols):
            here = any(
                min(x1, (col + 1) / cols) - max(x0, col / cols) > 1e-9
                and min(y1, (row + 1) / rows) - max(y0, row / rows) > 1e-9
                for x0, y0, x1, y1 in boxes
            )
            inside += [row * cols + col] if here else []
    return features[inside].mean(0)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_margin_and_cosine_against_single_questions(tmp_path: Path, build_tiny: Callable[[str], Path]) -> None:
    plain = Backbone.load(build_tiny("internvl3"), device="cpu")
    plain.latents = LATENTS  # as if it had been trained with a span
    model = str(plain.save(tmp_path / "model"))
    data = tmp_path / "samples.jsonl"
    recipe = Recipe("validation", seed=1, count=COUNT, size=(48, 48), kinds=("color", "shape"))
    write(samples(recipe), "jsonl", data)
    grounding = Grounding.configure({"negatives": COUNT - 1})
    settings = DiagnoseSettings(model, data, tmp_path / "out", batch=2, device="cpu")
    found = diagnose([grounding], settings)["grounding"]

    journal = tmp_path / "out" / "grounding.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: whole.index(b"\n", whole.index(b"\n") + 1) + 30])  # a kill within the third line
    assert diagnose([grounding], settings)["grounding"] == found and journal.read_bytes() == whole

    backbone = Backbone.load(model, device="cpu")
    spans, prototypes = [], []
    for sample in read(data):
        prompt = backbone.prompt(conversation(sample, [image.open() for image in sample.images]))
        done = rollout(backbone, [prompt], sampling=Sampling(temperature=0.0, max_new=1), latents=LATENTS)
        spans.append(done.latents_BKD[0].double().numpy())
        visual = backbone.encode_images(prompt.images)
        grid = prompt.images[0].grid
        boxes = [tuple(box.xyxy) for box in sample.boxes]
        features = visual.features_ND.detach().double().numpy()
        prototypes.append(_evidence(features, grid.rows, grid.cols, boxes))
    cosines, margins, oracle = [], [], []
    for own, span in enumerate(spans):
        others = [prototype for index, prototype in enumerate(prototypes) if index != own]
        cosines.append(np.mean([_cosine(z, prototypes[own]) for z in span]))
        margins.append(
            np.mean([_cosine(z, prototypes[own]) - max(_cosine(z, other) for other in others) for z in span])
        )
        oracle.append(1 - max(_cosine(prototypes[own], other) for other in others))
    assert found["questions"] == COUNT and found["latents"] == LATENTS
    assert found["cos_positive"]["mean"] == pytest.approx(np.mean(cosines), abs=1e-4)
    assert found["margin"]["mean"] == pytest.approx(np.mean(margins), abs=1e-4)
    assert found["oracle_margin"]["mean"] == pytest.approx(np.mean(oracle), abs=1e-4)
    assert found["margin"]["low"] <= found["margin"]["mean"] <= found["margin"]["high"]
    assert torch.tensor(margins).abs().max() > 1e-3  # something to get wrong


def test_pixels_of_one_batch_are_held_at_a_time(
    build_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Prompt]] = []
    alive = []
    ask = grounding_module._prompt

    def prompt(model: Model, sample: Sample) -> Prompt | str:
        alive.append(sum(one() is not None for one in made))
        found = ask(model, sample)
        assert not isinstance(found, str)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(grounding_module, "_prompt", prompt)
    monkeypatch.setattr(Grounding, "batch", 2)
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), device="cpu")
    model = Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=1)), LATENTS)
    diagnostic, asked = Grounding(), list(samples(Recipe("validation", seed=1, count=11, size=(48, 48))))
    diagnostic.prepare(model, asked)
    assert len(made) == 11 and max(alive) <= 4
