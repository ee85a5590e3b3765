"""Position ids computed by us, for all rows and images at once, on the CPU.

Stock Qwen code loops over samples with ``.item()`` (three quarters of a training step with many small images). The
rule is short: a text token advances the position by one; an image of ``rows x cols`` tokens starts at the current
position, spreads over it as (start, start + row, start + col), and advances it by ``max(rows, cols)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realvr.imaging.types import Grid


def plain_positions(real_BT: Tensor, start_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One-dimensional positions (B, T) that count real tokens, and the next position (B,)."""
    count_BT = real_BT.long().cumsum(-1)
    start_B1 = torch.zeros_like(count_BT[:, :1]) if start_B is None else start_B[:, None]
    return (count_BT - 1).clamp(min=0) + start_B1, count_BT[:, -1] + start_B1[:, 0]


def mrope_positions(
    real_BT: Tensor, image_BT: Tensor, grids: Sequence[Grid], start_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Multimodal rotary positions (3, B, T) and the next position (B,).

    ``image_BT`` marks visual tokens; ``grids`` lists the images of all rows in row-major order.
    """
    advance_BT = real_BT.long() * ~image_BT
    offset_3N = torch.zeros(3, 0, dtype=torch.long)
    if grids:
        counts = torch.tensor([grid.tokens for grid in grids])
        rows = torch.tensor([grid.rows for grid in grids])
        cols = torch.tensor([grid.cols for grid in grids])
        ends = counts.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        width = cols.repeat_interleave(counts)
        offset_3N = torch.stack([torch.zeros_like(within), within // width, within % width])
        step_N = torch.zeros_like(within)
        step_N[ends - 1] = torch.maximum(rows, cols)
        advance_BT[image_BT] = step_N
    start_B1 = torch.zeros_like(advance_BT[:, :1]) if start_B is None else start_B[:, None]
    after_BT = advance_BT.cumsum(-1) + start_B1
    positions = (after_BT - advance_BT).expand(3, -1, -1).clone()
    positions[:, image_BT] += offset_3N
    return positions, after_BT[:, -1]
