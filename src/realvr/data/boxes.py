"""Evidence boxes -> visual tokens, for every family's grid. numpy only.

The rule, per axis of the patch grid with `w` patches and `m` patches per visual token: clip the box to [0, 1]; patches
``clip(floor(x0*w), 0, w-1)`` to ``clip(ceil(x1*w), 0, w)``; tokens ``[p0//m, (p1+m-1)//m)``. Tiles of InternVL share
one patch grid over the whole image, because their canvas is the stretched image; only the numbering goes tile by tile.
The thumbnail shows everything once more and is never evidence for a box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realvr.data.sample import Box, Sample
from realvr.errors import UserError
from realvr.imaging.types import Grid

XYXY = tuple[float, float, float, float]
Mask = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)
_INSET = 1e-6
"""Of a cell's side: rounding must not move its edge into the next token."""


def before_each_reply(sample: Sample) -> list[Sample]:
    """The sample as it stands before each of its replies, with the boxes of that reply: earlier assistant turns first,
    then the sample itself."""
    replies = [place for place, turn in enumerate(sample.turns) if turn.role == "assistant"]
    boxes = sample.earlier_boxes or [[] for _ in replies]
    earlier = [
        replace(sample, turns=sample.turns[:place], boxes=own, earlier_boxes=[])
        for place, own in zip(replies, boxes, strict=True)
    ]
    return [*earlier, sample]


def unshown_box(sample: Sample) -> str | None:
    """A sentence about the first box on an image that no turn shows, for which no visual token stands; else None."""
    *earlier, last = before_each_reply(sample) if sample.earlier_boxes else [sample]
    for reply, part in enumerate([*earlier, last], 1):
        shown = set(part.shown)
        for number, box in enumerate(part.boxes, 1):
            if box.image not in shown:
                name = f" ({sample.images[box.image].id})" if 0 <= box.image < len(sample.images) else ""
                which, turn = f"box {number}", "no turn"
                if part is not last:
                    which, turn = f"{which} of earlier reply {reply}", "no turn before that reply"
                return f"{which} is on image {box.image}{name}, which {turn} shows: show it, or remove the box"
    return None


def prompt_boxes(sample: Sample) -> list[Box]:
    """The sample's boxes, their ``image`` counted as the prompt shows the images: the order of the visual tokens.

    An image that is shown twice counts where it is shown last: there the model has read what comes before. A box on an
    image that is never shown is an error; readers and training drop and count such rows.
    """
    if (problem := unshown_box(sample)) is not None:
        raise UserError(f"{sample.source or sample.id}: {problem}")
    place = {index: position for position, index in enumerate(sample.shown)}  # the last position of each
    return [replace(box, image=place[box.image]) for box in sample.boxes]


def clip_box(xyxy: Sequence[float]) -> XYXY | None:
    """Corners in order and inside [0, 1]; None where no area is left."""
    x0, y0, x1, y1 = (min(1.0, max(0.0, float(value))) for value in xyxy)
    x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def with_area(boxes: Sequence[Box]) -> list[Box]:
    """The boxes that cover anything: the others are no evidence."""
    return [box for box in boxes if clip_box(box.xyxy) is not None]


def _token_range(low: float, high: float, patches: int, merge: int) -> tuple[int, int]:
    """Half-open range of tokens that ``[low, high]`` covers along one axis; never empty."""
    first = min(max(math.floor(low * patches), 0), patches - 1)
    last = min(max(math.ceil(high * patches), 0), patches)
    last = max(last, first + 1)  # an interval narrower than rounding error still lies in one patch
    return first // merge, (last + merge - 1) // merge


def canvas_size(grid: Grid) -> tuple[int, int]:
    """(rows, columns) of visual tokens over the whole image, tiles side by side, thumbnail left out."""
    return grid.rows * grid.tile_rows, grid.cols * grid.tile_cols


def _to_sequence(canvas: NDArray[np.float64], grid: Grid) -> Mask:
    """Values on the canvas (rows, columns) -> values in token order (N,), with zeros for the thumbnail."""
    tiles = canvas.reshape(grid.tile_rows, grid.rows, grid.tile_cols, grid.cols).transpose(0, 2, 1, 3)
    mask = np.zeros(grid.tokens, dtype=np.float32)
    flat = tiles.reshape(-1)
    mask[: flat.size] = flat
    return mask


def on_canvas(values: NDArray[Number], grid: Grid) -> NDArray[Number]:
    """Values in token order (…, N) as they lie in the image (…, rows, columns), those of the thumbnail left out."""
    rows, cols = canvas_size(grid)
    shape = (*values.shape[:-1], grid.tile_rows, grid.tile_cols, grid.rows, grid.cols)
    return values[..., : rows * cols].reshape(shape).swapaxes(-3, -2).reshape(*values.shape[:-1], rows, cols)


def token_place(index: int, grid: Grid) -> tuple[int, int] | None:
    """(row, column) of a visual token in the whole image; None for one of the thumbnail."""
    tile, inside = divmod(index, grid.rows * grid.cols)
    tile_row, tile_col = divmod(tile, grid.tile_cols)
    row, col = divmod(inside, grid.cols)
    return (tile_row * grid.rows + row, tile_col * grid.cols + col) if tile_row < grid.tile_rows else None


