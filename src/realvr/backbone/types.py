"""What travels between prompt building, the backbone and the latent engine.

Shape legend, used in every module: B prompts, T tokens, K latent slots, D hidden width, N visual tokens,
G completions of a prompt, L layers, H heads, R chosen query rows, V vocabulary, S answer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Layout of one image's visual tokens, after the merger.

    One tile of ``rows`` x ``cols`` tokens in raster order (Qwen, Gemma), or ``tile_rows`` x ``tile_cols`` such tiles in
    raster order, followed by a thumbnail tile of the whole image when ``thumbnail`` is set (InternVL). ``merge`` is the
    side, in patches, of the square that one visual token covers.
    """

    rows: int
    cols: int
    tile_rows: int = 1
    tile_cols: int = 1
    thumbnail: bool = False
    merge: int = 1

    @property
    def tokens(self) -> int:
        """Number of visual tokens of the image, thumbnail included."""
        return self.rows * self.cols * (self.tile_rows * self.tile_cols + int(self.thumbnail))


@dataclass(frozen=True)
class ImageInput:
    """One processed image. ``pixels`` is what the vision tower of the family expects for this image alone:
    (patches, channels*time*patch*patch) for Qwen, (tiles, 3, H, W) for the others."""

    pixels: Tensor
    grid: Grid
    key: str  # content hash: pixels that are equal have equal keys, so that no image is encoded twice in one step
    picture: str  # `picture_hash` of the image before any resizing: the same picture has it under every budget

    @property
    def tokens(self) -> int:
        return self.grid.tokens


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
