"""Evidence for one optimizer step: prototypes of all ranks, and negatives drawn from them and from a bank.

Departures from the paper: the bank. A batch that cannot offer enough distinct images is topped up from a
first-in-first-out bank of recent prototypes, so that one prompt on one device still works. Sampling depends on (seed,
step, sample), never on the rank, so any split of the same global batch draws the same negatives. Off by default:
evidence that is not all of a sample's boxes (`Evidence`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from realvr.backbone.backbone import VisualTokens
from realvr.backbone.types import Prompt
from realvr.data.boxes import evidence_masks, prompt_boxes, with_area
from realvr.data.sample import Box, Sample
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.maths import evidence

Evidence = Literal["all", "last", "per-slot"]
"""Which of a sample's ordered boxes are evidence: their union (the paper), the last alone, or box t for latent t, the
last repeated."""


@dataclass(frozen=True)
class Prototype:
    """``p`` of one prompt, with its pictures: prompts on the same picture are no negatives of each other."""

    vector_D: Tensor  # float32, CPU; (K, D) with one a latent
    pictures: frozenset[str]
    """By `picture_hash`: neither the file nor the resolution at which the model reads a picture makes it another."""


def pictures_of(prompt: Prompt) -> frozenset[str]:
    """The pictures that a prompt shows."""
    return frozenset(image.picture for image in prompt.images)


def prototypes(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    visual: VisualTokens,
    which: Evidence = "all",
    latents: int = 0,
) -> list[Prototype]:
    """``p+`` of each prompt: masked mean of its frozen visual tokens over the evidence (all of them without boxes).

    ``which`` boxes are evidence; ``per-slot`` gives one prototype for each of ``latents``.
    """
    tokens = list(visual.per_image())
    found = []
    for sample, prompt in zip(samples, prompts, strict=True):
        own, tokens = tokens[: len(prompt.images)], tokens[len(prompt.images) :]
        parts = chosen_boxes(sample, which, latents)
        if own:
            tokens_ND, grids = torch.cat(own).float(), [image.grid for image in prompt.images]
            pooled = torch.stack([evidence.pool(tokens_ND, _mask(boxes, grids, tokens_ND.device)) for boxes in parts])
        else:
            pooled = torch.zeros(len(parts), visual.features_ND.shape[-1])
        found.append(Prototype((pooled if which == "per-slot" else pooled[0]).cpu(), pictures_of(prompt)))
    return found


def _mask(boxes: Sequence[Box], grids: Sequence[Grid], device: torch.device) -> Tensor:
    return torch.cat([torch.from_numpy(mask) for mask in evidence_masks(boxes, grids)]).to(device)


def chosen_boxes(sample: Sample, which: Evidence, latents: int) -> list[list[Box]]:
    """The boxes of each prototype of a sample: one prototype, or one for each latent. No box: the whole image.

    A box without area is no evidence. More boxes than latents are an error where each latent has its own.
    """
    boxes = with_area(prompt_boxes(sample))
    if which != "per-slot":
        return [boxes if which == "all" else boxes[-1:]]
    if len(boxes) > latents:
        raise UserError(
            f"{sample.source or sample.id}: {len(boxes)} evidence boxes, but K = {latents}: evidence_boxes per-slot "
            "holds each latent against a box of its own; take last or all, or a model with more latents"
        )
    return [boxes[t : t + 1] or boxes[-1:] for t in range(latents)]


class NegativeBank:
    """Recent prototypes of the global batch; identical on every rank because every rank adds the same ones."""

    def __init__(self, size: int) -> None:
        self.items: deque[Prototype] = deque(maxlen=max(size, 0))

    def add(self, items: Sequence[Prototype]) -> None:
        """Keep prototypes for later steps; one that is all zero has no direction and is left out."""
        self.items.extend(item for item in items if bool(item.vector_D.any()))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run has the same negatives."""
        vectors = [item.vector_D for item in self.items]
        return {
            "vectors": torch.stack(vectors) if vectors else torch.empty(0, 0),
            "pictures": [sorted(item.pictures) for item in self.items],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the bank of a checkpoint instead of this one."""
        self.items.clear()
        if "pictures" not in state:  # of a version that knew pictures by their processed pixels: not comparable
            return
        self.items.extend(
            Prototype(vector.clone(), frozenset(pictures))
            for vector, pictures in zip(state["vectors"], state["pictures"], strict=True)
        )


def sample_negatives(
    own: int, batch: Sequence[Prototype], bank: Sequence[Prototype], count: int, seed: int, step: int, sample_id: str
) -> list[Tensor]:
    """At most ``count`` negatives for prompt ``own`` of the global batch: from the batch first, the rest from the bank.

    Never the same picture, never a zero prototype, no picture twice.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{sample_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
    taken = set(batch[own].pictures)
    chosen: list[Tensor] = []
    for pool in ([item for i, item in enumerate(batch) if i != own], list(bank)):
        for index in torch.randperm(len(pool), generator=generator).tolist():
            item = pool[index]
            if len(chosen) == count:
                return chosen
            if item.pictures & taken or not bool(item.vector_D.any()):
                continue
            taken |= item.pictures
            chosen.append(item.vector_D)
    return chosen


def pad(negatives: Sequence[Sequence[Tensor]], count: int, *size: int) -> tuple[Tensor, Tensor]:
    """(B, M, D) and which are real (B, M). ``size`` is that of a prototype: D, or K and D."""
    vectors = torch.zeros(len(negatives), max(count, 1), *size)
    valid = torch.zeros(len(negatives), max(count, 1), dtype=torch.bool)
    for row, items in enumerate(negatives):
        for column, item in enumerate(items):
            vectors[row, column] = item
            valid[row, column] = True
    return vectors, valid
