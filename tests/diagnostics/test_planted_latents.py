"""Latents that copy visual tokens of the evidence, in a model whose first layer attends to what a query copies.

The first layer has no positions (rotary frequencies of zero) and query and key weights W with W u_n = e_t for the t-th
of a few visual tokens and W u_n = 0 for every other one (u: the token behind the layer's norm). The logit of a copy of
one of them on its source is then b, on all other visual tokens 0; the softmax over text, markers and latents cancels in
every ratio. So with N visual tokens and boxes of one token the enrichment of z_t is

    e^b                               on the token it copies,
    (N - 1) / (e^b + N - 2)           on another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import attention_cases as cases
from realvr.backbone import Backbone
from realvr.data.sample import Box, ImageRef, Sample
from realvr.diagnostics import Samples
from realvr.diagnostics.enrichment import Enrichment
from realvr.diagnostics.evidence_readout import EvidenceReadout
from realvr.diagnostics.grounding import Grounding
from realvr.diagnostics.measuring.looking import look
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.walk import Walk
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.latent.span import think

K, B, SIDE = 3, math.log(7.0), 4
Cell = tuple[int, int]
FIRST, SECOND, THIRD, ASIDE = (0, 2), (1, 1), (1, 3), (2, 0)
"""Cells of the trail, and one off it."""
FAMILIES = ("qwen2.5-vl", "internvl3")  # those whose queries and keys have no norm of their own


class Copying(Model):
    """A model whose z_t is the visual token ``copied[t - 1]`` of its picture, put there by an intervention."""

    copied: dict[str, list[int]]

    def read(self, samples: Any) -> Reading:
        reading = super().read(samples)
        assert reading.prompt is not None
        rows = list(zip(reading.samples, reading.features(), strict=True))
        put = {t + 1: torch.stack([own[0][self.copied[sample.id][t]] for sample, own in rows]) for t in range(K)}
        reading.after, reading.latents_RKD = think(self.backbone, reading.prompt, K, interventions=put)
        return reading


def asked(name: str, picture: Path, cells: Sequence[Cell]) -> Sample:
    """A question about a picture of 4 x 4 visual tokens, with a box on each of these in this order."""
    boxes = [Box(0, (col / SIDE, row / SIDE, (col + 1) / SIDE, (row + 1) / SIDE)) for row, col in cells]
    return Sample.ask(name, [ImageRef.from_path(picture)], "What is it?", "red", boxes=boxes)


def noise(path: Path, seed: int) -> Path:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8)).save(path)
    return path


def normed(backbone: Backbone, x: Tensor) -> Tensor:
    """What the first layer's projections see of an embedding, in float64: written from the equation of RMSNorm."""
    norm = backbone.decoder.layers[0].input_layernorm
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.double()


