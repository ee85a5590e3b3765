"""A Stage-1 method of a user, from nothing but the base class: one row a step, next-token loss only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from realvr.latent import decoder_pass, token_logprobs
from realvr.training.examples import Encoder
from realvr.training.method import Method, Run, Term
from realvr.training.sections import MethodConfig
from realvr.training.settings import SftSettings
from realvr.training.sft_batch import SftBatch, pack_rows
from realvr.training.task import Collected


class PlainConfig(MethodConfig):
    """Settings of the toy."""

    scale: float = 1.0
    """Factor of the loss."""


class Plain(Method[SftSettings, PlainConfig, SftBatch]):
    """Next-token loss on the response."""

    name, stage, Config, term_names = "plain", "sft", PlainConfig, ("next_token",)

    def begin(self, run: Run[SftSettings]) -> None:
        super().begin(run)
        self.backbone.freeze_vision()
        self.encoder = Encoder(self.backbone, 512)
        self.samples = run.data.mixture(run.settings, run.ranks.rank, run.ranks.world)

    def collect(self, step: int) -> Collected[SftBatch]:
        stream, rows = iter(self.samples), []
        while len(rows) < self.share:
            self.draws.drawn += 1
            rows += [[example] for example in [self.encoder.sequence(next(stream))] if example is not None]
        size = self.settings.optim.microbatch
        batches = [pack_rows(self.backbone, rows[i : i + size]) for i in range(0, len(rows), size)]
        total = float(sum(self.ranks.gather_objects(sum(len(batch.labels_M) for batch in batches))))
        for batch in batches:
            batch.tokens_total = total
            batch.to(self.backbone.device)
        return Collected(batches)

    def terms(self, b: SftBatch) -> Iterator[Term]:
        visual = self.backbone.encode_images(b.images)
        embeds = self.backbone.embed(b.ids_RT.masked_fill(b.image_RT | b.slot_RT, 0))
        features = visual.features_ND.to(embeds.dtype)
        embeds = embeds.masked_scatter(b.image_RT[..., None], features)
        embeds = embeds.masked_scatter(b.slot_RT[..., None], features[b.slot_source_N])
        window = b.place_RT if self.backbone.windowed else None
        _, hidden = decoder_pass(
            self.backbone,
            None,
            embeds,
            b.positions,
            real_BT=b.real_RT,
            segment_BT=b.segment_RT,
            window_position_BT=window,
            image_BT=b.image_RT,
            deepstack=visual.deepstack,
        )
        logp, _ = token_logprobs(self.backbone, hidden[b.predict_M2[:, 0], b.predict_M2[:, 1]], b.labels_M)
        loss = -self.config.scale * logp.sum() / b.tokens_total
        yield Term("next_token", 1.0, loss, len(b.labels_M) / b.tokens_total)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples.load_state_dict(state["samples"])
