"""Attention of a latent step in two parts, without joining keys and values: to the trunk in place, and to the span's
own few columns.

Joined keys and values belong to one step, and autograd keeps them: a span of K latents keeps K + 1 copies of its
prompt. Here every step saves the trunk's own tensors, so that all of them share one storage. Both parts are merged as
those of branches (`realvr.backbone.split_attention`). A step has one query in each row, or two: each runs by itself and
sees the whole of its part of the span, so no causal mask is needed. Heads that share keys and values become rows of one
head, so neither keys and values nor their gradients are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from realvr.backbone import flash_checks
from realvr.backbone.notices import notice_once
from realvr.backbone.packed_attention import has_flash
from realvr.backbone.split_attention import Split, merged
from realvr.backbone.trunk_gradients import LaterGradients, Queries


@dataclass(frozen=True)
class Run(Split):
    """One query of each row, its ``size`` heads for one of keys and values. ``real`` marks the columns of the trunk
    that it sees: one run in each row, with hidden columns on either side. With ``later`` its backward pass gives the
    trunk's keys and values no gradients, and leaves there what they are made of."""

    later: LaterGradients | None = field(default=None, compare=False)
    causal: ClassVar[bool] = False

    @cached_property
    @override
    def ends(self) -> tuple[Tensor, Tensor]:
        """As three sequences in each row, (3 * B + 1,): what is hidden before the run, the run, which alone has
        queries, and what is hidden behind it."""
        assert self.real is not None
        row = torch.arange(len(self.real), device=self.real.device)
        column = torch.arange(1, self.trunk + 1, device=self.real.device)
        last = torch.where(self.real, column, 0).amax(-1)
        start = row * self.trunk
        keys = torch.stack([start + last - self.real.sum(-1), start + last, start + self.trunk], dim=1)
        queries = torch.stack([row, row + 1, row + 1], dim=1) * self.size
        ends_q, ends_k = torch.nn.functional.pad(torch.stack([queries, keys]).flatten(1), (1, 0)).int()
        return ends_q, ends_k

    @override
    def apart(self, x: Tensor) -> Tensor:
        return x

    @override
    def together(self, x: Tensor) -> Tensor:
        return x

    @override
    def defers(self, key: Tensor, query: Tensor, grad: Tensor, out: Tensor, lse: Tensor, scaling: float) -> bool:
        if self.later is None:
            return False
        self.later.add(key, Queries(query, grad, out, lse, self.real, scaling))
        return True


@dataclass(frozen=True)
class Trunk:
    """What the steps of a span of ``span`` columns stand behind: ``length`` columns in one piece. ``visible`` (B,
    length) marks those that they see, one run in each row; None: all. ``later``: see `Run`."""

    length: int
    span: int
    visible: Tensor | None = None
    later: LaterGradients | None = field(default=None, compare=False)
    _whole: dict[tuple[torch.device, int], Run] = field(default_factory=dict, compare=False, repr=False)

    def takes(self, query: Tensor, window: int | None) -> bool:
        """Whether there is a flash attention for this query (on a CPU, or on a GPU in 16 bits), and a sliding window
        hides nothing of the span."""
        if window is not None and window <= self.span:
            _joined("a sliding window is shorter than a span")
            return False
        if query.device.type == "cpu":
            return True
        if not has_flash(query):
            _joined(f"there is no flash attention on this device for {query.dtype} and heads {query.shape[-1]} wide")
            return False
        return flash_checks.merges(query)

    def runs(
        self, queries: int, folds: int, window: int | None, place_BT: Tensor | None, device: torch.device
    ) -> tuple[Run, ...]:
        """What each of the last ``queries`` columns sees of the trunk. ``folds``: heads for one of keys and values;
        ``place_BT``: of all columns up to these, where a sliding window is measured on them."""
        if window is None:
            if (device, folds) not in self._whole:  # the same for all steps
                real = None if self.visible is None else self.visible.to(device)
                self._whole[device, folds] = Run(self.length, 1, folds, real, self.later)
            return (self._whole[device, folds],) * queries
        assert place_BT is not None
        seen = [self._near(place_BT, column, window) for column in range(-queries, 0)]
        return tuple(Run(self.length, 1, folds, real.to(device), self.later) for real in seen)

    def _near(self, place_BT: Tensor, column: int, window: int) -> Tensor:
        near = place_BT[:, : self.length] > place_BT[:, column, None] - window
        return near if self.visible is None else near & self.visible


def behind_trunk(trunk: Trunk | None, plain: bool) -> Trunk | None:
    """The trunk of a pass, unless what is asked for (not ``plain``) needs its keys and values joined."""
    if trunk is None or plain:
        return trunk
    _joined("attention rows or matrices are asked for")
    return None


def _joined(why: str) -> None:
    notice_once(f"split attention: {why}; keys and values of latent steps are joined there")


def attend_span(
    query: Tensor, trunk: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], runs: Sequence[Run], scaling: float
) -> Tensor:
    """Attention of (B, H, Q, d) queries, the last columns of a span, to keys and values of the trunk (B, H_kv, T, d)
    and of the span (B, H_kv, n, d), n >= Q: (B, Q, H, d)."""
    first = own[0].shape[2] - len(runs) + 1
    found = []
    for stop, one, run in zip(range(first, first + len(runs)), query.unbind(2), runs, strict=True):
        seen = own if stop == own[0].shape[2] else (own[0][:, :, :stop], own[1][:, :, :stop])
        out, _ = merged(one.unflatten(1, (-1, run.size)), trunk, seen, run, scaling)
        found.append(out.flatten(1, 2))
    return torch.stack(found, dim=1)
