"""The adapter and a stock model side by side, over the same weights; gradients of both, compared."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import reference
from helpers import DEVICE, stock_inputs
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


def exact_pair(marked: Path) -> Pair:
    """In float64, without the float32 islands of the stock code."""
    ours = Backbone.load(marked, dtype=torch.float64, device=DEVICE)
    reference.double(ours.model)
    return Pair(ours, reference.double(reference.load(marked, torch.float64, "sdpa", DEVICE)))


def gradients(model: Any, scalar: Tensor) -> dict[str, Tensor]:
    """Gradient of every trainable parameter by name (zero where it is not used)."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(scalar, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def relative(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest relative difference over the parameters. A gradient that is nothing but rounding beside the others (below
    1e-6 of the largest) is measured on that floor."""
    assert ours.keys() == right.keys()
    floor = 1e-6 * max(float(g.norm()) for g in right.values())
    assert floor > 0
    return max(float((ours[n] - g).norm()) / max(float(g.norm()), floor) for n, g in right.items())
