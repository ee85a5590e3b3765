"""Putting the weights of a model on the meta device where a rank keeps them, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from realvr.families import Stock

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

LAYERS = "language_model.layers"
"""Where the decoder layers of every family are."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that engines shard one by one: those of the language model, in order. None in a module that has no
    such thing."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList) and name.endswith(LAYERS):
            return list(inner)
    return []


def fill(
    model: Stock,
    weights: Iterator[tuple[str, Tensor]],
    device: torch.device,
    done: Callable[[nn.Module], object] | None = None,
) -> None:
    """Give every parameter and buffer its value, on ``device``. Of a DTensor only this rank's slice is read.

    ``done`` gets each decoder layer as soon as it is complete; an engine that cuts whole layers does so there.
    """
    from torch.distributed.tensor import DTensor  # a second, for one process too

    from realvr.backbone.streaming import set_tensor  # imports transformers

    sharded = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    waiting = {layer: sum(1 for _ in layer.parameters()) for layer in decoder_layers(model)}
    owner = {id(each): layer for layer in waiting for each in layer.parameters()}
    owners = {name: owner.get(id(each)) for name, each in model.named_parameters()}
    for name, tensor in weights:
        if name in sharded:
            copy_slice(sharded[name], tensor)
        else:
            set_tensor(model, name, tensor.to(device, copy=True))
        layer = owners.get(name)
        if layer is not None:
            waiting[layer] -= 1
            if not waiting[layer] and done is not None:
                done(layer)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
def copy_slice(parameter: DTensor, full: Tensor) -> None:
    """Fill this rank's part of a parameter that is cut along its first axis, as FSDP2 cuts; experts are stacked."""
    local = parameter.to_local()
    full = full.reshape(parameter.shape)
    mesh = parameter.device_mesh
    parts = full.chunk(mesh.size())
    rank = mesh.get_local_rank()
    own = parts[rank] if rank < len(parts) else full[:0]
    if own.shape != local.shape:
        raise RuntimeError(f"a slice of {tuple(local.shape)} was expected, not {tuple(own.shape)}")
    local.copy_(own)
