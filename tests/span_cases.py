"""Spans with gradient in float64: models, prompts of unequal length, and a scalar of all that a span gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import op_tape
from helpers import DEVICE, ask
from pair import exact_pair
from realvr.backbone import Backbone, Batch
from realvr.latent import prefill, score
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.recurrence import regenerate


def exact_backbone(tiny: Path, folder: Path) -> Backbone:
    """The tiny checkpoint of a family, whose norms and biases differ, with markers, through a new folder."""
    marked = Backbone.load(tiny, dtype=torch.float32, device="cpu").save(folder)
    found = exact_pair(marked).ours
    if getattr(found.text_config, "num_experts", None):  # in float64 stock experts run one by one
        found.text_config._experts_implementation = "batched_mm"
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # norms and biases of a random model are all equal
        for parameter in found.decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter) * 0.3)
    found.freeze_vision()
    return found


def recorder(backbone: Backbone, **options: Any) -> RecordedSpan:
    return RecordedSpan(backbone, columns=16, record=op_tape.record, **options)


def batch_of(backbone: Backbone, first: int = 0) -> Batch:
    """Two prompts of unequal length; ``first`` changes the pictures and not the shape."""
    texts = ("What color is the small circle?", "Which of the two shapes is larger, and why?")
    return backbone.batch([backbone.prompt(ask(first + 6 * i, text=text)) for i, text in enumerate(texts)])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def value(
    backbone: Backbone,
    batch: Batch,
    latents: int,
    recorded: RecordedSpan | None,
    *,
    whole: bool = True,
    memory: Any = "cached",
    **options: Any,
) -> Tensor:
    """A scalar of the prompt, of all latents and, with ``whole``, of an answer behind them."""
    prompt, hidden = prefill(backbone, batch, checkpointed=memory != "cached")
    after, z_BKD = regenerate(backbone, prompt, latents, memory=memory, recorded=recorded, whole=whole, **options)
    found = (z_BKD * noise(*z_BKD.shape)).sum() + (hidden[:, -1] * noise(*hidden[:, -1].shape, seed=1)).sum()
    assert (
        after.span == (prompt.length + 1, prompt.length + 1 + latents) and after.length == prompt.length + latents + 2
    )
    if whole:
        ids = torch.randint(5, 200, (len(batch), 1, 4), generator=torch.Generator().manual_seed(2)).to(DEVICE)
        logp, _, _ = score(backbone, after, ids)
        found = found + (logp * noise(*logp.shape, seed=3)).sum()
    return found
