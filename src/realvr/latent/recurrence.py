"""The differentiable latent trajectory: K free-running steps with gradients through the recurrence and the prompt.

Three exact memory modes. ``cached`` keeps every activation and, unless steps are split, a copy of the keys and values
per step. ``checkpointed-prefill`` recomputes the prompt's layers in backward. ``checkpointed`` also recomputes the
steps' layers, so that no joined copy of keys and values outlives its step. All three give the same numbers: keys and
values travel with the pass, not in a cache object that HF gradient checkpointing would drop.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.batch import Batch
from realvr.errors import UserError
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.span import Interventions, prefill, span_tokens, think
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
    split: bool = False,
) -> tuple[State, Tensor]:
    """K latent steps from the state of a prompt, with gradients through each of them; the state after the span and z
    (B, K, D). Stage 2 calls this: one differentiable prefill serves more than the trajectory. ``recorded`` runs them as
    CUDA graphs where it can; without ``whole`` the state after the span may then be outside the graph. ``split``: each
    step attends to the prompt as it lies and to the span by itself, where that is the same."""
    count = backbone.latents if latents is None else latents
    options: dict[str, Any] = {"interventions": interventions, "checkpointed": memory == "checkpointed"}
    found = None if recorded is None else recorded.think(prompt, count, whole=whole, split=split, **options)
    if found is not None:
        return found
    return think(backbone, prompt, count, trunk=prompt.trunk(span_tokens(count)) if split else None, **options)


def trajectory(
    backbone: Backbone,
    batch: Batch,
    visual: VisualTokens | None = None,
    *,
    latents: int | None = None,
    interventions: Interventions | None = None,
    memory: Memory = "cached",
    split: bool = False,
) -> tuple[State, State, Tensor]:
    """Prefill, then ``regenerate``: the state of the prompt, the state after the span, and z (B, K, D)."""
    if memory not in get_args(Memory):
        raise UserError(f"memory is '{memory}': choose one of {', '.join(get_args(Memory))}")
    prompt, _ = prefill(backbone, batch, visual, checkpointed=memory != "cached")
    after, z_BKD = regenerate(backbone, prompt, latents, interventions=interventions, memory=memory, split=split)
    return prompt, after, z_BKD
