"""The adapter and a stock model side by side, over the same weights."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from helpers import DEVICE, DTYPE, stock_inputs
from torch import Tensor

from realvr.backbone import Backbone, Prompt


@dataclass(frozen=True)
class Pair:
    """``ours`` is under test; ``stock`` is a separate transformers model with stock attention and equal weights."""

    ours: Backbone
    stock: Any

    def begin(self, prompts: Many[Prompt]) -> reference.Sequence:
        """The left-padded prompts for the reference, with the latents of earlier spans in their slots."""
        inputs = stock_inputs(self.ours, prompts)
        sequence = reference.begin(
            self.stock,
            inputs["input_ids"],
            inputs["attention_mask"],
            inputs.get("pixel_values"),
            inputs.get("image_grid_thw"),
        )
        spans = [span for prompt in prompts for span in prompt.latents]
        if spans:
            slots = sequence.ids == self.ours.markers.slot
            sequence = reference.with_embeds(sequence, slots, torch.cat(spans))
        return sequence

    def think(self, sequence: reference.Sequence, latents: int) -> tuple[reference.Sequence, Tensor]:
        markers = self.ours.markers
        return reference.think(self.stock, sequence, latents, markers.start, markers.slot, markers.end)

    def splice(self, sequence: reference.Sequence, z_BKD: Tensor) -> reference.Sequence:
        """The sequence with a span whose latents are given."""
        markers, rows, count = self.ours.markers, *z_BKD.shape[:2]
        sequence = reference.append(self.stock, sequence, self.column(rows, markers.start))
        sequence = reference.append(self.stock, sequence, self.column(rows, markers.slot, count), embeds=z_BKD)
        return reference.append(self.stock, sequence, self.column(rows, markers.end))

    @staticmethod
    def column(rows: int, token: int, count: int = 1) -> Tensor:
        return torch.full((rows, count), token, device=DEVICE)


@pytest.fixture(scope="session")
def marked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with markers whose embeddings differ (new markers all start at the mean, which would hide a mix-up)."""
    backbone = Backbone.load(checkpoint, dtype=torch.float32, device="cpu")
    markers = backbone.markers
    generator = torch.Generator().manual_seed(5)
    for weight in {id(w): w for w in (backbone.core.get_input_embeddings().weight, backbone.model.lm_head.weight)}.values():
        scale = float(weight.detach().std())
        with torch.no_grad():
            for token in (markers.start, markers.slot, markers.end):
                weight[token] = torch.randn(weight.shape[1], generator=generator) * scale
    return backbone.save(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="session")
def pair(marked: Path) -> Pair:
    """In the number format of the run, the stock model with eager attention. Shared: do not change it."""
    stock = reference.load(marked, DTYPE, "eager", DEVICE)
    return Pair(Backbone.load(marked, dtype=DTYPE, device=DEVICE), stock)


def _exact(marked: Path) -> Pair:
    ours = Backbone.load(marked, dtype=torch.float64, device=DEVICE)
    reference.double(ours.model)
    return Pair(ours, reference.double(reference.load(marked, torch.float64, "sdpa", DEVICE)))


@pytest.fixture(scope="session")
def exact(marked: Path) -> Pair:
    """In float64, without the float32 islands of the stock code. Shared: do not change it."""
    return _exact(marked)


@pytest.fixture
def fresh_exact(marked: Path) -> Pair:
    """The same, for one test alone."""
    return _exact(marked)
