"""Evidence for one optimizer step: prototypes of all ranks, and negatives drawn from them and from a bank.

Departures from the paper: the bank. A batch that cannot offer enough distinct images is topped up from a
first-in-first-out bank of recent prototypes, so that one prompt on one device still works. Sampling depends on (seed,
step, sample), never on the rank, so any split of the same global batch draws the same negatives.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realvr.backbone.backbone import VisualTokens
from realvr.backbone.types import Prompt
from realvr.data.boxes import evidence_masks, prompt_boxes
from realvr.data.sample import Sample
from realvr.maths import evidence


@dataclass(frozen=True)
class Prototype:
    """``p`` of one prompt, with its pictures: prompts on the same picture are no negatives of each other."""

    vector_D: Tensor  # float32, CPU
    pictures: frozenset[str]
    """By `picture_hash`: neither the file nor the resolution at which the model reads a picture makes it another."""


def pictures_of(prompt: Prompt) -> frozenset[str]:
    """The pictures that a prompt shows."""
    return frozenset(image.picture for image in prompt.images)


def prototypes(samples: Sequence[Sample], prompts: Sequence[Prompt], visual: VisualTokens) -> list[Prototype]:
    """``p+`` of each prompt: masked mean of its frozen visual tokens over the evidence (all of them without boxes)."""
    tokens = list(visual.per_image())
    found = []
    for sample, prompt in zip(samples, prompts, strict=True):
        own, tokens = tokens[: len(prompt.images)], tokens[len(prompt.images) :]
        if not own:
            found.append(Prototype(torch.zeros(visual.features_ND.shape[-1]), frozenset()))
            continue
        masks = evidence_masks(prompt_boxes(sample), [image.grid for image in prompt.images])
        mask_N = torch.cat([torch.from_numpy(mask) for mask in masks]).to(own[0].device)
        pooled = evidence.pool(torch.cat(own).float(), mask_N)
        found.append(Prototype(pooled.cpu(), pictures_of(prompt)))
    return found


class NegativeBank:
    """Recent prototypes of the global batch; identical on every rank because every rank adds the same ones."""

    def __init__(self, size: int) -> None:
        self.items: deque[Prototype] = deque(maxlen=max(size, 0))

    def add(self, items: Sequence[Prototype]) -> None:
        self.items.extend(item for item in items if bool(item.vector_D.any()))

    def state_dict(self) -> dict[str, Any]:
        vectors = [item.vector_D for item in self.items]
        return {
            "vectors": torch.stack(vectors) if vectors else torch.empty(0, 0),
            "pictures": [sorted(item.pictures) for item in self.items],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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


def pad(negatives: Sequence[Sequence[Tensor]], count: int, width: int) -> tuple[Tensor, Tensor]:
    """(B, M, D) and which are real (B, M)."""
    vectors = torch.zeros(len(negatives), max(count, 1), width)
    valid = torch.zeros(len(negatives), max(count, 1), dtype=torch.bool)
    for row, items in enumerate(negatives):
        for column, item in enumerate(items):
            vectors[row, column] = item
            valid[row, column] = True
    return vectors, valid
