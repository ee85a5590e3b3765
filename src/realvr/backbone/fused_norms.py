"""RMSNorms of a decoder as one kernel each, forward and backward (`torch.nn.functional.rms_norm`).

A norm of transformers is 8 operations or more, two to six norms a layer; a decoding or latent step waits for their
launches. Only the ``forward`` of each module is set, on the instance: parameters, their names, classes and hooks stay,
and `restore` takes it away. Weights are looked up at each call, so that an engine may gather or exchange them.

In 16 bits the result is rounded once, where most stock norms round twice. In float64 everything stays float64, where
stock norms compute in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realvr.backbone import decode_kernels, kernel_checks
from realvr.families import Stock

Norm = Callable[[Stock, float, Tensor], Tensor]


def fuse(module: nn.Module) -> int:
    """Give every RMSNorm inside the fused forward; how many there are. A norm that computes something else keeps its
    own, with a notice for its class."""
    kinds: dict[type, Norm | None] = {}
    count = 0
    for norm in module.modules():
        if not _candidate(norm):
            continue
        kind = type(norm)
        if kind not in kinds:
            kinds[kind] = _same(norm)
            if kinds[kind] is None:
                warnings.warn(f"fused norms: {kind.__name__} computes something else and stays as it is", stacklevel=2)
        fused, epsilon = kinds[kind], _epsilon(norm)
        if fused is not None and epsilon is not None:
            vars(norm)["forward"] = partial(fused, norm, epsilon)  # a partial is copied and pickled with its module
            count += 1
    return count


def restore(module: nn.Module) -> None:
    """Undo `fuse`."""
    for norm in module.modules():
        if is_fused(norm):
            del vars(norm)["forward"]


def is_fused(norm: nn.Module) -> bool:
    """Whether the module runs as one kernel through `fuse`."""
    forward = vars(norm).get("forward")
    return isinstance(forward, partial) and forward.func in (_scaled, _offset)


def _scaled(norm: Stock, epsilon: float, x: Tensor) -> Tensor:
    """``weight * x / rms(x)``."""
    weight = norm.weight
    if _unusual(x, weight):
        return type(norm).forward(norm, x)
    if (found := _short(x, weight, epsilon, offset=False)) is not None:
        return found
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _offset(norm: Stock, epsilon: float, x: Tensor) -> Tensor:
    """``(1 + weight) * x / rms(x)``, Gemma's. 1 + weight needs more digits than 16 bits have, hence float32 inside."""
    weight = norm.weight
    if _unusual(x, weight):
        return type(norm).forward(norm, x)
    if (found := _short(x, weight, epsilon, offset=True)) is not None:
        return found
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(wide, memory_format=torch.contiguous_format), weight.shape, None, epsilon)
    if torch.is_grad_enabled():
        return torch.addcmul(y, y, weight).to(x.dtype)
    return torch.addcmul(y, y, weight, out=torch.empty_like(y, dtype=x.dtype))  # the same, rounded as it is written


def _short(x: Tensor, weight: Tensor, epsilon: float, offset: bool) -> Tensor | None:
    """In a recorded step: the same by a kernel that is quick for few rows."""
    kernel = "norm with offset" if offset else "norm"
    if not decode_kernels.takes(kernel, x) or weight.dim() != 1:
        return None
    return decode_kernels.tried(
        kernel,
        (x,),
        lambda: decode_kernels.rms_norm(x, weight, epsilon, offset),
        lambda: kernel_checks.norm_gap(decode_kernels.rms_norm, x, weight, offset),
    )


def _unusual(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused operation would not give the type that the stock norm gives."""
    return x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type)


def _epsilon(norm: nn.Module) -> float | None:
    """By the name that its class has for it."""
    found = [getattr(norm, name, None) for name in ("variance_epsilon", "eps")]
    return next((each for each in found if isinstance(each, float)), None)


def _candidate(module: nn.Module) -> bool:
    """An RMSNorm by name, with the forward pass of its class."""
    return (
        type(module).__name__.endswith("RMSNorm")
        and not isinstance(module, nn.RMSNorm)  # torch's own calls the fused operation
        and "forward" not in vars(module)
    )


def _same(norm: nn.Module) -> Norm | None:
    """The fused forward that gives what the class of a norm gives, tried on a copy with other weights."""
    epsilon = _epsilon(norm)
    if epsilon is None or list(norm._parameters) != ["weight"] or norm._buffers or norm._modules:
        return None
    numbers = torch.Generator().manual_seed(0)
    twin: Any = copy.copy(norm)
    weight = torch.rand(16, generator=numbers, dtype=torch.float32) + 0.5
    vars(twin)["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    # rows from well above epsilon to well below it
    x = torch.randn(4, 16, generator=numbers, dtype=torch.float32) * torch.tensor([[10.0], [1.0], [1e-3], [1e-5]])
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        stock = type(norm).forward(twin, x)
        for fused in (_scaled, _offset):
            ours = fused(twin, epsilon, x)
            if ours.shape == stock.shape and torch.allclose(ours, stock, rtol=1e-5, atol=0):
                return fused
    return None
