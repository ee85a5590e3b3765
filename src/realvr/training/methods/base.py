"""Base training: a model from nothing, all parameters, vision included.

Not in the paper, which has pretrained backbones: the embedded world needs a model that can see. A small model does not
learn to see from answer letters alone, so three signals are combined: the answer in words and as a letter, a caption,
and a dense auxiliary loss that reads colour and shape of the object under every visual token from that token alone (two
linear heads that are dropped at export).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from realvr.backbone.backbone import VisualTokens
from realvr.latent.span import decoder_pass, token_logprobs
from realvr.maths import evidence, reconstruction
from realvr.training import lanes
from realvr.training.base_rows import BaseBatch, BaseRows, Place
from realvr.training.dropping import Draws
from realvr.training.method import Method, Run, Term
from realvr.training.prefetch import prefetch
from realvr.training.sections import MethodConfig
from realvr.training.settings import BaseSettings
from realvr.training.sft_batch import SftBatch
from realvr.training.task import Collected


class BaseConfig(MethodConfig):
    """Losses of base training."""

    next_token_weight: float = Field(default=1.0, ge=0)
    """Weight of the next-token loss on the answer."""
    caption_weight: float = Field(default=1.0, ge=0)
    """Weight of the next-token loss on captions, for samples that have one."""
    caption_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the samples whose caption is used; each costs as much as a question."""
    dense_weight: float = Field(default=0.5, ge=0)
    """Weight of the auxiliary loss that predicts labels from single visual tokens, for samples that have them."""
    feature_norm_weight: float = Field(default=0.0, ge=0)
    """Weight of the squared distance of each visual token's root mean square from 1; 0 is off. Keeps visual tokens of a
    size that a latent can reconstruct."""
    spread_weight: float = Field(default=0.0, ge=0)
    """Weight of a penalty on visual tokens of one picture that look alike (cosine over one half); 0 is off. Without it
    equal things at two places may have nearly equal tokens, and a latent cannot tell the places apart."""
    position_jitter: int = Field(default=0, ge=0)
    """Largest random gap in the position ids, so that later stages may put latents there; 0 is off."""


