"""Latents that are changed on purpose: residual injection (tab:diag-credit-residual), and directions of a given size.

The paper names residual injection and prints its best values; it states no formula. Ours is ``z_t + alpha (z_t' -
z_t)`` at every slot, with ``z'`` the latents of the other view. ``random_direction`` is a control of ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realvr.maths.precision import at_least_float32, safe_divide


def residual(z: Tensor, other: Tensor, alpha: float) -> Tensor:
    """``z + alpha (other - z)``, in the number format of ``z``. Exactly ``z`` at 0 and ``other`` at 1."""
    # lerp counts from the nearer end; z + (other - z) would miss it by a rounding error.
    return torch.lerp(at_least_float32(z), at_least_float32(other), alpha).to(z.dtype)


def random_direction(like: Tensor, seed: int) -> Tensor:
    """Vectors (…, D) with the norms of ``like`` in directions drawn evenly, a function of the shape and ``seed``."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(like.device)
    wide = at_least_float32(like)
    norm = wide.norm(dim=-1, keepdim=True)
    return (safe_divide(norm, drawn.norm(dim=-1, keepdim=True)) * drawn.to(wide)).to(like.dtype)
