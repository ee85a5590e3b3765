"""A stand-in for a CUDA graph that works on every device: the operations of a step, repeated on the same tensors.

What a graph cannot do is refused as it is met: to wait for a number (`item`), to make a tensor from host data, or an
output whose size depends on values. A value that Python took from somewhere else is frozen, as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
REFUSED = {aten._local_scalar_dense, aten.lift_fresh, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim}


class Tape(TorchDispatchMode):
    """Records what is run inside it; ``replay`` repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if func.overloadpacket in REFUSED or by_mask:
            raise RuntimeError(f"{func} cannot be recorded")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            # As in a graph, no version is counted up: what autograd has saved is valid afterwards.
            touched = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and func._schema.is_mutable)
            with torch.autograd._unsafe_preserve_version_counter(touched):
                again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.data.copy_(new)


def record(step: Callable[[], None], reset: Callable[[], None]) -> Callable[[], None]:
    """See `realvr.latent.graphs.Record`."""
    step()
    reset()
    tape = Tape()
    with tape:
        step()
    return tape.replay
