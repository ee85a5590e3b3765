"""Interface between evaluations and models: requests and span plans in, replies out.

A model, an oracle that knows the answers and a constant that always says the same all implement it and pass the same
runner, extraction and scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from realvr.data.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from realvr.backbone.types import Turn


@dataclass(frozen=True)
class Request:
    """One question. ``turns`` is the conversation up to and including it; earlier assistant turns may carry their
    reply ids and latent span, see `realvr.backbone.types.Turn`."""

    sample: Sample
    turns: Sequence[Turn]
    seed: int = 0
    """Seed of the sampling of this request alone; of no effect in greedy decoding."""


@dataclass(frozen=True)
class Plan:
    """How the span of every request is filled: ``latents`` slots of the model's own, or given ones."""

    latents: int
    """K. 0 means no span and no markers."""
    given: Sequence[Tensor] | None = None
    """One (K, D) per request, spliced in instead of the model's own latents."""
    interventions: Mapping[int, Tensor] = field(default_factory=dict)
    """Vectors put into the model's own span: step t, counted from 1, to (D,) or one for each request (R, D)."""


@dataclass
class Reply:
    """One answer. ``latents`` (K, D) float32 on the CPU is the span that was used (None for K = 0)."""

    text: str
    ids: list[int] = field(default_factory=list)
    """Token ids of the reply without the end-of-sequence token, to continue the conversation with."""
    finish: str = "eos"
    latents: Tensor | None = None
    prompt: str = ""
    """SHA-256 of the encoded prompt: token ids and images."""
    new_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None
    """Set where the request could not be put to the model; ``text`` is then empty."""


class Responder(Protocol):
    """What an evaluation needs of a model."""

    @property
    def name(self) -> str:
        """Name for tables."""
        ...

    @property
    def latents(self) -> int:
        """K that the checkpoint was trained with; 0 where it never saw the markers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for the record of the run, JSON-compatible: path, weights hash, family, dtype, decoding."""
        ...

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        """Replies per plan, per request: ``reply(requests, plans)[p][r]``. The prompts are read once for all plans.

        A request that cannot be answered gets a reply with ``error``; it never stops the others.
        """
        ...
