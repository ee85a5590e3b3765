"""Attention of branches behind a trunk in two parts, without a mask: every query against the whole trunk, and every
branch causally against itself.

The mask of such a pass scores every branch against the columns of all others, only to hide them, and keeps attention
from its fastest kernel. Softmax over two sets of columns is the mean of both softmaxes, weighted by the sums of their
exponentials: flash attention returns the logarithm of that sum. In the backward pass, the kernel of each part is given
the merged output and the merged sum, and then returns this part's exact share of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from realvr.backbone import flash_checks
from realvr.backbone.notices import notice_once
from realvr.backbone.packed_attention import has_flash

aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    """A pass whose new columns are ``branches`` runs of ``size`` columns, side by side behind ``trunk`` columns that
    all of them see. A branch has padding at its end only: no real query comes after it. ``real`` (B, trunk) marks the
    real columns of the trunk, whose padding comes first; None: it has no padding."""

    trunk: int
    branches: int
    size: int
    real: Tensor | None = None
    causal: ClassVar[bool] = True
    """Whether the queries are the branches' own columns, one after the other."""

    @staticmethod
    def build(trunk: int, real: Tensor | None, branches: int, new: int, real_BT: Tensor | None) -> Split:
        """For ``new`` columns, of which ``real_BT`` marks the real ones; checked without waiting for the device."""
        if new % branches:
            raise ValueError(f"{new} columns are not {branches} branches of one size")
        if real_BT is not None:
            last = real_BT.unflatten(1, (branches, -1))
            torch._assert_async((last[..., 1:] <= last[..., :-1]).all(), "a branch has padding before a real column")
        return Split(trunk, branches, new // branches, real)

    def to(self, device: torch.device) -> Split:
        """The same on a device."""
        return self if self.real is None else replace(self, real=self.real.to(device))

    def takes(self, query: Tensor, window: int | None) -> bool:
        """Whether there is a flash attention for this query (on a CPU, or on a GPU in 16 bits), and a sliding window
        hides nothing."""
        if window is not None and window < self.trunk + self.size:
            _masked("a sliding window is shorter than a prompt with its completion")
            return False
        if query.device.type == "cpu":
            return True
        if not has_flash(query):
            _masked(f"there is no flash attention on this device for {query.dtype} and heads {query.shape[-1]} wide")
            return False
        return flash_checks.merges(query)

    @cached_property
    def padding(self) -> Tensor | None:
        """(B, 1, T, 1): where the trunk's keys and values are padding."""
        return None if self.real is None else ~self.real[:, None, :, None]

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Where sequences of queries and of the trunk's keys end, (2 * B + 1,) each, if every row is two: its padding,
        which has no query, and its real columns."""
        assert self.real is not None
        rows, queries = len(self.real), self.branches * self.size
        row = torch.arange(rows, device=self.real.device)
        keys = torch.stack([row * self.trunk + (~self.real).sum(-1), (row + 1) * self.trunk], dim=1)
        found = torch.stack([torch.stack([row, row + 1], dim=1) * queries, keys]).flatten(1)
        ends_q, ends_k = torch.nn.functional.pad(found, (1, 0)).int()
        return ends_q, ends_k

    def apart(self, x: Tensor) -> Tensor:
        """(B, H, G * S, …) as (B * G, H, S, …)."""
        return x.unflatten(2, (self.branches, self.size)).transpose(1, 2).flatten(0, 1)

    def together(self, x: Tensor) -> Tensor:
        """(B * G, H, S, …) as (B, H, G * S, …)."""
        return x.unflatten(0, (-1, self.branches)).transpose(1, 2).flatten(2, 3)

    def defers(self, key: Tensor, query: Tensor, grad: Tensor, out: Tensor, lse: Tensor, scaling: float) -> bool:
        """Whether the gradients of the trunk's keys and values are made later, out of these."""
        return False


class Rows(Protocol):
    """Attention rows that are asked for, see `realvr.backbone.attention.Probe`."""

    def on_trunk(self, length: int) -> bool:
        """Whether they can be read off trunk and log-sum-exp alone."""
        ...


def usable(split: Split | None, plain: bool, rows: Iterable[Rows]) -> Split | None:
    """The split of a pass, unless it needs the mask: for what is asked for (not ``plain``) or for attention rows."""
    if split is None or (plain and all(each.on_trunk(split.trunk) for each in rows)):
        return split
    _masked("attention rows with a gradient, or matrices, are asked for")
    return None


def _masked(why: str) -> None:
    notice_once(f"split attention: {why}; the mask over prompt and completions is used there")


def attend_split(
    query: Tensor,
    trunk: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    split: Split,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of (B, H, G * S, d) queries to keys and values of the trunk (B, H_kv, T, d) and of the branches
    (B, H_kv, G * S, d): the output (B, G * S, H, d), and the log-sum-exp (B, H, G * S) of each query's scores, outside
    the graph."""
    out, lse = merged(query, trunk, own, split, scaling)
    return out.transpose(1, 2).contiguous(), lse


def merged(
    query: Tensor, trunk: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], split: Split, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same with the output as the query lies, (B, H, G * S, d)."""
    out, lse = _SplitAttention.apply(query, *trunk, *own, split, scaling)
    return out, lse


@torch.no_grad()
def weights_on(
    query: Tensor, key: Tensor, lse: Tensor, columns: slice | Tensor | None, split: Split, scaling: float
) -> Tensor:
    """Post-softmax attention (B, H, R, C) of ``query`` (B, H, R, d) on a run of columns of the trunk's ``key`` (B,
    H_kv, T, d), in float32 or wider: the log-sum-exp of a query's scores stands for all other columns."""
    assert isinstance(columns, slice)
    batch, heads, rows, width = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key[:, :, columns].to(wide)
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * rows, width).to(wide)
    scores = (folded @ key.transpose(2, 3) * scaling).view(batch, heads, rows, -1)
    weights = (scores - lse[..., None]).exp()
    return weights if split.padding is None else weights.masked_fill(split.padding[:, :, columns].transpose(2, 3), 0)


class _Node(FunctionCtx):
    split: Split
    parts: tuple[_TrunkPart, _Part]
    saved_tensors: tuple[Tensor, ...]


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Node,
        query: Tensor,
        trunk_key: Tensor,
        trunk_value: Tensor,
        key: Tensor,
        value: Tensor,
        split: Split,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        seen, inside = _TrunkPart(split, scaling), _Part(scaling, causal=split.causal)
        out_trunk, lse_trunk = seen.forward(query, trunk_key, trunk_value)
        out_own, lse_own = map(split.together, inside.forward(*map(split.apart, (query, key, value))))
        share = (lse_trunk - lse_own).sigmoid()[..., None]  # of the trunk
        out = torch.empty_like(out_own)  # rounded once
        torch.addcmul(out_trunk * share, out_own, 1 - share, out=out)
        lse = torch.logaddexp(lse_trunk, lse_own)
        ctx.save_for_backward(query, trunk_key, trunk_value, key, value, out, lse)
        ctx.split, ctx.parts = split, (seen, inside)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: _Node, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        query, trunk_key, trunk_value, key, value, out, lse = ctx.saved_tensors
        split, (seen, inside) = ctx.split, ctx.parts
        of_trunk = seen.backward(grad, query, trunk_key, trunk_value, out, lse)
        own = inside.backward(*map(split.apart, (grad, query, key, value, out, lse)))
        of_query, of_key, of_value = map(split.together, own)
        later = split.defers(trunk_key, query, grad, out, lse, seen.scaling)
        of_keys_and_values = (None, None) if later else of_trunk[1:]
        return of_trunk[0] + of_query, *of_keys_and_values, of_key, of_value, None, None


class _Part:
    """Flash attention of one part, and its backward pass for an output and a log-sum-exp that may cover more. Keeps
    what the kernel wants back."""

    def __init__(self, scaling: float, causal: bool = False, bias: Tensor | None = None) -> None:
        self.scaling, self.causal, self.bias = scaling, causal, bias
        self.rest: tuple[Any, ...] = ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, d) and log-sum-exp (B, H, T)."""
        if has_flash(query):  # fewer heads of keys and values than of queries are fine
            flash = aten._scaled_dot_product_flash_attention
            out, lse, *self.rest, _ = flash(query, key, value, 0.0, self.causal, False, scale=self.scaling)
            return out, lse
        key, value = (_repeat(x, query) for x in (key, value))
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, self.causal, attn_mask=self.bias, scale=self.scaling)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's share of the gradients by query, key and value."""
        if has_flash(query):
            *lengths, state, unused = self.rest
            flash = aten._scaled_dot_product_flash_attention_backward
            given = (grad, query, key, value, out, lse.contiguous(), *lengths, 0.0, self.causal, state, unused)
            return flash(*given, scale=self.scaling)
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        repeated = (_repeat(x, query) for x in (key, value))
        given = (grad, query, *repeated, out, lse.contiguous(), 0.0, self.causal)
        of_query, of_key, of_value = flash(*given, attn_mask=self.bias, scale=self.scaling)
        return of_query, _summed(of_key, key), _summed(of_value, value)


