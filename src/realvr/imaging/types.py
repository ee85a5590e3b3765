"""What an image becomes: processed pixels and the grid of its visual tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        """Visual tokens, thumbnails included."""
        return self.grid.tokens
