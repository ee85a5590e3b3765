"""Number formats: what every function of this package does to its inputs first."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged if it is float64. Integers and booleans become float32."""
    return x if x.dtype == torch.float64 else x.float()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` with exact zeros, and exactly zero gradients, wherever ``mask`` is false.

    Not a product: padding may hold infinities or NaN, and 0 * inf is NaN in the value and in the gradient.
    """
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def safe_divide(total: Tensor, count: Tensor | float) -> Tensor:
    """``total / count`` in the format of ``total``; ``total`` itself where nothing was counted.

    Not ``clamp(min=1)``: a count may rightly be a fraction, such as that of the whole step divided by the number of
    ranks.
    """
    # `full`, not `tensor`: a constant that is written on a GPU does not wait for it, one that is copied there does.
    divisor = (
        count.to(total) if isinstance(count, Tensor) else torch.full((), count, dtype=total.dtype, device=total.device)
    )
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def __getattr__(name: str) -> object:
    from realvr.maths import deprecated

    return deprecated.find("precision", name)
