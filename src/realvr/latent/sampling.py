"""Choosing the next token, reproducibly.

Random numbers are drawn per prompt and completion on the CPU before decoding starts, and used by inverse transform.
What a completion becomes therefore depends on its own seed only: not on the batch it shares, on which rows finished
earlier, or on the device's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realvr.errors import UserError

ANSWER_END = "</answer>"

_BLOCK = 512
"""Ids whose mass is summed together before the blocks are."""


@dataclass(frozen=True)
class Sampling:
    """How text is decoded. Defaults are the paper's rollout: temperature 0.6, no top-p, no top-k, at most 192 new
    tokens. Departure from the paper: a completion ends once its answer block is closed (``stop``)."""

    temperature: float = 0.6
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    max_new: int = 192
    stop: str | None = ANSWER_END
    """Text that ends a completion once it has been written; None switches it off."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-4 <= self.temperature < float("inf")):  # below, logits / T overflows
            raise UserError(f"temperature is {self.temperature}: it must be 0 (greedy) or at least 0.0001")
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
    """Uniform numbers (B, G, steps) in [0, 1): completion g of row b from (``seeds[b]``, g) alone.

    Neither G nor the token limit changes them, so that a shorter limit gives the beginning of the same completion."""
    generators = [
        torch.Generator().manual_seed((seed + g * 0x94D049BB133111EB) % 2**63) for seed in seeds for g in range(group)
    ]
    rows = [torch.rand(steps, dtype=torch.float64, generator=generator) for generator in generators]
    return torch.stack(rows).view(len(seeds), group, steps) if rows else torch.empty(len(seeds), group, steps)


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
    kept = _filter(logp_NV, sampling)
    chosen = _inverse(kept.exp(), uniform_N.to(kept.device))
    # A parallel sum may be off by the last bit; an id of zero probability is then replaced, so that "never" is literal.
    impossible = kept.gather(-1, chosen[:, None])[:, 0] == float("-inf")
    return torch.where(impossible, kept.argmax(-1), chosen)


def _inverse(mass_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds ``uniform`` times the whole, hence not one without mass.

    In float64 and in two levels, first the block, then the place in it: one sum over a whole vocabulary is slow where
    rows are few.
    """
    rows, size = mass_NV.shape
    blocks = -(-size // _BLOCK)
    padded = F.pad(mass_NV, (0, blocks * _BLOCK - size)).view(rows, blocks, _BLOCK)
    within = padded.cumsum(-1, dtype=torch.float64)
    ends = within[..., -1].cumsum(-1)
    target = uniform_N[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = within.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0] + before
    place = torch.searchsorted(inside, target, right=True).clamp(max=_BLOCK - 1)
    return (block * _BLOCK + place).clamp(max=size - 1)[:, 0]


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
