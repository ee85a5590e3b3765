"""Several devices on a machine without any: tensors that say where they are, and calculate in main memory.

``cpu:1``, ``cpu:2``, … are names that torch accepts and ignores. Inside `pretend`, a tensor on one of them is an
`OnDevice`; an operation on tensors of different devices raises, as CUDA does, and ``.to`` is the only way across.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

Device = torch.device


class OnDevice(Tensor):
    """A tensor on a pretended device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: Device) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({self.held}, {self.device})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def __deepcopy__(self, memo: Any) -> Any:
        return torch.Tensor.__deepcopy__(self, memo)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def home(device: Device | None) -> Device | None:
    """The device of a tensor, None for main memory."""
    return device if device is not None and device.index not in (None, 0) else None


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    # As on CUDA: numbers, and indices in main memory, may be used everywhere.
    index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
    whole = [each for each in (tensors[:1] if index else tensors) if each.ndim]
    devices = {home(each.device) for each in whole or tensors}
    copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
    if len(devices) > 1 and not copies:
        raise RuntimeError(f"{func}: tensors on {sorted(map(str, devices))}")
    if index and any(home(each.device) not in (None, *devices) for each in tensors):
        raise RuntimeError(f"{func}: indices on another device than {devices}")
    device = home(tensors[0].device) if copies else next(iter(devices), None)
    if "device" in kwargs:
        asked = kwargs["device"]
        device = home(asked) if asked is not None else device
        kwargs = kwargs | ({"device": Device("cpu")} if asked is not None else {})
    plain = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
    out = func(*plain[0], **plain[1])
    given = {id(each.held): each for each in tensors if isinstance(each, OnDevice)}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or device is None:
            return x
        return (
            given[id(x)] if id(x) in given else OnDevice(x, device)
        )  # in-place operations return what they were given

    return tree_map(wrap, out)


class _Factories(TorchDispatchMode):
    """``torch.arange(…, device="cpu:1")`` and the like."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def pretend() -> Iterator[None]:
    with _Factories():
        yield
