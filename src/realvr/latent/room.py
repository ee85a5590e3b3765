"""How much memory of a CUDA device is left for static buffers and recorded steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def free_bytes(device: torch.device, needed: int | None = None) -> int | None:
    """Memory of a CUDA device that can still be allocated, with a tenth of it left alone; None elsewhere.

    What torch has reserved and does not use counts, unless it is in the memory pool of a CUDA graph: nobody else can
    have that. Where ``needed`` bytes are free without it, there may be more than this says.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    if needed is not None and needed <= 0.9 * free:  # the list of segments is long
        return int(0.9 * free)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    private = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == _index(device) and _pool(segment) != (0, 0)
    )
    return int(0.9 * (free + max(unused - private, 0)))


def pool_bytes(pool: Iterable[int]) -> int:
    """What the memory pool of CUDA graphs holds."""
    found = tuple(pool)
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if _pool(segment) == found)


def _pool(segment: dict[str, Any]) -> tuple[int, ...]:
    """(0, 0) is everybody's."""
    return tuple(segment.get("segment_pool_id", (0, 0)))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def give_back(device: torch.device) -> None:
    """Return to the device what torch holds and nobody uses: the pools of graphs that are gone, above all."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
