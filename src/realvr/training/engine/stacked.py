"""The weights of experts as FSDP2 can cut them: in rows.

A layer keeps the weights of all its experts in one tensor (experts, rows, columns). FSDP2 cuts along the first
dimension; along another one only where the ranks divide it evenly. With more ranks than experts some would hold
nothing. Here such a tensor has two dimensions, the rows of all experts stacked, and any number of ranks can share them.
During a pass the layer sees the tensor in its original shape.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SHAPES = "_realvr_stacked"
"""Attribute of a module: names of its parameters that were stacked, and their shapes before."""


def stack(layer: nn.Module) -> None:
    """Stack the experts of a layer that is not cut yet. A layer that is stacked stays as it is."""
    for module in layer.modules():
        own = {name: each for name, each in module._parameters.items() if each is not None and each.dim() == 3}
        if not own:
            continue
        setattr(module, SHAPES, {name: tuple(each.shape) for name, each in own.items()})
        for name, each in own.items():
            module._parameters[name] = nn.Parameter(each.detach().flatten(0, 1), each.requires_grad)
        module.register_forward_pre_hook(_show)
        module.register_forward_hook(_hide, always_call=True)  # also where a recomputed pass ends early


def _show(module: nn.Module, args: tuple[Any, ...]) -> None:
    """An attribute of the module itself comes before its parameter of that name."""
    for name, shape in getattr(module, SHAPES).items():
        module.__dict__[name] = module._parameters[name].view(shape)  # type: ignore[union-attr]


def _hide(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
    for name in getattr(module, SHAPES):
        module.__dict__.pop(name, None)


def shape_of(module: nn.Module, name: str) -> tuple[int, ...]:
    """Shape of a module's own parameter before it was stacked."""
    found: dict[str, tuple[int, ...]] = getattr(module, SHAPES, {})
    return found[name] if name in found else tuple(module._parameters[name].shape)  # type: ignore[union-attr]
