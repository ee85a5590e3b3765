"""The whole Stage-1 step as one module: next-token loss on the response, reconstruction of the evidence in the slots.

Teacher forcing: the inputs of the slots are the visual tokens of the evidence, in reading order; the state one
position before slot t is trained to reconstruct target t. Cross-entropy covers the response text and both markers,
not the slots.

Departures from the paper: the reconstruction error is a mean over d (the paper's table; its equation sums, which is
``reduction="sum"``). Two options are ours and off by default: position jitter, and hiding the image from all text of
a share of the examples, so that the response can read it through the latents only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone
from realvr.backbone.batch import collate
from realvr.backbone.types import Prompt
from realvr.imaging.types import Grid, ImageInput
from realvr.latent.span import decoder_pass, token_logprobs
from realvr.maths import objective, reconstruction
from realvr.training.task import Metrics


@dataclass(frozen=True)
class SftExample:
    """One example, encoded: prompt, span and response in one sequence."""

    prompt: Prompt  # ids of the whole sequence, with one slot id per target
    prompt_length: int  # tokens before <|lvr_start|> or, without a span, before the response
    targets: Tensor  # (T_v,) indices into the example's visual tokens, images one after the other
    name: str = ""
    _layout: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.prompt)

    def layout(self, backbone: Backbone) -> dict[str, Tensor]:
        """See ``_lay_out``; computed once, since an example that is kept comes back every epoch."""
        if not self._layout:
            self._layout.update(_lay_out(backbone, self))
        return self._layout


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
    image_visibility_RT: Tensor | None
    images: tuple[ImageInput, ...]
    slot_source_N: Tensor  # visual token behind each slot, over all images of the microbatch
    slot_example_N: Tensor  # example of each slot
    predict_M2: Tensor  # (row, column) whose state predicts a labelled token
    labels_M: Tensor
    examples: int
    tokens_total: float = 1.0  # labelled tokens of the whole optimizer step
    targets_total: float = 1.0  # examples with targets of the whole optimizer step
    names: list[str] = field(default_factory=list)
    stacked: tuple[Tensor, list[tuple[Grid, str, str, int]], list[int]] | None = None

    def stack_images(self) -> None:
        """Put the pixels of all images into one tensor: a worker sends each tensor through a file of its own."""
        unique = list({image.key: image for image in self.images}.values())
        pixels = torch.cat([image.pixels for image in unique]) if unique else torch.empty(0)
        order = {image.key: place for place, image in enumerate(unique)}
        facts = [(image.grid, image.key, image.picture, len(image.pixels)) for image in unique]
        self.stacked = pixels, facts, [order[image.key] for image in self.images]
        self.images = ()

    def unstack_images(self) -> None:
        """Undo `stack_images`; the images share its memory."""
        if self.stacked is None:
            return
        pixels, facts, order = self.stacked
        parts = pixels.split([length for *_, length in facts]) if facts else ()
        unique = [ImageInput(part, grid, *names) for part, (grid, *names, _) in zip(parts, facts, strict=True)]
        self.images, self.stacked = tuple(unique[place] for place in order), None

    def to(self, device: torch.device) -> SftBatch:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device, non_blocking=True))
        return self


class SftStep(nn.Module):
    """``forward(microbatch, term=None) -> (loss, metrics)``; see the contract in ``task.py``."""

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

    def forward(self, micro: SftBatch, term: str | None = None) -> tuple[Tensor, Metrics]:
        backbone = self.backbone
        visual = backbone.encode_images(micro.images)
        embeds = backbone.embed(micro.ids_RT.masked_fill(micro.image_RT | micro.slot_RT, 0))
        features = visual.features_ND.to(embeds.dtype)
        targets_ND = features[micro.slot_source_N]
        if micro.images:
            embeds = embeds.masked_scatter(micro.image_RT[..., None], features)
        embeds = embeds.masked_scatter(micro.slot_RT[..., None], targets_ND)
        _, hidden = decoder_pass(
            backbone,
            None,
            embeds,
            micro.positions,
            real_BT=micro.real_RT,
            segment_BT=micro.segment_RT,
            window_position_BT=micro.place_RT if backbone.windowed else None,
            image_visibility_BT=micro.image_visibility_RT,
            image_BT=micro.image_RT if micro.images else None,
            deepstack=visual.deepstack,
            checkpointed=self.checkpointed,
        )
        before = micro.slot_RT.roll(-1, dims=1)  # one position before each slot; a slot is never in column 0
        return self._losses(micro, hidden, hidden[before], targets_ND, term)

    def _losses(
        self, micro: SftBatch, hidden: Tensor, states_ND: Tensor, targets_ND: Tensor, term: str | None
    ) -> tuple[Tensor, Metrics]:
        predicting = hidden[micro.predict_M2[:, 0], micro.predict_M2[:, 1]]
        logp, _ = token_logprobs(self.backbone, predicting, micro.labels_M)
        ce = reconstruction.next_token(logp, denominator=micro.tokens_total)
        rec = reconstruction.reconstruction(
            states_ND, targets_ND, micro.slot_example_N, micro.examples, self.reduction, micro.targets_total
        )
        share = torch.tensor(len(micro.labels_M) / micro.tokens_total, device=ce.device)
        metrics: Metrics = {"loss/next_token": (ce.detach().float(), share)}
        has_targets = torch.zeros(micro.examples, device=ce.device).index_fill(0, micro.slot_example_N, 1.0)
        metrics["loss/reconstruction"] = (rec.detach().float(), has_targets.sum() / micro.targets_total)
        metrics["data/with_targets"] = (has_targets.sum(), torch.tensor(float(micro.examples), device=ce.device))
        with torch.no_grad():
            cosine = nn.functional.cosine_similarity(states_ND.float(), targets_ND.float(), dim=-1)
            metrics["latents/cos_target"] = (cosine.sum(), torch.tensor(float(len(cosine)), device=ce.device))
            # The first latent alone has seen no evidence yet: it shows whether the model finds it by itself.
            first = micro.slot_example_N.diff(prepend=micro.slot_example_N.new_tensor([-1])) != 0
            metrics["latents/cos_first"] = (cosine[first].sum(), first.sum().float())
        terms = {"next_token": (1.0, ce), "reconstruction": (self.weight, rec)}
        loss = objective.total(terms if term is None else {term: terms[term]})
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
    examples = [example for row in rows for example in row]
    layouts = iter([example.layout(backbone) for example in examples])
    parts = [[next(layouts) for _ in row] for row in rows]
    out = {key: _pad_rows([[part[key] for part in row] for row in parts], value) for key, value in _FILL.items()}
    numbers = iter(range(len(examples)))
    segment = _pad_rows([[torch.full((len(example),), next(numbers)) for example in row] for row in rows], -2)
    positions = out["positions"]
    if jitter:
        gaps_E2 = torch.randint(0, jitter + 1, (len(examples), 2), generator=generator)
        gap_RT2 = (
            gaps_E2[segment.clamp(min=0)] * (out["after"][..., None] > torch.arange(2)) * (segment >= 0)[..., None]
        )
        shift = gap_RT2.sum(-1)
        positions = positions + (shift[..., None] if positions.ndim == 3 else shift)
    learned = out["learned"].nonzero()
    counts = [sum(image.tokens for image in example.prompt.images) for example in examples]
    offsets = [0, *itertools.accumulate(counts)]
    return SftBatch(
        ids_RT=out["ids"],
        positions=positions.permute(2, 0, 1).contiguous() if backbone.mrope else positions,
        place_RT=out["place"],
        real_RT=segment >= 0,
        segment_RT=segment,
        image_RT=out["image"],
        slot_RT=out["slot"],
        image_visibility_RT=_veil(examples, segment, out, hidden_ratio, generator),
        images=tuple(image for example in examples for image in example.prompt.images),
        slot_source_N=torch.cat([example.targets + start for example, start in zip(examples, offsets, strict=False)]),
        slot_example_N=torch.arange(len(examples)).repeat_interleave(torch.tensor([len(e.targets) for e in examples])),
        predict_M2=learned - torch.tensor([0, 1]),
        labels_M=out["ids"][out["learned"]],
        examples=len(examples),
        names=[example.name for example in examples],
    )


_FILL: dict[str, int | bool] = {
    "ids": 0,
    "positions": 0,
    "place": 0,
    "image": False,
    "slot": False,
    "learned": False,
    "after": 0,
}


def _pad_rows(rows: list[list[Tensor]], value: int | bool) -> Tensor:
    joined = [row[0] if len(row) == 1 else torch.cat(row) for row in rows]
    return nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=value)


def _veil(
    examples: Sequence[SftExample],
    segment_RT: Tensor,
    out: dict[str, Tensor],
    ratio: float,
    generator: torch.Generator | None,
) -> Tensor | None:
    """2 for text that cannot see the image, 1 for the image it cannot see, in a share of the examples with targets."""
    if not ratio:
        return None
    draws = torch.rand(len(examples), generator=generator)
    hide_E = (draws < ratio) & torch.tensor([len(example.targets) > 0 for example in examples])
    if not bool(hide_E.any()):
        return None
    # All text but <|lvr_start|>, whose state is the first latent: what text cannot see it cannot pass on.
    opens = (out["after"] == 1) & ~out["slot"]
    image_visibility = torch.where(out["slot"] | opens, 0, torch.where(out["image"], 1, 2))
    return torch.where(hide_E[segment_RT.clamp(min=0)] & (segment_RT >= 0), image_visibility, 0)


def _lay_out(backbone: Backbone, example: SftExample) -> dict[str, Tensor]:
    """What stands in each column (T,): ids, positions ((T, 3) with multimodal rotary positions), images, slots, learned
    tokens, and how many gaps of the jitter come before it: one before ``<|lvr_start|>``, one before ``<|lvr_end|>``."""
    plain = Prompt(example.prompt.ids, example.prompt.images)
    batch = collate([plain], image_id=backbone.image_id, slot_id=-1, pad_id=0, mrope=backbone.mrope)
    column = torch.arange(len(example))
    slot = example.prompt.ids == backbone.markers.slot
    first = example.prompt_length
    after = first + len(example.targets) + 1 if len(example.targets) else first
    return {
        "ids": example.prompt.ids,
        "positions": batch.positions[..., 0, :].movedim(-1, 0),
        "place": column,
        "image": batch.image_BT[0],
        "slot": slot,
        "learned": (column >= first) & ~slot,
        "after": (column >= first).long() + (column >= after).long(),
    }
