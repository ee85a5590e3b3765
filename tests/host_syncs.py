"""Operations for which the host waits when their tensors are on a GPU, counted on the CPU.

Where a result's size or a Python number depends on values of a tensor, the host has to read them. The operations are
the same on every device, so a run on the CPU shows how often that happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "_unique2", "unique_consecutive")


class HostSyncs(TorchDispatchMode):
    """``with HostSyncs() as syncs: …``; ``syncs.found`` counts them by name, ``syncs.operations`` everything."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        name = func.__name__.split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if name in _ALWAYS or by_mask:
            self.found[name + (" by mask" if by_mask else "")] += 1
        return func(*args, **(kwargs or {}))
