"""Regions of a picture as vectors: the visual tokens that a box covers, by the rule of evidence boxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realvr.data.boxes import XYXY, canvas_size, clip_box, token_mask
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.maths.precision import at_least_float32

_INSET = 1e-6
"""Of a cell's side: rounding must not move its edge into the next token."""


def cell_box(grid: Grid, row: int, column: int) -> XYXY:
    """The area of one visual token of the picture, ``row`` and ``column`` counted from 0. Tiles lie side by side; the
    thumbnail has no cells."""
    rows, columns = canvas_size(grid)
    if not (0 <= row < rows and 0 <= column < columns):
        raise UserError(
            f"row {row + 1}, column {column + 1} lies outside the picture: it has {rows} x {columns} visual tokens "
            "(rows x columns, counted from 1)"
        )
    return (
        (column + _INSET) / columns,
        (row + _INSET) / rows,
        (column + 1 - _INSET) / columns,
        (row + 1 - _INSET) / rows,
    )


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
