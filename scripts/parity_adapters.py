"""Adapted layers in every way against peft's, for `device_parity.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from parity_span import flat, gradients_of, with_adapters
from torch import Tensor, nn

from realvr.backbone import Backbone, small_kernels
from realvr.latent import prefill, think
from realvr.training import low_rank

if TYPE_CHECKING:
    from parity_paths import Found, Paths

# name -> (measure, float32 tolerance, bfloat16 floor)
CHECKS: dict[str, tuple[str, float, float | None]] = {
    "thin adapters: states": ("relative", 1e-6, 0.01),
    "thin adapters: gradients": ("relative", 1e-5, 0.02),
    "adapters as one node: states": ("relative", 1e-6, 0.01),
    "adapters as one node: gradients": ("relative", 1e-5, 0.02),
    "adapters by kernels: left out": ("absolute", 0.0, 0.0),
    "adapters by kernels: states": ("relative", 1e-5, 0.02),
    "adapters by kernels: gradients": ("relative", 1e-4, 0.1),
    "adapters by kernels: gradients of one layer": ("relative", 1e-5, 1e-5),
}


def adapters(paths: Paths) -> Found:
    """Our ways through an adapted layer against peft's, on the same device; kernels of our own against float32 too.
    They are for 16 bits on a GPU. In float32 there is no copy to spare either."""
    from peft.tuners.lora import Linear

    ours = with_adapters(paths, paths.dtype, paths.device)
    runs = {"thin adapters": _adapted(paths, ours)}
    if not paths.exact:
        with _small_is_large():
            runs["adapters as one node"] = _adapted(paths, ours)
    for module in ours.model.modules():
        if isinstance(module, Linear):
            module.__class__ = Linear
    theirs = _adapted(paths, ours)
    parts = ("states", "gradients")
    found: Found = {
        f"{name}: {part}": (a, b, None)
        for name, run in runs.items()
        for part, a, b in zip(parts, run, theirs, strict=True)
    }
    if not paths.exact and paths.device != "cpu":
        fast = with_adapters(paths, paths.dtype, paths.device, kernels=True)
        layers = [module for module in fast.model.modules() if isinstance(module, Linear)]
        left_out = torch.tensor([float(getattr(layer, "kernels", None) is None) for layer in layers])
        found["adapters by kernels: left out"] = (left_out, torch.zeros_like(left_out), None)
        right = _adapted(paths, with_adapters(paths, torch.float32, str(paths.truth.device)))
        with paths.adapting("adapters by kernels", {"narrow", "widen", "summed"}):
            mine = _adapted(paths, fast)
        several = zip(parts, mine, right, theirs, strict=True)
        found |= {f"adapters by kernels: {part}": three for part, *three in several}
        found["adapters by kernels: gradients of one layer"] = _one_layer(paths)
    return found


def _one_layer(paths: Paths) -> tuple[Tensor, Tensor, None]:
    """Gradients of an adapter behind many rows, against float64: what the base model rounds is not in them."""
    rows, inputs, outputs, rank, scaling = 16384, 384, 256, 16, 2.0
    generator = torch.Generator().manual_seed(13)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(paths.device)

    base = nn.Linear(inputs, outputs, bias=False).to(paths.device, torch.bfloat16).requires_grad_(False)
    x, grad = (noise(rows, size).bfloat16() for size in (inputs, outputs))
    down, up = noise(rank, inputs).requires_grad_(), noise(outputs, rank).requires_grad_()
    low_rank.adapted(x, base, down, up, scaling).backward(grad)
    assert down.grad is not None and up.grad is not None
    wide, back = x.double(), grad.double() * scaling
    right = [(back @ up.detach().double()).t() @ wide, back.t() @ (wide @ down.detach().double().t())]
    return flat([down.grad, up.grad]), flat(right), None


def _adapted(paths: Paths, backbone: Backbone) -> tuple[Tensor, Tensor]:
    batch = backbone.batch(paths.ask(backbone)[:2])
    with torch.no_grad():
        state, still = prefill(backbone, batch)
        _, z_BKD = think(backbone, state, 2)
    _, hidden = prefill(backbone, batch)
    # Not the square of normalised states, which is a constant: its gradient would be rounding.
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(12)).to(hidden.device)
    return flat([still, z_BKD]), gradients_of(backbone, (hidden.float() * weight).mean(), in_place=False)


@contextmanager
def _small_is_large() -> Iterator[None]:
    """Adapters of tiny models take the way of large passes."""
    before, small_kernels.FEW = small_kernels.FEW, 1
    try:
        yield
    finally:
        small_kernels.FEW = before