class _TrunkPart(_Part):
    """Every query against the whole trunk. On a GPU the rows of a trunk with padding are sequences of their own
    lengths; on a CPU a bias hides the padding."""

    def __init__(self, split: Split, scaling: float) -> None:
        super().__init__(scaling)
        self.split = split

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        padding = self.split.padding
        if padding is not None and has_flash(query):
            return self._forward_sequences(query, key, value)
        if padding is not None:
            hidden = padding.transpose(2, 3)
            self.bias = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, float("-inf"))
        return super().forward(query, key, value)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        padding = self.split.padding
        if padding is None or not has_flash(query):
            return super().backward(grad, query, key, value, out, lse)
        of_query, of_key, of_value = self._backward_sequences(grad, query, key, value, out, lse)
        # What no query has read, no kernel need write.
        return of_query, of_key.masked_fill_(padding, 0), of_value.masked_fill_(padding, 0)

    def _forward_sequences(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, queries, _ = query.shape
        given = (*map(_flat, (query, key, value)), *self.split.ends, queries, self.split.trunk, 0.0, False, False)
        out, lse, *self.rest, _ = aten._flash_attention_forward(*given, scale=self.scaling)
        return _unflat(out, rows), lse.unflatten(1, (rows, queries)).transpose(0, 1)

    def _backward_sequences(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        rows, _, queries, _ = query.shape
        flat = (*map(_flat, (grad, query, key, value, out)), lse.transpose(0, 1).flatten(1).contiguous())
        given = (*flat, *self.split.ends, queries, self.split.trunk, 0.0, False, *self.rest)
        found = aten._flash_attention_backward(*given, scale=self.scaling)
        return tuple(_unflat(x, rows) for x in found)


def _flat(x: Tensor) -> Tensor:
    """(B, H, T, d) as (B * T, H, d)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(x: Tensor, rows: int) -> Tensor:
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of repeated heads by the heads themselves."""
    return grad if grad.shape == x.shape else grad.unflatten(1, (x.shape[1], -1)).sum(2)
