"""Stage-1 examples and packed rows: what stands in each column, and what is learned where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone
from realvr.backbone.batch import collate
from realvr.backbone.packed_attention import Packed
from realvr.backbone.types import Prompt
from realvr.imaging.types import Grid, ImageInput
from realvr.maths.precision import at_least_float32


@dataclass(frozen=True)
class SftExample:
    """One example, encoded: prompt, span and response in one sequence."""

    prompt: Prompt  # ids of the whole sequence, with one slot id per target
    prompt_length: int  # tokens before the last <|lvr_start|> or, without a span, before the response
    targets: Tensor  # (T_v,) indices into the example's visual tokens, images one after the other, and its pools
    name: str = ""
    pools: tuple[Tensor, ...] = ()  # visual tokens whose mean is a target; the first is the index after the last token
    earlier: int = 0  # how many of the targets are not of the response's span: of earlier turns, or auxiliary
    _layout: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def behind_span(self) -> bool:
        """Whether the response stands behind a span."""
        return len(self.targets) > self.earlier

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
    slot_source_N: Tensor  # visual token behind each slot, over all images of the microbatch; then come the pools
    slot_example_N: Tensor  # example of each slot
    predict_M2: Tensor  # (row, column) whose state predicts a labelled token
    labels_M: Tensor
    examples: int
    slot_N2: Tensor  # (row, column) of each slot; never column 0
    slot_first_N: Tensor  # whether a slot is the first of its span
    opens_E: Tensor  # which of the M labelled tokens is the first of each example
    pool_source_P: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # tokens, pool by pool
    pool_sizes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    tokens_total: float = 1.0  # labelled tokens of the whole optimizer step
    targets_total: float = 1.0  # examples with targets of the whole optimizer step
    names: list[str] = field(default_factory=list)
    stacked: tuple[Tensor, list[tuple[Grid, str, str, int]], list[int]] | None = None
    packed: Packed | None = None  # where the examples lie, for attention inside each of them

    def targets(self, features_ND: Tensor) -> Tensor:
        """What the slots stand for (slots, D): visual tokens, or the mean of several."""
        if len(self.pool_sizes):
            # Not index_add: the same bits on every run, also on a GPU.
            members = at_least_float32(features_ND[self.pool_source_P])
            # Unchecked: the sizes are ours, and a check makes the host wait for a GPU.
            means = torch.segment_reduce(members, "mean", lengths=self.pool_sizes, unsafe=True)
            features_ND = torch.cat([features_ND, means.to(features_ND.dtype)])
        return features_ND[self.slot_source_N]

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
        """On a device, in place."""
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Packed)):
                setattr(self, name, value.to(device, non_blocking=True))
        return self


def pack_rows(
    backbone: Backbone,
    rows: Sequence[Sequence[SftExample]],
    *,
    jitter: int = 0,
    hidden_ratio: float = 0.0,
    generator: torch.Generator | None = None,
    variable_length: bool = False,
) -> SftBatch:
    """Lay examples side by side: one segment per example, positions restarting, right-padded to the longest row."""
    examples = [example for row in rows for example in row]
    layouts = iter([example.layout(backbone) for example in examples])
    parts = [[next(layouts) for _ in row] for row in rows]
    out = {key: _pad_rows([[part[key] for part in row] for row in parts], value) for key, value in _FILL.items()}
    numbers = iter(range(len(examples)))
    segment = _pad_rows([[torch.full((len(example),), next(numbers)) for example in row] for row in rows], -2)
    positions = out["positions"]
    gaps_EG, hidden_E = _drawn(parts, jitter, hidden_ratio, generator)
    if jitter:
        before = out["after"][..., None] > torch.arange(gaps_EG.shape[1])
        gap_RTG = gaps_EG[segment.clamp(min=0)] * before * (segment >= 0)[..., None]
        shift = gap_RTG.sum(-1)
        positions = positions + (shift[..., None] if positions.ndim == 3 else shift)
    # All indices are made here, in main memory: a mask on a GPU would make the host wait for their number.
    learned, slots = out["learned"].nonzero(), out["slot"].nonzero()
    example_M = segment[out["learned"]]
    sources, pools = _sources(examples)
    return SftBatch(
        ids_RT=out["ids"],
        positions=positions.permute(2, 0, 1).contiguous() if backbone.mrope else positions,
        place_RT=out["place"],
        real_RT=segment >= 0,
        segment_RT=segment,
        image_RT=out["image"],
        slot_RT=out["slot"],
        image_visibility_RT=_veil(examples, segment, out, hidden_E),
        images=tuple(image for example in examples for image in example.prompt.images),
        slot_source_N=sources,
        slot_example_N=torch.arange(len(examples)).repeat_interleave(torch.tensor([len(e.targets) for e in examples])),
        predict_M2=learned - torch.tensor([0, 1]),
        labels_M=out["ids"][out["learned"]],
        examples=len(examples),
        slot_N2=slots,
        slot_first_N=~out["slot"][slots[:, 0], slots[:, 1] - 1],
        opens_E=(example_M.diff(prepend=example_M.new_tensor([-1])) != 0).nonzero()[:, 0],
        pool_source_P=torch.cat(pools) if pools else torch.empty(0, dtype=torch.long),
        pool_sizes=torch.tensor([len(pool) for pool in pools], dtype=torch.long),
        names=[example.name for example in examples],
        packed=Packed.build(segment) if variable_length else None,
    )


def _drawn(
    rows: Sequence[Sequence[dict[str, Tensor]]], jitter: int, ratio: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Gaps of each example (E, G), and whether its image is to be hidden (E,). Row by row: what a row gets does not
    depend on the microbatch that it is in."""
    gaps: list[Tensor] = []
    hidden: list[Tensor] = []
    for row in rows:
        if jitter:
            most = max(2, *(int(part["after"].max()) for part in row))
            gaps += torch.randint(0, jitter + 1, (len(row), most), generator=generator).unbind()
        hidden.append(torch.rand(len(row), generator=generator) < ratio if ratio else torch.zeros(len(row)).bool())
    return nn.utils.rnn.pad_sequence(gaps, batch_first=True) if gaps else torch.zeros(0, 0), torch.cat(hidden)


