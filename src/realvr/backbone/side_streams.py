"""Independent products run concurrently: while a step is recorded, each has its own stream.

Keys and values have few heads, so their projections fill only a part of the GPU, yet take about as long as that of the
queries. In a CUDA graph they become branches that run at the same time. Of two large products, one starts while the
other finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from realvr.backbone import small_kernels

Call = Callable[[Tensor], Tensor]


def beside(x: Tensor, *calls: Call) -> list[Tensor]:
    """Each call of ``x``. Memory is safe: work on a side stream begins after all that was given to the
    caller's stream before, and the caller's stream waits for it here."""
    if not (x.is_cuda and small_kernels.in_recorded()) or torch.is_grad_enabled():
        return [call(x) for call in calls]
    here = torch.cuda.current_stream(x.device)
    sides: list[torch.cuda.Stream] = []
    found = []
    try:
        for number, call in enumerate(calls[1:]):
            side = _stream(x.device, number)
            side.wait_stream(here)
            sides.append(side)
            with torch.cuda.stream(side):
                found.append(call(x))
        found.insert(0, calls[0](x))
    finally:  # also after an error: ``x`` may be freed then, and a recording ends. No stream that has not joined it.
        for side in sides:
            here.wait_stream(side)
    return found


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
