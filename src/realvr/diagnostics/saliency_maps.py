"""Maps of saliency and attention as they are kept: levels from 0 to 255, and token pairs pooled to bins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.diagnostics.numbers import short

KINDS = ("attention", "saliency")
"""In the order of the paper's panels."""
GROUPS = ("image", "text", "latents", "reply")
"""What a key is: a visual token, any other token of the prompt, a latent, or a token behind the prompt that is none:
the markers of the span and the reply itself."""
MOST_SIDE = 32
"""Rows and columns of a map over a picture; a finer grid is averaged."""
MOST_BINS = {"image": 36, "text": 36, "latents": 36, "reply": 24}
"""Bins of each group in a map of token pairs."""
TOP = 255

Grid = Sequence[Sequence[float]]


def levels(grids: Sequence[Grid]) -> dict[str, Any]:
    """Grids as levels from 0 to `TOP`, two hexadecimal digits each, a text for every row.

    The level is that of the square root of a value over the largest of all grids, ``peak``: pairs of tokens differ by
    orders of magnitude. Zeros where all are zero.
    """
    peak = max((float(np.max(grid)) for grid in grids if len(grid)), default=0.0)
    shown = [np.sqrt(np.asarray(grid, dtype=np.float64) / (peak or 1.0)) for grid in grids]
    coded = [[row.tobytes().hex() for row in np.rint(TOP * grid).astype(np.uint8)] for grid in shown]
    return {"peak": short(peak), "levels": coded}


def values(found: dict[str, Any]) -> list[NDArray[np.float64]]:
    """The grids again, in units of ``peak``: numbers from 0 to 1."""
    return [
        np.square(np.array([list(bytes.fromhex(row)) for row in grid], dtype=np.float64) / TOP)
        for grid in found["levels"]
    ]


def bins(groups: Sequence[str]) -> list[tuple[int, int]]:
    """Half-open ranges of columns, in order, that a map of token pairs shows as one.

    A group with no more tokens than `MOST_BINS` keeps each; of a larger one, each run of neighbours is cut into pieces
    of equally many tokens. No bin crosses the border of a group.
    """
    sizes = {name: -(-list(groups).count(name) // most) for name, most in MOST_BINS.items()}
    found, start = [], 0
    for name, run in groupby(groups):
        stop = start + len(list(run))
        size = max(1, sizes[name])
        found += [(first, min(first + size, stop)) for first in range(start, stop, size)]
        start = stop
    return found


def pooled_pairs(matrix_TT: NDArray[np.float64], cut: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Rows are queries, columns keys: what the mean query of a bin puts on all keys of a bin. Rows of attention keep
    their sum."""
    starts = [start for start, _ in cut]
    counts = np.array([stop - start for start, stop in cut])
    keys = np.add.reduceat(matrix_TT, starts, axis=1)
    found: list[list[float]] = (np.add.reduceat(keys, starts, axis=0) / counts[:, None]).tolist()
    return found
