"""Frozen vision weights whose width is padded with zeros to a multiple of 8, for as long as the tower runs.

Qwen2.5-VL's vision MLP is 3,420 wide, which is not a multiple of 8: in 16 bits a GPU then falls back to slow products.
Zero rows in the layers that lead into the width, and zero columns in the one that leads out of it, change nothing but
the order of a sum.

Nothing that is saved or trained is touched. The padded layers are copies outside the model: `PaddedVision.running` puts
them in the place of the stock ones for one pass and takes them out again. They are made again when the weights have
changed, and not at all for weights that are trained, in shards, or behind hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realvr.backbone import fused_layers
from realvr.backbone.notices import notice_once

MULTIPLE = 8


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of an odd width are slow there: on a GPU in 16 bits."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Copy:
    """An MLP of the tower, where it stands, and its padded copy."""

    parent: nn.Module
    name: str
    stock: nn.Module
    padded: nn.Module


class PaddedVision:
    """Padded copies of the MLPs of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._copies: list[_Copy] = []
        self._facts: list[Any] | None = None
        self._places: list[tuple[nn.Module, str]] | None = None

    def __len__(self) -> int:
        return len(self._copies)

    def drop(self) -> None:
        """Free the copies. A fused forward knows its module: without it nothing waits for the garbage collector."""
        for each in self._copies:
            fused_layers.restore(each.padded)
        self._copies, self._facts = [], None

    @contextmanager
    def running(self) -> Iterator[None]:
        """With the padded MLPs in place. Without a graph only: the copies have no gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError("padded vision weights are for passes without a graph")
        self._refresh()
        copies = self._copies
        try:
            for each in copies:
                each.parent._modules[each.name] = each.padded
            yield
        finally:  # what stands in the model is always the stock module, also after two passes at once
            for each in copies:
                each.parent._modules[each.name] = each.stock

    def _refresh(self) -> None:
        """Make the copies again where the model has changed since."""
        if self._places is None:  # the tower has hundreds of modules: looked through once
            self._places = [
                (parent, name)
                for module in self._modules
                for parent in module.modules()
                for name, child in parent.named_children()
                if _widths(child) is not None
            ]
        here = [(parent, name, parent._modules[name]) for parent, name in self._places]
        found = [
            (parent, name, child)
            for parent, name, child in here
            if child is not None and all(map(_plain, (child, *child.children())))
            if _widths(child) is not None
        ]
        if len(found) < len(here):
            notice_once("fast vision: weights of the tower are trained, adapted, sharded or hooked; not padded")
        facts = [_state(linear) for *_, child in found for linear in child.children() if type(linear) is nn.Linear]
        if facts == self._facts:
            return
        self.drop()
        with torch.inference_mode(False), torch.no_grad():
            made = [_Copy(parent, name, child, _padded(child)) for parent, name, child in found]
            self._copies = made if all(_same(each.stock, each.padded) for each in made[:1]) else []
        self._facts = facts


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """(width inside, padded) of an MLP whose width inside is no multiple of 8; None for any other module."""
    children = list(module.children())
    linears = [child for child in children if type(child) is nn.Linear]
    if len(linears) < 2 or module._parameters:
        return None
    if any(True for child in children if type(child) is not nn.Linear for _ in child.parameters()):
        return None
    *into, out = linears
    inside = out.in_features
    if any(linear.out_features != inside or linear.in_features == inside for linear in into):
        return None
    return (inside, -(-inside // MULTIPLE) * MULTIPLE) if inside % MULTIPLE and out.out_features != inside else None


def _plain(module: nn.Module) -> bool:
    """Whether calling the module is calling its class: no hooks, no forward of its own; weights frozen, whole, here."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        return False
    for weight in module._parameters.values():
        if weight is not None and (
            type(weight) is not nn.Parameter
            or weight.requires_grad
            or weight.is_meta
            or weight.is_inference()
            or hasattr(weight, "ds_id")  # ZeRO-3: here only for as long as a layer runs
        ):
            return False
    if type(module) is nn.Linear:
        return module.weight.shape == (module.out_features, module.in_features)
    return True


def _state(linear: nn.Linear) -> tuple[Any, ...]:
    """What changes when the weights do: where they are, and how often they were written to."""
    tensors = [weight for weight in (linear.weight, linear.bias) if weight is not None]
    return id(linear), *((x.data_ptr(), x._version, x.dtype, x.device) for x in tensors)


def _padded(module: nn.Module) -> nn.Module:
    """The same module class over padded linear layers, its gate fused."""
    widths = _widths(module)
    assert widths is not None
    inside, wide = widths
    more = wide - inside
    found = copy.copy(module)
    layers: dict[str, nn.Module | None] = dict(module._modules)
    for name, layer in module.named_children():
        if type(layer) is nn.Linear:
            out = layer.in_features == inside
            layers[name] = _linear(layer, (0, more, 0, 0) if out else (0, 0, 0, more))
    vars(found)["_modules"] = layers
    fused_layers.fuse(found)
    return found


def _linear(layer: nn.Linear, pad: tuple[int, int, int, int]) -> nn.Linear:
    """The layer with zero columns and rows behind its own."""
    columns, rows = pad[1], pad[3]
    made = nn.Linear(layer.in_features + columns, layer.out_features + rows, layer.bias is not None, device="meta")

    def frozen(x: Tensor) -> nn.Parameter:
        return nn.Parameter(x.detach(), requires_grad=False)

    made.weight = frozen(F.pad(layer.weight, pad))
    if layer.bias is not None:
        made.bias = frozen(F.pad(layer.bias, (0, rows)))
    return made.train(layer.training)


def _same(stock: nn.Module, padded: nn.Module) -> bool:
    """Whether both give the same for one input: something between the layers could look at the whole width."""
    first = next(child for child in stock.children() if type(child) is nn.Linear)
    x = torch.linspace(-1, 1, first.in_features, device=first.weight.device).to(first.weight.dtype)[None]
    ours, theirs = padded(x).double(), stock(x).double()
    scale = float(theirs.abs().max())
    return bool(((ours - theirs).abs() <= 16 * torch.finfo(x.dtype).eps * max(scale, 1e-30)).all())
