"""Files and memory of engines that keep all parameters on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from realvr.training.estimate.peak import bytes_of
from realvr.training.sections import OptimSettings
from realvr.training.statefile import read_state, read_tensors, write_state, write_tensors


def save_whole(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write trained parameters and buffers, and the optimizer's state."""
    write_tensors(directory / "model.safetensors", dict(saved_tensors(module)))
    write_state(directory / "optimizer", optimizer.state_dict())


def load_whole(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read back what `save_whole` wrote. Another model raises ValueError."""
    tensors, own = read_tensors(directory / "model.safetensors"), dict(saved_tensors(module))
    saved, needed = ({(name, tuple(tensor.shape)) for name, tensor in each.items()} for each in (tensors, own))
    if saved != needed:
        odd = sorted(saved ^ needed)[0][0]
        raise ValueError(f"the model has other parameters than the checkpoint, among them {odd}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    optimizer.load_state_dict(read_state(directory / "optimizer"))
    for parameter, state in optimizer.state.items():
        sizes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.dim()}
        if not sizes <= {tuple(parameter.shape)}:
            raise ValueError(f"the optimizer holds {sizes} for a parameter of {tuple(parameter.shape)}")


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained parameters (tied ones once) and the buffers that belong to the state."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()
    kept = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


def estimate_whole(
    module: nn.Module, optim: OptimSettings, held_numbers: Callable[[nn.Parameter], int] = nn.Parameter.numel
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer on one device, which holds that many numbers of a parameter."""
    found = ((held_numbers(p), p.element_size(), p.requires_grad) for p in module.parameters())
    return bytes_of(found, optim.master_weights)
