"""The model that a run starts from, and the frozen copy of it that a KL needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realvr.backbone.backbone import Backbone
from realvr.training.adapters import Adapters
from realvr.training.sections import settled
from realvr.training.settings import TrainSettings
from realvr.training.task import Ranks


def load_backbone(settings: TrainSettings, ranks: Ranks, announce: bool = True) -> Backbone:
    """The model of the settings on this rank's device. What the settings left to the checkpoint, or to the device, is
    filled in, so that the records of the run say what it was trained with."""
    model = settings.model
    if model.tf32:
        torch.set_float32_matmul_precision("high")
    backbone = Backbone.load(
        model.path,
        dtype=model.dtype,
        device=ranks.device,
        latents=model.latents,
        min_tokens=model.min_tokens,
        max_tokens=model.max_tokens,
        tiles=model.tiles,
        max_tiles=model.max_tiles,
        fast_vision=model.fast_vision,
        fused_layers=model.fused_layers,
        announce=announce and ranks.rank == 0,
        place=ranks.place if ranks.shards else None,
    )
    found = backbone.processor.limits.note() | {"latents": backbone.latents}
    settings.model = settled(model.model_copy(update=found), backbone)
    return backbone


class StartingPolicy:
    """The policy that a run started from: with LoRA the model without its adapters, otherwise a second, frozen copy."""

    def __init__(self, backbone: Backbone, adapters: Adapters, settings: TrainSettings, ranks: Ranks) -> None:
        self.backbone, self.adapters, self.ranks = backbone, adapters, ranks
        self.copy: Backbone | None = None
        if not adapters.rank:
            self.copy = load_backbone(settings, ranks, announce=False)
            ranks.freeze(self.copy.model)

    @contextmanager
    def use(self) -> Iterator[Backbone]:
        """The policy, for as long as it is needed."""
        if self.copy is not None:
            yield self.copy
            return
        with self.ranks.full_parameters(), self.adapters.still(), self.adapters.reference():
            yield self.backbone
