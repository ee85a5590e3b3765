"""How close free-running latents are to the evidence, for any checkpoint: the margin g and the cosine to p⁺ of held-out
questions. Training reports both for ReaLVR only; here every arm is measured on the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from realvr.backbone.backbone import Backbone
from realvr.data.reading import read
from realvr.diagnostics.numbers import mean
from realvr.latent.prototypes import pad, prototypes, sample_negatives
from realvr.latent.span import prefill, think
from realvr.maths import evidence
from realvr.training.examples import Encoder

NEGATIVES = 16


@torch.no_grad()
def measure(
    model: str, data: Path, latents: int, *, seed: int = 0, negatives: int = NEGATIVES, batch: int = 32
) -> dict[str, Any]:
    """Means over questions, each with a bootstrap interval, of the mean over the K latents.

    ``margin`` is cos(z, p⁺) minus the cosine to the hardest of ``negatives`` prototypes of other questions of the set,
    which are drawn alike for every model. Questions without boxes are left out.
    """
    backbone = Backbone.load(model, device="cpu")
    encoder = Encoder(backbone, backbone.context_length)
    encoded = [(sample, encoder.prompt(sample)) for sample in read(data) if sample.boxes]
    usable = [(sample, prompt) for sample, prompt in encoded if prompt is not None]
    found, spans = [], []
    for start in range(0, len(usable), batch):
        samples, prompts = zip(*usable[start : start + batch], strict=True)
        visual = backbone.encode_images([image for prompt in prompts for image in prompt.images])
        found += prototypes(samples, prompts, visual)
        state, _ = prefill(backbone, backbone.batch(list(prompts)), visual)
        spans.append(think(backbone, state, latents)[1].float())
    z_BKD = torch.cat(spans)
    positive_BD = torch.stack([prototype.vector_D for prototype in found])
    drawn = [sample_negatives(i, found, [], negatives, seed, 0, sample.id) for i, (sample, _) in enumerate(usable)]
    negatives_BMD, valid_BM = pad(drawn, negatives, backbone.width)
    cosine_BK = evidence.similarity(z_BKD, positive_BD)
    margin_BK = evidence.margin(z_BKD, positive_BD, negatives_BMD, valid_BM)
    oracle_B1 = evidence.margin(positive_BD[:, None], positive_BD, negatives_BMD, valid_BM)
    return {
        "questions": len(usable),
        "latents": latents,
        "negatives": negatives,
        "margin": mean(margin_BK.mean(-1).tolist()),
        "cos_positive": mean(cosine_BK.mean(-1).tolist()),
        "oracle_margin": mean(oracle_B1[:, 0].tolist()),
    }
