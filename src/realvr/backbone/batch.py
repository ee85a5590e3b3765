"""Prompts side by side: left padding, positions, and which columns are images or latent slots. All of it on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realvr.backbone.positions import mrope_positions, plain_positions
from realvr.backbone.types import Prompt
from realvr.imaging.types import ImageInput


@dataclass(frozen=True)
class Batch:
    """B prompts of at most T tokens, left-padded so that every row continues in the same column."""

    ids_BT: Tensor
    real_BT: Tensor  # bool; False for padding
    positions: Tensor  # (3, B, T) with multimodal rotary positions, else (B, T)
    next_B: Tensor  # position of the token after the last
    image_BT: Tensor  # bool
    slot_BT: Tensor  # bool; latent slots whose inputs are spliced in
    images: tuple[ImageInput, ...]  # of all rows, in row-major order
    latents: tuple[Tensor, ...]  # spliced latents of all rows, (K_i, D), in row-major order
    padded: bool
    continues: bool = False  # whether positions go on from those of a state

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; images follow when they are encoded."""
        names = ("ids_BT", "real_BT", "positions", "next_B", "image_BT", "slot_BT")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def __len__(self) -> int:
        return int(self.ids_BT.shape[0])


def collate(
    prompts: Sequence[Prompt],
    *,
    image_id: int,
    slot_id: int,
    pad_id: int,
    mrope: bool,
    start_B: Tensor | None = None,
) -> Batch:
    """Left-pad ``prompts`` into one batch. ``start_B`` is the first position of each row where the prompts continue a
    state."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    real_BT = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = prompt.ids
        real_BT[row, width - len(prompt) :] = True
    image_BT = real_BT & (ids_BT == image_id)
    slot_BT = real_BT & (ids_BT == slot_id)
    images = tuple(image for prompt in prompts for image in prompt.images)
    latents = tuple(span for prompt in prompts for span in prompt.latents)
    _check(prompts, image_BT, slot_BT)
    if mrope:
        grids = [image.grid for image in images]
        positions, next_B = mrope_positions(real_BT, image_BT, grids, start_B)
    else:
        positions, next_B = plain_positions(real_BT, start_B)
    padded = any(len(prompt) != width for prompt in prompts)
    continues = start_B is not None
    return Batch(ids_BT, real_BT, positions, next_B, image_BT, slot_BT, images, latents, padded, continues)


def _check(prompts: Sequence[Prompt], image_BT: Tensor, slot_BT: Tensor) -> None:
    """A count mismatch is an error in the making of the prompt; never warn and go on."""
    for row, (prompt, images, slots) in enumerate(
        zip(prompts, image_BT.sum(-1).tolist(), slot_BT.sum(-1).tolist(), strict=True)
    ):
        expected = sum(image.tokens for image in prompt.images)
        if images != expected:
            raise ValueError(f"prompt {row} has {images} image tokens, its {len(prompt.images)} images have {expected}")
        expected = sum(span.shape[0] for span in prompt.latents)
        if slots != expected:
            raise ValueError(f"prompt {row} has {slots} latent slots, {expected} latents were recorded")