class Base(Method[BaseSettings, BaseConfig, BaseBatch]):
    """All parameters from nothing: answers, captions and dense labels of visual tokens.

    One optimizer step is ``optim.batch`` samples over all ranks; each gives a question row and, where it has one, a
    caption row.
    """

    name, stage, Config = "base", "base", BaseConfig
    span = False
    term_names = ("next_token", "caption", "dense", "feature_norm", "spread")

    @override
    def begin(self, run: Run[BaseSettings]) -> None:
        super().begin(run)
        backbone, c = self.backbone, self.config
        backbone.model.requires_grad_(True)
        backbone.spell_out = True
        self._open(run.ranks.world)
        keep, samples = run.settings.data.keep_encoded, self.samples[0]
        self.rows = BaseRows(backbone, samples, caption_ratio=c.caption_ratio, jitter=c.position_jitter, keep=keep)
        self.heads = nn.ModuleList(
            nn.Linear(backbone.width, len(names), device=backbone.device, dtype=backbone.dtype)
            for names in self.rows.classes
        )
        self._prefetched: Generator[Any] | None = None

    def _open(self, count: int) -> None:
        """Begin to read the lanes of this rank."""
        self.lanes = lanes.lanes_of(self.ranks, self.settings.optim, count)
        self.samples = [self.data.mixture(self.settings, lane.number, count) for lane in self.lanes]
        self._positions: list[dict[str, Any]] | None = None

    @override
    def modules(self) -> dict[str, nn.Module]:
        return {**super().modules(), "heads": self.heads}

    @override
    def collect(self, step: int) -> Collected[BaseBatch]:
        batches, drawn = next(self._steps(step))
        self.draws.add(drawn)
        for batch in batches:
            batch.rows.unstack_images()
        own = {
            "next_token": sum(int((~b.caption_M).sum()) for b in batches),
            "caption": sum(int(b.caption_M.sum()) for b in batches),
            "dense": sum(int((b.dense_NA >= 0).sum()) for b in batches),
            "examples": sum(len(b.rows.names) for b in batches),
            "visual": sum(len(b.dense_NA) for b in batches),
            "images": sum(len(b.rows.images) for b in batches),
        }
        everyone = self.ranks.gather_objects(own)
        totals = {name: float(max(sum(each[name] for each in everyone), 1)) for name in own}
        device = self.backbone.device
        tokens = torch.tensor(float(sum(int(b.rows.real_RT.sum()) for b in batches)), device=device)
        for batch in batches:
            batch.totals = totals
            batch.to(device)
        world = torch.tensor(1 / self.ranks.world, device=device)
        return Collected(batches, {"tokens": (tokens, world), **self.draws.metrics(device, self.ranks.world)})

    @override
    def terms(self, b: BaseBatch) -> Iterator[Term]:
        c, rows, share = self.config, b.rows, len(b.rows.names) / b.totals["examples"]
        visual = self.backbone.encode_images(rows.images, train=True)
        if not rows.images:  # the tower has a gradient of zero: ranks must agree on what has one
            visual = replace(visual, features_ND=visual.features_ND + self._unused_tower())
        hidden = self._read(rows, visual)
        predicting = hidden[rows.predict_M2[:, 0], rows.predict_M2[:, 1]]
        logp, _ = token_logprobs(self.backbone, predicting, rows.labels_M, entropy=False)
        answers = reconstruction.next_token(logp, ~b.caption_M, b.totals["next_token"])
        yield Term("next_token", c.next_token_weight, answers, share)
        captions = reconstruction.next_token(logp, b.caption_M, b.totals["caption"])
        yield Term("caption", c.caption_weight, captions, share)
        yield Term("dense", c.dense_weight, self._dense(visual.features_ND, b), share)
        norms = _norm_error(visual.features_ND) / b.totals["visual"]
        yield Term("feature_norm", c.feature_norm_weight, norms, share)
        alike = _likeness(visual) / b.totals["images"] if c.spread_weight else norms * 0
        yield Term("spread", c.spread_weight, alike, share)

    def _unused_tower(self) -> Tensor:
        own = (p for module in self.backbone.vision_modules() for p in module.parameters() if p.requires_grad)
        return torch.stack([parameter.sum() * 0.0 for parameter in own]).sum()

    def _read(self, rows: SftBatch, visual: VisualTokens) -> Tensor:
        embeds = self.backbone.embed(rows.ids_RT.masked_fill(rows.image_RT, 0))
        embeds = embeds.masked_scatter(rows.image_RT[..., None], visual.features_ND.to(embeds.dtype))
        return decoder_pass(
            self.backbone,
            None,
            embeds,
            rows.positions,
            real_BT=rows.real_RT,
            segment_BT=rows.segment_RT,
            window_position_BT=rows.place_RT if self.backbone.windowed else None,
            image_BT=rows.image_RT,
            deepstack=visual.deepstack,
        )[1]

    def _dense(self, features_ND: Tensor, b: BaseBatch) -> Tensor:
        total = features_ND.sum() * 0.0
        for number, head in enumerate(self.heads):
            total = total + nn.functional.cross_entropy(
                head(features_ND).float(), b.dense_NA[:, number], ignore_index=-1, reduction="sum"
            )
        return total / b.totals["dense"]

    # ------------------------------------------------------------------ data

    def _steps(self, step: int) -> Iterator[tuple[list[BaseBatch], Draws]]:
        """Microbatches of ``step`` and the following ones; worker processes make them ahead of time."""
        data = self.settings.data
        if self._prefetched is None:
            if data.workers and data.keep_encoded and not self.rows.kept:
                self.rows.encode_all(data.workers)
            self._prefetched = prefetch(self._make, self._orders(step), data.workers)
        for (positions, _), made in self._prefetched:
            self._positions = positions
            yield made

    def _orders(self, step: int) -> Iterator[tuple[list[dict[str, Any]], tuple[int, list[list[Place]]]]]:
        """Per step: where the data stands after it, and what it is made of, lane by lane."""
        places = [samples.places() for samples in self.samples]
        while True:
            drawn = [[next(each) for _ in range(lane.rows)] for lane, each in zip(self.lanes, places, strict=True)]
            yield [samples.state_dict() for samples in self.samples], (step, drawn)
            step += 1

    def _make(self, order: tuple[int, list[list[Place]]]) -> tuple[list[BaseBatch], Draws]:
        """Encode and lay out one step; and which of its rows cannot be used. May run in another process."""
        step, drawn = order
        found: list[BaseBatch] = []
        counted = Draws()
        for lane, places in zip(self.lanes, drawn, strict=True):
            generator = lane.generator(self.settings.run.seed, step)
            found += self.rows.batches(step, places, self.settings.optim.microbatch, generator)[lane.own]
            if lane.counts:
                counted.add(self.rows.encoder.draws)
        if self.settings.data.workers:
            for batch in found:
                batch.rows.stack_images()
        return found, counted

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        positions = self._positions or [samples.state_dict() for samples in self.samples]
        keeper = next((lane for lane in self.lanes if lane.counts), None)  # of the draws of all lanes of this rank
        found = {
            lane.number: {"samples": position, "draws": (self.draws if lane is keeper else Draws()).state_dict()}
            for lane, position in zip(self.lanes, positions, strict=True)
        }
        return lanes.rank_state(found, self.lanes[0].lanes, self.ranks.world)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        found, count = lanes.own_states(state, self.ranks.rank, self.ranks.world)
        self._open(count)
        self.draws = Draws()
        for lane, samples in zip(self.lanes, self.samples, strict=True):
            samples.load_state_dict(found[lane.number]["samples"])
            draws = Draws()
            draws.load_state_dict(found[lane.number].get("draws", {"rejected": {}}))
            if lane.counts:
                self.draws.add(draws)

    @override
    def redistribute(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return lanes.redistribute(states, self.ranks, self.settings.optim)

    def close(self) -> None:
        """End the worker processes."""
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None


def _norm_error(features_ND: Tensor) -> Tensor:
    """Sum over visual tokens of the squared distance of their root mean square from 1.

    Later stages have a latent reconstruct them, and a latent comes out of a norm layer: features that have grown large
    cannot be matched, and the reconstruction error is then about length only.
    """
    rms_N = features_ND.float().pow(2).mean(-1).add(1e-6).sqrt()
    return (rms_N - 1).pow(2).sum()


def _likeness(visual: VisualTokens) -> Tensor:
    """Sum over pictures of the mean over pairs of their visual tokens of ``max(cos - 1/2, 0) ** 2``."""
    total = visual.features_ND.sum() * 0.0
    by_count: dict[int, list[Tensor]] = {}
    for tokens_ND in visual.per_image():
        by_count.setdefault(len(tokens_ND), []).append(tokens_ND)
    for count, pictures in by_count.items():
        unit_PND = evidence.unit(torch.stack(pictures))
        over_PNN = (unit_PND @ unit_PND.transpose(1, 2) - 0.5).clamp(min=0).pow(2)
        own = over_PNN.diagonal(dim1=1, dim2=2).sum(-1)  # a token is like itself
        total = total + ((over_PNN.sum((1, 2)) - own) / max(count * (count - 1), 1)).sum()
    return total
