"""A recording on trial: before it is used, a replay has to make what the step itself makes, run kernel by kernel.

Both are the same kernels over the same tensors and agree at least to rounding. A recording that has missed a kernel, or
that reads memory which belongs to something else by now, is far off. Of each tensor a part is compared, so that nothing
large has to wait for the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Made = Sequence[Sequence[Tensor]]
"""What a step has made, kind by kind. A tensor that is small for its kind is compared on the scale of its kind: the
gradient of a parameter that changes nothing is all rounding."""
PART = 512
"""Numbers of a tensor that are compared, or up to twice as many."""


@dataclass(frozen=True)
class Trial:
    """How a recording is tried."""

    made: Callable[[], Made]
    """What the newest run has made."""
    spoil: Callable[[], None]
    """Overwrites that, so that a replay has to make it again."""
    tolerance: float
    """Largest relative distance between both."""


def tolerance(dtype: torch.dtype, backward: bool = False) -> float:
    """For a model in ``dtype``. Usually both agree to the bit. Kernels may add up in another order each time, and the
    rounding of a backward pass grows with every latent that it goes through."""
    if dtype in (torch.bfloat16, torch.float16):
        return 0.25 if backward else 0.05
    return 1e-2 if backward else 1e-3


@torch.no_grad()
def parts(made: Made) -> Made:
    """Evenly spaced numbers of each tensor, in tensors of their own."""
    return [[_part(x.detach()) for x in kind] for kind in made]


def _part(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return flat[:: max(len(flat) // PART, 1) | 1].clone()  # odd: no multiple of a width


@torch.no_grad()
def gap(found: Made, right: Made) -> float:
    """Largest distance of the parts of a tensor, relative to their length; infinite where masks or numbers of tensors
    differ, where one side alone is not finite, or where more than half of some whole numbers differ: all of a counter,
    but not a token or two that rounding may decide."""
    if [[x.shape for x in kind] for kind in found] != [[x.shape for x in kind] for kind in right]:
        return float("inf")
    gaps = []
    for mine, theirs in zip(found, right, strict=True):
        pairs = list(zip(mine, theirs, strict=True))
        if any(_differ(a, b) for a, b in pairs if not b.is_floating_point()):
            return float("inf")
        floating = [(a.double(), b.double()) for a, b in pairs if b.is_floating_point() and b.numel()]
        if floating:
            gaps.append(_largest(floating))
    return float(torch.stack(gaps).max()) if gaps else 0.0


def _differ(mine: Tensor, theirs: Tensor) -> bool:
    off = int((mine != theirs).sum())
    return off > (0 if theirs.dtype == torch.bool else theirs.numel() // 2)


def _largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    off, length = [], []
    for mine, theirs in pairs:
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        off.append((mine - theirs).masked_fill(same, 0).nan_to_num(nan=torch.inf).norm())
        length.append(theirs.nan_to_num(nan=0, posinf=0, neginf=0).norm())
    gaps, lengths = torch.stack(off), torch.stack(length)
    least = lengths.square().mean().sqrt() / 10
    return torch.where(gaps == 0, 0, gaps / lengths.clamp(min=least)).max()
