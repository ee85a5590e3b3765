"""A Stage-2 method of a user: ReaLVR with a slowly moving teacher of its latents, one file outside the package.

The teacher is the mean direction of the latents so far; the third term of the loss pulls the model's own latents
towards it. It moves after each update, and must survive a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from realvr.latent import prefill, think
from realvr.training.method import Term
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.records import STAGE2_METRICS
from realvr.training.rl_batch import RlBatch


class ToyConfig(ReaLVRConfig):
    """Settings of the toy."""

    decay: float = Field(default=0.5, ge=0, le=1)
    """How much of the teacher stays at each update."""
    pull: float = Field(default=0.1, ge=0)
    """Weight of the distance from the teacher."""


class Toy(ReaLVR):
    """ReaLVR, and latents that stay near the mean of earlier ones."""

    name, Config = "toy", ToyConfig
    config: ToyConfig
    metrics = [*STAGE2_METRICS, {"name": "toy/updates", "title": "Updates of the teacher", "first": True, "last": True}]

    def __init__(self, backbone: Any, config: ToyConfig) -> None:
        super().__init__(backbone, config)
        self.term_names = (*self.term_names, "pull")
        self.teacher_D = torch.zeros(backbone.width)
        self.seen_D: Tensor | None = None
        self.updates = 0

    def terms(self, b: RlBatch) -> Iterator[Term]:
        yield from super().terms(b)
        _, z_BKD = think(self.backbone, prefill(self.backbone, b.batch, b.visual)[0], b.latents_BKD.shape[1])
        self.seen_D = z_BKD.detach().mean((0, 1)).float()
        distance = (z_BKD.float() - self.teacher_D).square().mean() * b.share
        count = torch.tensor(float(self.updates))
        yield Term("pull", self.config.pull, distance, b.share, {"toy/updates": (count, torch.ones(()))})

    def after_update(self) -> None:
        assert self.seen_D is not None
        self.teacher_D = self.config.decay * self.teacher_D + (1 - self.config.decay) * self.seen_D
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "teacher": self.teacher_D, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.teacher_D, self.updates = state["teacher"], state["updates"]
