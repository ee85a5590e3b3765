"""Gradients of a layer that one step passes through several times: handed on after each pass, not after the last.

Autograd adds up what all uses of a parameter contribute before the parameter gets any of it. With K latent steps behind
one prompt the whole gradient of every layer would wait on every rank for the prompt's backward pass: no engine could
shard it. Here each pass uses parameters of its own, over the same memory, and hands their gradients on when it is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def reduce_each_pass(layer: nn.Module) -> None:
    """Let a sharded layer have its gradients after each pass. Comes after ``fully_shard``: its hooks come first."""
    places = [
        (module, name)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) and parameter.requires_grad
    ]

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            for module, name in places:
                module._parameters[name] = _of_this_pass(module._parameters[name])

    def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for module, name in places:
            parameter = module._parameters[name]
            module._parameters[name] = getattr(parameter, "whole", parameter)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, prepend=True)


def _of_this_pass(parameter: object) -> nn.Parameter:
    # A pass that is recomputed may end early, without `after`: its parameters are still there.
    whole: Any = getattr(parameter, "whole", parameter)
    own = nn.Parameter(whole.data)
    own.whole = whole  # type: ignore[attr-defined]
    own.register_post_accumulate_grad_hook(_hand_on)
    return own


def _hand_on(own: Tensor) -> None:
    whole: nn.Parameter = own.whole  # type: ignore[attr-defined]
    gradient, own.grad = own.grad, None
    if whole.grad is None:
        whole.grad = gradient
    elif gradient is not None:
        whole.grad += gradient
