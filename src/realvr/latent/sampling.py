"""Choosing the next token, reproducibly.

Random numbers are drawn per prompt and completion on the CPU before decoding starts, and used by inverse transform.
What a completion becomes therefore depends on its own seed only: not on the batch it shares, on which rows finished
earlier, or on the device's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realvr.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How text is decoded. Defaults are the paper's rollout: temperature 0.6, no top-p, no top-k, at most 192 new
    tokens."""

    temperature: float = 0.6
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    max_new: int = 192
    stop: str | None = "</answer>"
    """Text that ends a completion once it has been written; None switches it off."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}: it cannot be negative")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be in (0, 1]")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it cannot be negative (0 switches it off)")
        if self.max_new < 1:
            raise UserError(f"max_new is {self.max_new}: at least one token must be decoded")

    @property
    def policy_temperature(self) -> float:
        """Temperature of the recorded log-probabilities; greedy decoding records them at 1."""
        return self.temperature or 1.0


GREEDY = Sampling(temperature=0.0)


def draws(seeds: Sequence[int], group: int, steps: int) -> Tensor:
    """Uniform numbers (B, G, steps) in [0, 1): row b from ``seeds[b]`` alone."""
    rows = [
        torch.rand(group, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(rows) if rows else torch.empty(0, group, steps, dtype=torch.float64)


def prompt_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """One seed per prompt. From a single seed, prompt i gets a fixed function of (seed, i)."""
    if not isinstance(seed, int):
        if len(seed) != count:
            raise ValueError(f"{len(seed)} seeds for {count} prompts")
        return list(seed)
    return [(seed * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9 + 1) % 2**63 for i in range(count)]


def choose(logp_NV: Tensor, uniform_N: Tensor, sampling: Sampling) -> Tensor:
    """Token ids (N,) from log-probabilities (N, V)."""
    if sampling.temperature == 0:
        return logp_NV.argmax(-1)
    cumulative = _filter(logp_NV, sampling).exp().double().cumsum(-1)
    target = uniform_N.to(cumulative.device)[:, None] * cumulative[:, -1:]
    # right=True: the first id whose cumulative mass exceeds the target, hence never one of zero probability.
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return chosen.clamp(max=logp_NV.shape[1] - 1)


def _filter(logp_NV: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k and sampling.top_k < logp_NV.shape[1]:
        threshold = logp_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logp_NV = logp_NV.masked_fill(logp_NV < threshold, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = logp_NV.softmax(-1).sort(dim=-1, descending=True)
        # Keep the smallest set that reaches top_p: drop an id when the mass before it is already enough.
        drop = ordered.cumsum(-1) - ordered >= sampling.top_p
        logp_NV = logp_NV.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), float("-inf"))
    return logp_NV