def attend_to_copies(backbone: Backbone, features_ND: Tensor, tokens: list[int]) -> Tensor:
    """Change the first layer as the module says; W (K, D)."""
    wanted = torch.zeros(len(features_ND), len(tokens), dtype=torch.float64)
    for t, token in enumerate(tokens):
        wanted[token, t] = 1.0
    W = torch.linalg.pinv(normed(backbone, features_ND)).matmul(wanted).T
    attention = backbone.decoder.layers[0].self_attn
    d = attention.head_dim
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.data.zero_()
        projection.bias.data.zero_()
        projection.weight.data.view(-1, d, W.shape[1])[:, : len(W)] = (W * (B * math.sqrt(d)) ** 0.5).to(
            projection.weight
        )
    backbone.decoder.rotary_emb.inv_freq.zero_()
    return W


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.no_grad()
def test_latents_that_copy_a_token_have_the_exact_enrichment_and_alignment(
    build_tiny: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    backbone = Backbone.load(build_tiny(family), dtype=torch.float32, device="cpu")
    responder = ModelResponder(backbone, Sampling(temperature=0.0, max_new=1), path="tiny")
    picture, another = noise(tmp_path / "picture.png", 0), noise(tmp_path / "another.png", 1)
    bare = Model(responder, 0).read([asked(str(path), path, []) for path in (picture, another)])
    (v_ND,), (other_ND,) = bare.features()
    token = cases.places(bare.prompts[0].images[0].grid)  # tiles of InternVL have an order of their own
    count = len(token)
    assert count == SIDE**2 and set(token) == {(row, col) for row in range(SIDE) for col in range(SIDE)}
    chosen = [token[cell] for cell in (SECOND, FIRST, THIRD, ASIDE)]
    W_KD = attend_to_copies(backbone, v_ND, chosen)
    model = Copying(responder, K)
    model.copied = {"same": [chosen[0]] * K, "beside": [chosen[3]] * K, "other": [token[0, 0]] * K}
    model.copied["trail"] = [token[cell] for cell in (FIRST, SECOND, THIRD)]
    same, beside = (asked(name, picture, [SECOND]) for name in ("same", "beside"))
    trail = asked("trail", picture, [FIRST, SECOND, THIRD])
    on, off = math.exp(B), (count - 1) / (math.exp(B) + count - 2)
    close = partial(pytest.approx, rel=1e-4)

    looks = {one["id"]: one for one in EvidenceReadout().measure(model, Samples([same, beside, trail]))}
    assert looks["same"]["evidence"]["ratio"][0] == close([on] * K)
    assert looks["beside"]["evidence"]["ratio"][0] == close([off] * K)
    assert looks["trail"]["own"]["ratio"][0] == close([on] * K)
    assert looks["trail"]["next"]["ratio"][0][:2] == close([off] * 2) and looks["trail"]["next"]["ratio"][0][2] is None

    rich = {one["id"]: one for one in Enrichment().measure(model, Samples([same, beside]))}
    assert [rich[name]["latent"]["ratio"][0] for name in ("same", "beside")] == close([on, off])
    for sample, said in zip((same, beside), look(model, [same, beside])[0], strict=True):
        (word,) = said.said.ids  # the answer's only query: its logit on each of the chosen tokens is known
        weights = (B * (W_KD @ normed(backbone, backbone.embed(torch.tensor([word]))[0]))).exp()
        expected = weights[0] * (count - 1) / (weights[1:].sum() + count - len(chosen))
        assert rich[sample.id]["answer"]["ratio"][0] == close(float(expected))

    walks = {one["id"]: one for one in Walk().measure(model, Samples([same, beside, trail]))}
    cosine = partial(torch.nn.functional.cosine_similarity, dim=0)
    own_D, aside_D, other_D = (x.double() for x in (v_ND[chosen[0]], v_ND[chosen[3]], other_ND[token[0, 0]]))
    apart = float(cosine(own_D, aside_D))
    assert walks["same"]["nearest"] == [[0, *SECOND]] * K
    assert walks["trail"]["nearest"] == [[0, *FIRST], [0, *SECOND], [0, *THIRD]]
    for name, inside, expected in (("same", True, 1.0), ("beside", False, apart), ("trail", True, 1.0)):
        assert walks[name]["inside"] == [inside] * K and walks[name]["nearest_cosine"] == close([1.0] * K)
        assert walks[name]["cosine"] == pytest.approx([expected] * K, abs=2e-6)

    other, grounding = asked("other", another, [(0, 0)]), Grounding()
    grounding.prepare(model, [same, beside, other])
    found = {one["id"]: one for one in grounding.measure(model, Samples([same, beside, other]))}
    for name, z_D, positive in (("same", own_D, 1.0), ("beside", aside_D, apart)):  # the other picture is the negative
        assert found[name]["cos_positive"] == pytest.approx(positive, abs=2e-6)
        assert found[name]["margin"] == pytest.approx(positive - float(cosine(z_D, other_D)), abs=2e-6)
        assert found[name]["oracle_margin"] == pytest.approx(1.0 - float(cosine(own_D, other_D)), abs=2e-6)
