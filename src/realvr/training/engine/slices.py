"""Checkpoints of ZeRO-3, in the files of ``shards.py``.

DeepSpeed flattens each parameter and gives every rank an equal part, the last one padded. A rank writes its part of the
32-bit weights and, once there was an update, of both moments of AdamW, without the padding: any number of ranks can
read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realvr.training.engine.shards import Piece, Shards, piece, write_shard
from realvr.training.engine.whole import saved_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's slices of trained parameters and their moments; rank 0 adds the buffers."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    tensors = {name: (buffer, Piece(tuple(buffer.shape))) for name, buffer in _buffers(module)}
    updates = _updates(optimizer)
    for name, parameter in _trained(module):
        place = _place(parameter)
        tensors[name] = (safe_get_local_fp32_param(parameter).detach()[: place.rows].clone(), place)
        for moment in MOMENTS if updates else ():
            local = safe_get_local_optimizer_state(parameter, moment)
            tensors[f"{name}#{moment}"] = (local[: place.rows].clone(), place)
    write_shard(directory, dist.get_rank(), tensors, {"updates": updates, "shapes": _shapes(module)})


def load(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, flats: Sequence[Tensor]) -> None:
    """Read back what `save` wrote. Another model raises ValueError. ``flats`` are the tensors that the optimizer
    updates: DeepSpeed's, each with the slices of many parameters."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    shards, shapes = Shards(directory), _shapes(module)
    saved, updates = shards.values["shapes"], int(shards.values["updates"])
    if saved != shapes:
        odd = min(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        raise ValueError(f"the model has other parameters than the checkpoint, among them {odd}")
    if updates:
        _make_moments(optimizer, flats, updates)
    for name, parameter in _trained(module):
        safe_set_local_fp32_param(parameter, _own(shards, name, parameter))
        for moment in MOMENTS if updates else ():
            safe_set_local_optimizer_state(parameter, _own(shards, f"{name}#{moment}", parameter), moment)
    _round_masters(module)
    with torch.no_grad():
        for name, buffer in _buffers(module):
            buffer.copy_(shards.whole(name))


def _place(parameter: nn.Parameter) -> Piece:
    numel: Any = parameter.ds_numel  # type: ignore[attr-defined]
    return piece((int(numel),), dist.get_rank(), dist.get_world_size())


def _own(shards: Shards, key: str, parameter: nn.Parameter) -> Tensor:
    """This rank's slice, padded with zeros as DeepSpeed does."""
    place, kept = _place(parameter), torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)  # type: ignore[attr-defined]
    if place.rows:
        kept[: place.rows] = shards.read(key, place.start, place.rows)
    return kept


def _round_masters(module: nn.Module) -> None:
    """Give the weights the values of their masters."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    for _, parameter in _trained(module):
        full = safe_get_full_fp32_param(parameter)
        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(full)


def _updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates made so far."""
    return int(max((float(state["step"]) for state in optimizer.state.values()), default=0.0))


def _make_moments(optimizer: torch.optim.Optimizer, flats: Sequence[Tensor], updates: int) -> None:
    """The state that AdamW would have after so many updates, to be filled in."""
    for flat in flats:
        device = flat.device if optimizer.defaults.get("fused") else "cpu"
        optimizer.state[flat] = {"step": torch.tensor(float(updates), device=device)}
        optimizer.state[flat] |= {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    names = {name for name, _ in _trained(module)}
    return ((name, tensor) for name, tensor in saved_tensors(module) if name not in names)


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.ds_shape) for name, parameter in _trained(module)}  # type: ignore[attr-defined]
