"""A recording on trial: before it is used, a replay has to make what the step itself makes, run kernel by kernel.

Both are the same kernels over the same tensors and agree at least to rounding. A recording that has missed a kernel, or
that reads memory which belongs to something else by now, is far off. Of each tensor a part is compared, so that nothing
large has to wait for the replay. A replay starts from the state that was recorded, so a number that Python took from
there and froze is not noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realvr.backbone.noise import worst

PART = 512
"""About how many numbers of a tensor are compared."""
FLIPS = 16
"""Of so many tokens, rounding may decide one."""
SPOILED = -12345.0
"""What results are overwritten with before a replay. A model that has diverged makes NaN by itself."""


@dataclass(frozen=True)
class Made:
    """What a step has made."""

    numbers: Sequence[Sequence[Tensor]]
    """Kind by kind. A tensor that is small for its kind is compared on the scale of its kind: the gradient of a
    parameter that changes nothing is all rounding."""
    exact: Sequence[Tensor] = ()
    """Counters, positions, masks."""
    chosen: tuple[Tensor, Tensor] | None = None
    """Tokens and their log-probabilities."""

    @torch.no_grad()
    def kept(self) -> Made:
        """Parts of it, in tensors of their own."""
        chosen = None if self.chosen is None else (self.chosen[0].clone(), self.chosen[1].clone())
        return Made([list(map(_part, kind)) for kind in self.numbers], [x.clone() for x in self.exact], chosen)


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


def _part(x: Tensor) -> Tensor:
    """Evenly spaced numbers."""
    flat = x.detach().reshape(-1)
    return flat[:: max(len(flat) // PART, 1) | 1].clone()  # odd: no multiple of a width


@torch.no_grad()
def gap(found: Made, right: Made) -> float:
    """Largest distance of a tensor, relative to its length. Infinite where counters, masks or the number of tensors
    differ, where one side alone is not finite, and where too many tokens differ."""
    if [[x.shape for x in kind] for kind in found.numbers] != [[x.shape for x in kind] for kind in right.numbers]:
        return math.inf
    if len(found.exact) != len(right.exact) or not all(map(torch.equal, found.exact, right.exact)):
        return math.inf
    kinds = [list(zip(*both, strict=True)) for both in zip(found.numbers, right.numbers, strict=True)]
    gaps = [float(_largest(pairs)) for pairs in kinds if pairs]
    if found.chosen is not None and right.chosen is not None:
        same = found.chosen[0] == right.chosen[0]
        if int((~same).sum()) > same.numel() // FLIPS:
            return math.inf
        mine, theirs = found.chosen[1][same], right.chosen[1][same]
        # Near-certain tokens have log-probabilities near 0: these are measured beside 1.
        gaps.append(float(_largest([(mine, theirs)], theirs.numel() ** 0.5)))
    return worst(gaps or [0.0])


def _largest(pairs: Sequence[tuple[Tensor, Tensor]], least: float | None = None) -> Tensor:
    off, length = [], []
    for mine, theirs in ((a.double(), b.double()) for a, b in pairs):
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        off.append((mine - theirs).masked_fill(same, 0).nan_to_num(nan=torch.inf).norm())
        length.append(theirs.nan_to_num(nan=0, posinf=0, neginf=0).norm())
    gaps, lengths = torch.stack(off), torch.stack(length)
    floor = lengths.square().mean().sqrt() / 10 if least is None else least
    return torch.where(gaps == 0, 0, gaps / lengths.clamp(min=floor)).max()