def _sources(examples: Sequence[SftExample]) -> tuple[Tensor, list[Tensor]]:
    """Targets and pools of all examples, counted over all visual tokens of the microbatch; pools come after these."""
    counts = [sum(image.tokens for image in example.prompt.images) for example in examples]
    total, start = sum(counts), 0
    found: list[Tensor] = []
    pools: list[Tensor] = []
    for example, count in zip(examples, counts, strict=True):
        # A target from ``count`` on is a pool of the example.
        found.append(example.targets + torch.where(example.targets < count, start, total + len(pools) - count))
        pools += [pool + start for pool in example.pools]
        start += count
    return torch.cat(found), pools


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
    hidden_E: Tensor,
) -> Tensor | None:
    """2 for text that cannot see the image, 1 for the image it cannot see, in those of the drawn examples whose
    response stands behind a span."""
    hide_E = hidden_E & torch.tensor([example.behind_span for example in examples])
    if not bool(hide_E.any()):
        return None
    # All text but <|lvr_start|>, whose state is the first latent: what text cannot see it cannot pass on.
    opens = (out["after"] % 2 == 1) & ~out["slot"]
    image_visibility = torch.where(out["slot"] | opens, 0, torch.where(out["image"], 1, 2))
    return torch.where(hide_E[segment_RT.clamp(min=0)] & (segment_RT >= 0), image_visibility, 0)


def _lay_out(backbone: Backbone, example: SftExample) -> dict[str, Tensor]:
    """What stands in each column (T,): ids, positions ((T, 3) with multimodal rotary positions), images, slots, learned
    tokens, and how many gaps of the jitter come before it: one before ``<|lvr_start|>``, one before ``<|lvr_end|>``;
    without a span, both before the response."""
    plain = Prompt(example.prompt.ids, example.prompt.images)
    batch = collate([plain], image_id=backbone.image_id, slot_id=-1, pad_id=0, mrope=backbone.mrope)
    column = torch.arange(len(example))
    ids, markers, first = example.prompt.ids, backbone.markers, example.prompt_length
    slot = ids == markers.slot
    gaps = ((ids == markers.start) | (ids == markers.end)).long()
    if not example.behind_span:
        gaps[first] += 2
    return {
        "ids": example.prompt.ids,
        "positions": batch.positions[..., 0, :].movedim(-1, 0),
        "place": column,
        "image": batch.image_BT[0],
        "slot": slot,
        "learned": (column >= first) & ~slot,
        "after": gaps.cumsum(0),
    }
