"""Stage-1 examples and packed rows: what stands in each column, and what is learned where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone
from realvr.backbone.batch import collate
from realvr.backbone.types import Prompt
from realvr.imaging.types import Grid, ImageInput


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