def _coverage(boxes: Sequence[XYXY], rows: int, cols: int) -> NDArray[np.float64]:
    """Share of each token's area inside the union of the boxes, exactly: cut the plane at every edge and add up."""
    x_cuts = np.unique(np.concatenate([np.arange(cols + 1) / cols, [v for b in boxes for v in (b[0], b[2])]]))
    y_cuts = np.unique(np.concatenate([np.arange(rows + 1) / rows, [v for b in boxes for v in (b[1], b[3])]]))
    inside = np.zeros((len(y_cuts) - 1, len(x_cuts) - 1), dtype=bool)
    for x0, y0, x1, y1 in boxes:
        left, right = np.searchsorted(x_cuts, [x0, x1])
        top, bottom = np.searchsorted(y_cuts, [y0, y1])
        inside[top:bottom, left:right] = True
    area = np.outer(np.diff(y_cuts), np.diff(x_cuts)) * inside
    row_starts = np.searchsorted(y_cuts, np.arange(rows) / rows)
    col_starts = np.searchsorted(x_cuts, np.arange(cols) / cols)
    summed = np.add.reduceat(np.add.reduceat(area, row_starts, axis=0), col_starts, axis=1)
    return np.clip(summed * rows * cols, 0.0, 1.0)


def token_mask(boxes: Sequence[Sequence[float]], grid: Grid, fractional: bool = False) -> Mask:
    """(N,) mask in token order of the union of ``boxes`` (x0, y0, x1, y1 in fractions) in one image.

    Binary by default; ``fractional`` gives the share of each token that is covered. Boxes without area are ignored, any
    other box covers at least one token; without any such box the mask is all zeros.
    """
    rows, cols = canvas_size(grid)
    clipped = [box for box in map(clip_box, boxes) if box is not None]
    binary = np.zeros((rows, cols))
    for x0, y0, x1, y1 in clipped:
        left, right = _token_range(x0, x1, cols * grid.merge, grid.merge)
        top, bottom = _token_range(y0, y1, rows * grid.merge, grid.merge)
        binary[top:bottom, left:right] = 1.0
    if not fractional or not clipped:
        return _to_sequence(binary, grid)
    # A box too small for float32 areas must still leave a positive weight on its token.
    least = float(np.finfo(np.float32).tiny)
    return _to_sequence(np.maximum(_coverage(clipped, rows, cols), binary * least), grid)


def target_tokens(boxes: Sequence[Sequence[float]], grid: Grid) -> NDArray[np.int64]:
    """Stage-1 targets: the visual tokens of the union of ``boxes``, each once, in the order the model reads them.

    That is row-major over the image, and row-major within each tile, tile by tile, for a tiled image.
    """
    return np.flatnonzero(token_mask(boxes, grid)).astype(np.int64)


def center_token(xyxy: Sequence[float], grid: Grid) -> int | None:
    """The visual token in whose area the centre of a box lies, in token order; None for a box without area."""
    box = clip_box(xyxy)
    if box is None:
        return None
    rows, cols = canvas_size(grid)
    x0, y0, x1, y1 = box
    row, col = min(int((y0 + y1) / 2 * rows), rows - 1), min(int((x0 + x1) / 2 * cols), cols - 1)
    (tile_row, row), (tile_col, col) = divmod(row, grid.rows), divmod(col, grid.cols)
    return ((tile_row * grid.tile_cols + tile_col) * grid.rows + row) * grid.cols + col


def evidence_masks(boxes: Sequence[Box], grids: Sequence[Grid], fractional: bool = False) -> list[Mask]:
    """One mask per image of a prompt, for `prompt_boxes`.

    Without any box of positive area every token of every image counts, thumbnails included.
    """
    masks = [
        token_mask([box.xyxy for box in boxes if box.image == index], grid, fractional)
        for index, grid in enumerate(grids)
    ]
    if any(mask.any() for mask in masks):
        return masks
    return [np.ones(grid.tokens, dtype=np.float32) for grid in grids]


def token_boxes(grid: Grid) -> NDArray[np.float64]:
    """(N, 4) area of every visual token in fractions of the image, in token order; the thumbnail's tokens too."""
    rows, cols = canvas_size(grid)

    def cells(height: int, width: int) -> NDArray[np.float64]:
        y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        return np.stack([x / width, y / height, (x + 1) / width, (y + 1) / height], axis=-1)

    canvas = cells(rows, cols).reshape(grid.tile_rows, grid.rows, grid.tile_cols, grid.cols, 4)
    tiles = canvas.transpose(0, 2, 1, 3, 4).reshape(-1, 4)
    return np.concatenate([tiles, cells(grid.rows, grid.cols).reshape(-1, 4)]) if grid.thumbnail else tiles


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


def preview_grid(family: str, size: tuple[int, int], max_tokens: int = 1280) -> Grid:
    """A typical grid of a family for an image of ``size`` (width, height), for looking at data without a model.

    The grid that counts is the one the image processor returns; this one follows the published defaults.
    """
    width, height = size
    if family == "gemma3":
        return Grid(16, 16, merge=4)
    if family == "internvl3":
        layouts = [(r, c) for r in range(1, 13) for c in range(1, 13) if r * c <= 12]
        # Nearest aspect ratio; among equals the largest number of tiles that the image can fill.
        filled = [(r, c) for r, c in layouts if width * height > 0.5 * r * c * 448**2] or [(1, 1)]
        ratio = width / height
        rows, cols = min(layouts, key=lambda rc: (abs(ratio - rc[1] / rc[0]), -(rc in filled), -rc[0] * rc[1]))
        return Grid(16, 16, rows, cols, thumbnail=rows * cols > 1, merge=2)
    side = 32 if family.startswith("qwen3") else 28
    scale = min(1.0, math.sqrt(max_tokens * side * side / (width * height)))
    rows, cols = (max(1, round(length * scale / side)) for length in (height, width))
    return Grid(rows, cols, merge=2)
