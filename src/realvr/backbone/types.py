"""What travels between prompt building, the backbone and the latent engine.

Shape legend, used in every module: B prompts, T tokens, K latent slots, D hidden width, N visual tokens,
G completions of a prompt, L layers, H heads, R chosen query rows, V vocabulary, S answer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from realvr.imaging.types import ImageInput


@dataclass
class Turn:
    """One message of a conversation.

    ``images`` precede ``text``. An assistant turn may carry the latent span it was produced with (``latents`` (K, D),
    spliced back in as inputs) and the exact token ``ids`` of its reply (used instead of re-encoding ``text``, so that a
    conversation continued from saved tokens equals the live one).
    """

    role: Literal["system", "user", "assistant"]
    text: str = ""
    images: list[Any] = field(default_factory=list)  # paths, encoded bytes, Pillow images or processed ImageInputs
    latents: Tensor | None = None
    ids: list[int] | None = None


@dataclass(frozen=True)
class Prompt:
    """One conversation, encoded. ``ids`` already holds one id per visual token and per latent slot."""

    ids: Tensor  # (T,) long, CPU
    images: tuple[ImageInput, ...] = ()
    latents: tuple[Tensor, ...] = ()  # spliced latents of earlier spans, (K_i, D), in order

    def __len__(self) -> int:
        return int(self.ids.shape[0])
