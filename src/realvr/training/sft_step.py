"""The whole Stage-1 step as one module: next-token loss on the response, reconstruction of the evidence in the slots.

Teacher forcing: the inputs of the slots are the visual tokens of the evidence, in reading order; the state one
position before slot t is trained to reconstruct target t. Cross-entropy covers the response text and both markers,
not the slots.

Departures from the paper: the reconstruction error is a mean over d (the paper's table; its equation sums, which is
``reduction="sum"``). Two options are ours and off by default: position jitter, and hiding the image from response
queries in a share of the examples, so that the response can read it through the slots only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone
from realvr.backbone.batch import collate
from realvr.backbone.types import ImageInput, Prompt
from realvr.latent.engine import advance, token_logprobs
from realvr.maths import reconstruction
from realvr.training.task import Metrics


@dataclass(frozen=True)
class SftExample:
    """One example, encoded: prompt, span and response in one sequence."""

    prompt: Prompt  # ids of the whole sequence, with one slot id per target
    prompt_length: int  # tokens before <|lvr_start|> or, without a span, before the response
    targets: Tensor  # (T_v,) indices into the example's visual tokens, images one after the other
    name: str = ""

    def __len__(self) -> int:
        return len(self.prompt)


@dataclass
class SftBatch:
    """R packed rows of at most T tokens, and what is learned where."""

    ids_RT: Tensor
    positions: Tensor  # (3, R, T) or (R, T)
    place_RT: Tensor
    real_RT: Tensor
    segment_RT: Tensor
    image_RT: Tensor
    slot_RT: Tensor
    veil_RT: Tensor | None
    images: tuple[ImageInput, ...]
    slot_source_N: Tensor  # visual token behind each slot, over all images of the microbatch
    slot_example_N: Tensor  # example of each slot
    predict_M2: Tensor  # (row, column) whose state predicts a labelled token
    labels_M: Tensor
    examples: int
    tokens_total: float = 1.0  # labelled tokens of the whole optimizer step
    targets_total: float = 1.0  # examples with targets of the whole optimizer step
    names: list[str] = field(default_factory=list)

    def to(self, device: torch.device) -> SftBatch:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device, non_blocking=True))
        return self


class SftStep(nn.Module):
    """``forward(microbatch, part=None) -> (loss, metrics)``; see the contract in ``task.py``."""

    def __init__(
        self,
        backbone: Backbone,
        weight: float = 0.1,
        reduction: Literal["mean", "sum"] = "mean",
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.model = backbone.model
        self.backbone = backbone
        self.weight = weight
        self.reduction = reduction
        self.checkpointed = checkpointed

    def forward(self, micro: SftBatch, part: str | None = None) -> tuple[Tensor, Metrics]:
        backbone = self.backbone
        visual = backbone.see(micro.images)
        embeds = backbone.embed(micro.ids_RT.masked_fill(micro.image_RT | micro.slot_RT, 0))
        features = visual.features_ND.to(embeds.dtype)
        targets_ND = features[micro.slot_source_N]
        if micro.images:
            embeds = embeds.masked_scatter(micro.image_RT[..., None], features)
        embeds = embeds.masked_scatter(micro.slot_RT[..., None], targets_ND)
        _, hidden = advance(
            backbone,
            None,
            embeds,
            micro.positions,
            real_BT=micro.real_RT,
            segment_BT=micro.segment_RT,
            place_BT=micro.place_RT if backbone.windowed else None,
            veil_BT=micro.veil_RT,
            image_BT=micro.image_RT if micro.images else None,
            deepstack=visual.deepstack,
            checkpointed=self.checkpointed,
        )
        before = micro.slot_RT.roll(-1, dims=1)  # one position before each slot; a slot is never in column 0
        return self._losses(micro, hidden, hidden[before], targets_ND, part)

    def _losses(
        self, micro: SftBatch, hidden: Tensor, states_ND: Tensor, targets_ND: Tensor, part: str | None
    ) -> tuple[Tensor, Metrics]:
        predicting = hidden[micro.predict_M2[:, 0], micro.predict_M2[:, 1]]
        logp, _ = token_logprobs(self.backbone, predicting, micro.labels_M)
        ce = -logp.sum() / micro.tokens_total
        errors_E = reconstruction.per_example(
            states_ND, targets_ND, micro.slot_example_N, micro.examples, self.reduction
        )
        rec = errors_E.sum() / micro.targets_total
        share = torch.tensor(len(micro.labels_M) / micro.tokens_total, device=ce.device)
        metrics: Metrics = {"loss/next_token": (ce.detach().float(), share)}
        has_targets = torch.zeros(micro.examples, device=ce.device).index_fill(0, micro.slot_example_N, 1.0)
        metrics["loss/reconstruction"] = (rec.detach().float(), has_targets.sum() / micro.targets_total)
        metrics["data/with_targets"] = (has_targets.sum(), torch.tensor(float(micro.examples), device=ce.device))
        with torch.no_grad():
            cosine = nn.functional.cosine_similarity(states_ND.float(), targets_ND.float(), dim=-1)
            metrics["latents/cos_target"] = (cosine.sum(), torch.tensor(float(len(cosine)), device=ce.device))
        loss = {"next_token": ce, "reconstruction": self.weight * rec}.get(part or "", ce + self.weight * rec)
        metrics["loss"] = (loss.detach().float(), share)
        return loss + hidden.sum() * 0.0, metrics


def pack_rows(
    backbone: Backbone,
    rows: Sequence[Sequence[SftExample]],
    *,
    jitter: int = 0,
    hidden_ratio: float = 0.0,
    generator: torch.Generator | None = None,
) -> SftBatch:
    """Lay examples side by side: one segment per example, positions restarting, right-padded to the longest row."""
    parts = [[_lay_out(backbone, example, jitter, generator) for example in row] for row in rows]
    width = max(sum(len(example) for example in row) for row in rows)
    fill = {"ids": 0, "positions": 0, "place": 0, "image": False, "slot": False}
    out = {
        key: torch.stack([_row([p[key] for p in row], width, value) for row in parts]) for key, value in fill.items()
    }
    segment, real = torch.full((len(rows), width), -2), torch.zeros(len(rows), width, dtype=torch.bool)
    veil = torch.zeros(len(rows), width, dtype=torch.long)
    predict: list[tuple[int, int]] = []
    labels: list[int] = []
    sources, owners = [], []
    number = offset = 0
    for r, row in enumerate(rows):
        column = 0
        for example in row:
            stop = column + len(example)
            segment[r, column:stop], real[r, column:stop] = number, True
            first = column + example.prompt_length
            if hidden_ratio and float(torch.rand((), generator=generator)) < hidden_ratio:
                veil[r, column:first][out["image"][r, column:first]] = 1
                veil[r, first + len(example.targets) + 2 if len(example.targets) else first : stop] = 2
            learned = (torch.arange(first, stop)[~out["slot"][r, first:stop]]).tolist()
            predict += [(r, c - 1) for c in learned]
            labels += out["ids"][r, learned].tolist()
            sources.append(example.targets + offset)
            owners.append(torch.full((len(example.targets),), number))
            offset += sum(image.tokens for image in example.prompt.images)
            column, number = stop, number + 1
    positions = out["positions"].transpose(0, 1).contiguous() if backbone.mrope else out["positions"]
    return SftBatch(
        ids_RT=out["ids"],
        positions=positions,
        place_RT=out["place"],
        real_RT=real,
        segment_RT=segment,
        image_RT=out["image"],
        slot_RT=out["slot"],
        veil_RT=veil if bool(veil.any()) else None,
        images=tuple(image for row in rows for example in row for image in example.prompt.images),
        slot_source_N=torch.cat(sources),
        slot_example_N=torch.cat(owners),
        predict_M2=torch.tensor(predict, dtype=torch.long).view(-1, 2),
        labels_M=torch.tensor(labels, dtype=torch.long),
        examples=number,
        names=[example.name for row in rows for example in row],
    )


def _row(parts: list[Tensor], width: int, value: int | bool) -> Tensor:
    joined = torch.cat(parts, dim=-1)
    return nn.functional.pad(joined, (0, width - joined.shape[-1]), value=value)


def _lay_out(
    backbone: Backbone, example: SftExample, jitter: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Ids, positions (with gaps before and after the span if ``jitter``), and which columns are images or slots."""
    plain = Prompt(example.prompt.ids, example.prompt.images)
    batch = collate([plain], image_id=backbone.image_id, slot_id=-1, pad_id=0, mrope=backbone.mrope)
    positions = batch.positions[..., 0, :]
    slot = example.prompt.ids == backbone.markers.slot
    if jitter:
        gaps = torch.randint(0, jitter + 1, (2,), generator=generator)
        column = torch.arange(len(example))
        first = example.prompt_length
        after = first + len(example.targets) + 1 if len(example.targets) else first
        positions = positions + gaps[0] * (column >= first) + gaps[1] * (column >= after)
    return {
        "ids": example.prompt.ids,
        "positions": positions,
        "place": torch.arange(len(example)),
        "image": batch.image_BT[0],
        "slot": slot,
    }
