"""Metrics of a step as sums and counts, which add up over microbatches and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from realvr.training.engine import Ranks

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (sum, count); the loop adds both over microbatches and ranks and logs sum / count."""


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """A number on a device. Written there, not copied: for a copy the host waits until the GPU has caught up."""
    return value.to(device) if isinstance(value, Tensor) else torch.full((), value, device=device)


def odd_metric(metrics: Metrics) -> str:
    """The name of a metric that is not a pair of tensors; '' where all are."""
    for name, pair in metrics.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            return name
    return ""


def add(metrics: Metrics, more: Metrics) -> None:
    """Add the sums and counts of ``more`` to ``metrics``."""
    for name, (value, count) in more.items():
        value, count = value.detach(), count.detach()
        if name in metrics:
            value, count = value + metrics[name][0].to(value.device), count + metrics[name][1].to(count.device)
        metrics[name] = (value, count)


def sum_over_ranks(ranks: Ranks, metrics: Metrics) -> dict[str, tuple[float, float]]:
    """(sum, count) of each metric over all ranks, each of which calls this; a rank need not have every name."""
    own = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
    summed: dict[str, tuple[float, float]] = {}
    for of_rank in ranks.gather_objects(own):
        for name, (total, count) in of_rank.items():
            before = summed.get(name, (0.0, 0.0))
            summed[name] = (before[0] + total, before[1] + count)
    return summed
