"""Where the latents are in the picture: the visual token nearest to each of z_1 … z_K, by cosine.

A tiled image (InternVL) ends in a thumbnail that shows everything once more. Its tokens have columns in `similarity`,
but they are never the nearest: like evidence boxes (`realvr.data.boxes`), a walk is over the tiles alone, whose
tokens have one place each. `thumbnail` says where one of its tokens is closer still than the one that is named.

Importing this module loads no torch: a walk is drawn and stored without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from realvr.data.boxes import XYXY, canvas_size, on_canvas, token_boxes, token_place
from realvr.errors import UserError
from realvr.imaging.types import Grid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One visual token: the image that it belongs to, in the order of the prompt, and its cell of that image."""

    image: int
    row: int
    col: int
    box: XYXY
    """Its area, in fractions of the image."""

    @property
    def center(self) -> tuple[float, float]:
        """(x, y) in fractions of the image."""
        x0, y0, x1, y1 = self.box
        return (x0 + x1) / 2, (y0 + y1) / 2


@dataclass(frozen=True)
class Walk:
    """The latents of one span against the visual tokens of the images before it, N in all, in the order of the
    prompt."""

    nearest: NDArray[np.int64]
    """(K,) index of the token with the largest cosine; never one of a thumbnail."""
    cosine: NDArray[np.float32]
    """(K,) its cosine."""
    similarity: NDArray[np.float32]
    """(K, N) cosines with all tokens, thumbnails included."""
    grids: tuple[Grid, ...]
    thumbnail: NDArray[np.bool_]
    """(K,) whether a token of a thumbnail has a larger cosine than the nearest."""

    def __len__(self) -> int:
        return len(self.nearest)

    def places(self) -> list[Place]:
        """Where the nearest token of each latent is."""
        return [token_at(int(index), self.grids) for index in self.nearest]

    def heat(self, image: int) -> NDArray[np.float32]:
        """(K, rows, columns) cosines with the tokens of one image as they lie in it, without its thumbnail."""
        start = sum(grid.tokens for grid in self.grids[:image])
        grid = self.grids[image]
        return on_canvas(self.similarity[:, start : start + grid.tokens], grid)


def walk(latents_KD: Tensor, features_ND: Tensor, grid: Grid | Sequence[Grid]) -> Walk:
    """Cosine of every latent with every visual token, and the nearest token of each latent.

    ``features_ND`` are the visual tokens of the images that the prompt shows, one image after the other
    (`VisualTokens.features_ND`), ``grid`` their grids. Of tokens with equal cosines the first is the nearest: an image
    that is shown twice is met where it is shown first.
    """
    import torch

    from realvr.maths.evidence import unit

    grids = (grid,) if isinstance(grid, Grid) else tuple(grid)
    count = sum(one.tokens for one in grids)
    if not count:
        raise UserError("no picture is shown: latents are compared with the visual tokens of a picture")
    if len(features_ND) != count or latents_KD.ndim != 2 or latents_KD.shape[-1] != features_ND.shape[-1]:
        raise ValueError(
            f"latents {tuple(latents_KD.shape)} and visual tokens {tuple(features_ND.shape)} do not fit {count} tokens"
        )
    with torch.no_grad():
        z_KD, tokens_ND = unit(latents_KD), unit(features_ND.to(latents_KD.device))
        # Products and sums, as in the margin of training: a matrix product may run in TF32.
        rows = [(tokens_ND * z_D).sum(-1) for z_D in z_KD]
        similarity = torch.stack(rows) if rows else tokens_ND.new_zeros(0, count)
    values = similarity.float().cpu().numpy()
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if wrong.size:
        raise UserError(f"z_{wrong[0] + 1} or a visual token is not finite: the model's numbers have overflowed")
    tile_N = np.concatenate([np.arange(one.tokens) < np.prod(canvas_size(one)) for one in grids])
    on_tiles = np.where(tile_N, values, -np.inf)
    nearest = on_tiles.argmax(axis=1).astype(np.int64)
    cosine = values[np.arange(len(values)), nearest]
    return Walk(nearest, cosine, values, grids, values.max(axis=1) > cosine)


def token_at(index: int, grids: Sequence[Grid]) -> Place:
    """The place of a visual token, counted over all images of a prompt."""
    for image, grid in enumerate(grids):
        if index < grid.tokens:
            place = token_place(index, grid)
            if place is None:
                raise ValueError(f"token {index} of image {image + 1} is one of its thumbnail")
            x0, y0, x1, y1 = (float(value) for value in token_boxes(grid)[index])
            return Place(image, *place, (x0, y0, x1, y1))
        index -= grid.tokens
    raise IndexError(f"the images have {sum(grid.tokens for grid in grids)} visual tokens")
