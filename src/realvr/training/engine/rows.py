"""Checkpoints and export of parameters that FSDP2 has cut into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realvr.training.engine.shards import Piece, Shards, piece, write_shard
from realvr.training.engine.stacked import shape_of
from realvr.training.engine.whole import saved_tensors


def local_rows(parameter: Tensor) -> Tensor:
    """This rank's rows, sharing memory; all of a tensor that is not cut."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor. Every rank calls it."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class RowFiles:
    """What one rank writes and reads: its rows of trained parameters, of their optimizer states, and buffers."""

    module: nn.Module
    local: dict[nn.Parameter, nn.Parameter]
    """The rows of each trained parameter, which the optimizer updates."""
    optimizer: torch.optim.Optimizer
    rank: int
    world: int

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def _piece(self, parameter: nn.Parameter) -> Piece:
        if not isinstance(parameter, DTensor):
            return Piece(tuple(parameter.shape))
        return piece(parameter.shape, self.rank, self.world)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        names = set(self._names().values())
        return ((name, tensor) for name, tensor in saved_tensors(self.module) if name not in names)

    def save(self, directory: Path) -> None:
        """Write this rank's files."""
        tensors = {name: (buffer, Piece(tuple(buffer.shape))) for name, buffer in self._buffers()}
        steps: dict[str, Any] = {}
        for parameter, name in self._names().items():
            local, place = self.local[parameter], self._piece(parameter)
            tensors[name] = (local.detach(), place)
            for key, value in self.optimizer.state.get(local, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"{name}#{key}"] = (value, place)
                else:
                    steps.setdefault(name, {})[key] = float(value) if isinstance(value, Tensor) else value
        write_shard(directory, self.rank, tensors, {"states": steps})

    def load(self, directory: Path) -> None:
        """Read back what any number of ranks wrote. Another model raises ValueError."""
        shards, names, buffers = Shards(directory), self._names(), dict(self._buffers())
        own = {name: tuple(parameter.shape) for parameter, name in names.items()}
        own |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        self._stack(shards, own)
        saved = {key: shards.shape(key) for key in shards if "#" not in key}
        if saved != own:
            odd = sorted(set(saved.items()) ^ set(own.items()))[0][0]
            raise ValueError(f"the model has other parameters than the checkpoint, among them {odd}")
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(shards.whole(name))
            for parameter, name in names.items():
                self.local[parameter].copy_(self._read(shards, name, parameter))
        self._load_states(shards, names)

    def _stack(self, shards: Shards, own: dict[str, tuple[int, ...]]) -> None:
        """Files of earlier versions have experts cut along their number."""
        for key in shards:
            saved, wanted = shards.shape(key), own.get(key.partition("#")[0])
            if len(saved) == 3 and (saved[0] * saved[1], saved[2]) == wanted:
                shards.stack(key)

    def _read(self, shards: Shards, key: str, parameter: nn.Parameter) -> Tensor:
        place = self._piece(parameter)
        return shards.whole(key) if place.rows is None else shards.read(key, place.start, place.rows)

    def _load_states(self, shards: Shards, names: dict[nn.Parameter, str]) -> None:
        """The optimizer's states, through its own ``load_state_dict``."""
        by_local = {id(local): parameter for parameter, local in self.local.items()}
        kept: dict[str, list[str]] = {}
        for key in shards:
            if "#" in key:
                kept.setdefault(key.partition("#")[0], []).append(key)
        states: dict[int, dict[str, Any]] = {}
        every = [local for group in self.optimizer.param_groups for local in group["params"]]
        for number, local in enumerate(every):
            parameter = by_local[id(local)]
            name = names[parameter]
            if name in kept:
                found: dict[str, Any] = dict(shards.values["states"].get(name, {}))
                found = {
                    key: torch.tensor(value) if isinstance(value, float) else value for key, value in found.items()
                }
                found |= {key.partition("#")[2]: self._read(shards, key, parameter) for key in kept[name]}
                states[number] = found
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": states})


def export_whole(module: nn.Module, main: bool, write: Callable[[], None]) -> None:
    """Collect one parameter at a time in main memory of the main process, and run ``write`` there with the whole model.
    Every rank calls it, with all parameters in shards."""
    places: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), (parameter, []))[1].append((inner, name))
    whole: list[nn.Parameter] = []
    for parameter, holders in places.values():
        tensor = whole_tensor(parameter)
        if main:
            shape = shape_of(*holders[0])
            whole.append(nn.Parameter(tensor.to("cpu", copy=True).view(shape), parameter.requires_grad))
    if not main:
        return
    try:
        for copied, (_, holders) in zip(whole, places.values(), strict=True):
            for inner, name in holders:
                inner._parameters[name] = copied
        write()
    finally:
        for parameter, holders in places.values():
            for inner, name in holders:
                inner._parameters[name] = parameter
