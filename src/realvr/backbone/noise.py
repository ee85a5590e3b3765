"""Random numbers for comparing kernels with their definitions, whatever the caller draws."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class Noise:
    """The same numbers every time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def like(self, x: Tensor) -> Tensor:
        """Normal numbers in the layout of ``x``."""
        drawn = self.normal(*x.shape, dtype=x.dtype)
        if drawn.stride() == x.stride():
            return drawn
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device).copy_(drawn)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)


def worst(gaps: Iterable[float]) -> float:
    """The largest. NaN if one of them is: Python's ``max`` may pass over it."""
    return max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)
