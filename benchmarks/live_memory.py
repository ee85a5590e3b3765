"""Bytes of tensors that are alive while code runs on the CPU, found by watching every operation: what a GPU's allocator
would report, except for what kernels need internally. Operations are counted too: on a GPU each is one or a few
launches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """``now`` and ``peak`` bytes of storages that came into being inside, those of ``given`` modules not counted, and
    ``operations`` that are no mere views. An older tensor counts in full once a view of it is made."""

    def __init__(self, *given: nn.Module) -> None:
        super().__init__()
        tensors = [tensor for module in given for tensor in (*module.parameters(), *module.buffers())]
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.now = self.peak = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not function.is_view
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or not size:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
