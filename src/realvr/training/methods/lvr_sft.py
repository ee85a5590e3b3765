"""LVR-SFT: teacher-forced visual evidence in the latent slots (sec:prelim_vanilla_objective). All of Stage 1 is
`LvrSft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from realvr.latent.span import decoder_pass, token_logprobs
from realvr.maths import reconstruction
from realvr.maths.precision import masked
from realvr.training.method import Term
from realvr.training.metrics import on_device
from realvr.training.sft_batch import SftBatch
from realvr.training.sft_method import PackedConfig, PackedMethod
from realvr.training.task import Collected, Metrics


class LvrSftConfig(PackedConfig):
    """Reconstruction of the evidence, and packed rows."""

    reconstruction_weight: float = Field(default=0.1, ge=0)
    """Weight of the reconstruction loss beside the cross-entropy."""
    reconstruction_reduction: Literal["mean", "sum"] = "mean"
    """Over the width of a visual token: ``mean`` is the MSE of the paper's table, ``sum`` its equation."""


class LvrSft(PackedMethod[LvrSftConfig]):
    """Next-token loss on the response, and reconstruction of the evidence in the latent slots.

    Teacher forcing: the inputs of the slots are the visual tokens of the evidence, in reading order; the state one
    position before slot t is trained to reconstruct target t. Cross-entropy covers the response text and both markers,
    not the slots.

    Departures from the paper: the reconstruction error is a mean over d (the paper's table; its equation sums, which is
    ``reconstruction_reduction: sum``). These options are ours and off by default: position jitter; hiding the image
    from all text of a share of the examples, so that the response can read it through the latents only; answers in
    words before their letter; targets in the order of the boxes (``evidence_order: given``); spans of exactly K slots,
    a slot for each box (``span: fixed``); spans in earlier turns (``earlier_spans``).
    """

    name, order, Config = "lvr-sft", 0, LvrSftConfig
    term_names = ("next_token", "reconstruction")

    def collect(self, step: int) -> Collected[SftBatch]:
        """Packed rows, and the counts of the whole step that its losses are divided by."""
        batches = self.take(step)
        tokens, targets = self.total(
            sum(len(batch.labels_M) for batch in batches),
            sum(len(batch.slot_example_N.unique()) for batch in batches),
        )
        metrics = self.row_metrics(batches)
        for batch in batches:
            batch.tokens_total, batch.targets_total = tokens, targets
            batch.to(self.backbone.device)
        return Collected(batches, metrics)

    def terms(self, b: SftBatch) -> Iterator[Term]:
        """``next_token + reconstruction_weight * reconstruction``, by one teacher-forced pass."""
        c, backbone = self.config, self.backbone
        visual = self.encode_images(b.images)
        embeds = backbone.embed(b.ids_RT.masked_fill(b.image_RT | b.slot_RT, 0))
        features_ND = visual.features_ND.to(embeds.dtype)
        targets_ND = b.targets(features_ND)  # the evidence
        if b.images:
            embeds = embeds.masked_scatter(b.image_RT[..., None], features_ND)
        embeds = embeds.masked_scatter(b.slot_RT[..., None], targets_ND)
        _, hidden_RTD = decoder_pass(
            backbone,
            None,
            embeds,
            b.positions,
            real_BT=b.real_RT,
            segment_BT=b.segment_RT,
            window_position_BT=b.place_RT if backbone.windowed else None,
            image_visibility_BT=b.image_visibility_RT,
            image_BT=b.image_RT if b.images else None,
            deepstack=visual.deepstack,
            packed=b.packed,
            checkpointed=c.gradient_checkpointing,
        )
        predicting_MD = hidden_RTD[b.predict_M2[:, 0], b.predict_M2[:, 1]]
        logp_M, _ = token_logprobs(backbone, predicting_MD, b.labels_M, entropy=False)
        next_token = reconstruction.next_token(logp_M, denominator=b.tokens_total)
        yield Term("next_token", 1.0, next_token, len(b.labels_M) / b.tokens_total)
        states_ND, first_N = self.target_states(hidden_RTD, b)
        error = reconstruction.reconstruction(
            states_ND, targets_ND, b.slot_example_N, b.examples, c.reconstruction_reduction, b.targets_total
        )
        share, metrics = _latent_metrics(states_ND, targets_ND, first_N, b)
        yield Term("reconstruction", c.reconstruction_weight, error, share, metrics)


def _latent_metrics(states_ND: Tensor, targets_ND: Tensor, first_N: Tensor, b: SftBatch) -> tuple[Tensor, Metrics]:
    """This microbatch's part of the step's examples with targets; and how near the states are to their targets."""
    with torch.no_grad():
        cosine = nn.functional.cosine_similarity(states_ND.float(), targets_ND.float(), dim=-1)
    device = cosine.device
    has_targets = torch.zeros(b.examples, device=device).index_fill(0, b.slot_example_N, 1.0)
    # The first latent of a span alone has seen no evidence yet: it shows whether the model finds it by itself.
    return has_targets.sum() / b.targets_total, {
        "data/with_targets": (has_targets.sum(), on_device(float(b.examples), device)),
        "latents/cos_target": (cosine.sum(), on_device(float(len(cosine)), device)),
        "latents/cos_first": (masked(cosine, first_N).sum(), first_N.sum().float()),
    }
