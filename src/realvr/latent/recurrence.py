"""The differentiable latent trajectory: K free-running steps with gradients through the recurrence and the prompt.

Three exact memory modes. ``cached`` keeps every activation and a copy of the keys and values per step.
``checkpointed-prefill`` recomputes the prompt's layers in backward. ``checkpointed`` also recomputes the steps'
layers, so that no joined copy of keys and values outlives its step. All three give the same numbers: keys and values
travel with the pass, not in a cache object that HF gradient checkpointing would drop.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.batch import Batch
from realvr.errors import UserError
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.span import Interventions, prefill, think
from realvr.latent.state import State

Memory = Literal["cached", "checkpointed-prefill", "checkpointed"]


def regenerate(
    backbone: Backbone,
    prompt: State,
    latents: int | None = None,
    *,
    interventions: Interventions | None = None,
    memory: Memory = "cached",
    recorded: RecordedSpan | None = None,
    whole: bool = True,
) -> tuple[State, Tensor]:
    """K latent steps from the state of a prompt, with gradients through each of them; the state after the span and z
    (B, K, D). Stage 2 calls this: one differentiable prefill serves more than the trajectory. ``recorded`` runs them as
    CUDA graphs where it can; without ``whole`` the state after the span may then be outside the graph."""
    count = backbone.latents if latents is None else latents
    options: dict[str, Any] = {"interventions": interventions, "checkpointed": memory == "checkpointed"}
    found = None if recorded is None else recorded.think(prompt, count, whole=whole, **options)
    return think(backbone, prompt, count, **options) if found is None else found


def trajectory(
    backbone: Backbone,
    batch: Batch,
    visual: VisualTokens | None = None,
    *,
    latents: int | None = None,
    interventions: Interventions | None = None,
    memory: Memory = "cached",
) -> tuple[State, State, Tensor]:
    """Prefill, then ``regenerate``: the state of the prompt, the state after the span, and z (B, K, D)."""
    if memory not in get_args(Memory):
        raise UserError(f"memory is '{memory}': choose one of {', '.join(get_args(Memory))}")
    prompt, _ = prefill(backbone, batch, visual, checkpointed=memory != "cached")
    after, z_BKD = regenerate(backbone, prompt, latents, interventions=interventions, memory=memory)
    return prompt, after, z_BKD
