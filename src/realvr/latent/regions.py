"""Regions of a picture as vectors: the visual tokens that a box covers, by the rule of evidence boxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realvr.data.boxes import clip_box, token_mask
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.maths.precision import at_least_float32


def region_tokens(grid: Grid, box: Sequence[float]) -> Tensor:
    """Numbers (n,) of the visual tokens that a box (x0, y0, x1, y1 in fractions) covers, in the picture's token order.

    A box that lies outside the picture or has no area is refused.
    """
    if clip_box(box) is None:
        shown = ", ".join(f"{value:g}" for value in box)
        raise UserError(
            f"the box {shown} covers nothing of the picture: give x0, y0, x1, y1 as fractions from 0 to 1 of its width "
            "and height"
        )
    return torch.from_numpy(token_mask([box], grid)).nonzero()[:, 0]


def region_vector(features_ND: Tensor, grid: Grid, box: Sequence[float]) -> Tensor:
    """Mean (D,) of the visual tokens of one picture that a box covers; a single token is returned as it is."""
    if len(features_ND) != grid.tokens:
        raise ValueError(f"{len(features_ND)} visual tokens, but the grid has {grid.tokens}")
    covered_nD = features_ND[region_tokens(grid, box).to(features_ND.device)]
    return at_least_float32(covered_nD).mean(0).to(features_ND.dtype)
