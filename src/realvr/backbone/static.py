"""Decoder attention over keys and values of fixed size: one step of decoding, or one latent step.

A `StaticPass` takes the place of a :class:`realvr.backbone.attention.Pass` where one column per sequence is fed. Its
buffers keep their shape and their address from step to step. Every index is a tensor on the device, so that the kernels
of a step can be recorded once and replayed. Attention is plain matrix products, on every device; in a recorded step our
own kernel takes their place (`decode_kernels`).

The trunk, which the G branches of a prompt share, and each branch's own columns are scored apart and normalised
together. A branch never sees the columns of another, so no mask is needed between them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from realvr.backbone import decode_kernels, kernel_checks

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer: (B, H_kv, T, d) of a trunk, (B, H_kv, G, S, d) of branches."""

_WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.bmm.overloads()
"""Whether this torch multiplies half-precision matrices into float32 (on CUDA)."""


class StaticPass:
    """One column for each of B x G sequences.

    ``visible_BT`` marks the columns of the trunk that may be seen, with the one that is written. ``column`` (1,) is
    where this pass writes: into the trunk, or with ``branches`` into each branch. ``place_BT`` and ``place_B``, the
    indices of the trunk's columns and of the new one in their sequences, are what sliding windows are measured on.
    """

    def __init__(
        self,
        trunk: list[KeysValues],
        visible_BT: Tensor,
        column: Tensor,
        branches: list[KeysValues] | None = None,
        place_BT: Tensor | None = None,
        place_B: Tensor | None = None,
    ) -> None:
        self.trunk, self.visible_BT, self.column, self.branches = trunk, visible_BT, column, branches
        self.place_BT, self.place_B = place_BT, place_B
        self._biases: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attention output (B, N, H, d) of ``query`` (B, H, N, d); N is G, or 1 without branches."""
        if (found := self._in_kernels(layer, query, key, value, scaling, window)) is not None:
            return found
        if self.branches is None:
            return self._on_trunk(layer, query, key, value, scaling, window)
        batch, heads, group, width = query.shape
        (trunk_k, trunk_v), (own_k, own_v) = self.trunk[layer], self.branches[layer]
        own_k.index_copy_(3, self.column, key[:, :, :, None])
        own_v.index_copy_(3, self.column, value[:, :, :, None])
        kv_heads, length, size = key.shape[1], trunk_k.shape[2], own_k.shape[3]
        share, every = heads // kv_heads, length + size
        # Query heads that share a K/V head are rows beside each other: keys are read once, never repeated.
        query = query.view(batch, kv_heads, share, group, width).transpose(2, 3).contiguous()
        scores = query.new_empty(batch * kv_heads, group * share, every, dtype=_wide(query.dtype))
        own_scores = scores.view(-1, share, every)[..., length:]
        _product(query.view(-1, group * share, width), trunk_k.flatten(0, 1).transpose(1, 2), scores[..., :length])
        _product(query.view(-1, share, width), own_k.flatten(0, 2).transpose(1, 2), own_scores)
        weights = _weights(scores.view(batch, -1, every), self._bias(window), scaling, value.dtype)
        out = torch.bmm(weights.view(-1, group * share, every)[..., :length], trunk_v.flatten(0, 1))
        own = weights.view(-1, share, every)[..., length:]
        out = out.view(-1, share, out.shape[-1]).baddbmm_(own, own_v.flatten(0, 2))
        return out.view(batch, kv_heads, group, share, -1).transpose(1, 2).reshape(batch, group, heads, -1)

    def _in_kernels(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor | None:
        """The same by kernels of our own, where they apply."""
        if not decode_kernels.takes_heads("attention", query):
            return None
        branches = None if self.branches is None else self.branches[layer]
        bias, given = self._bias(window)[:, 0], (query, key, value, self.trunk[layer], branches)
        if not decode_kernels.lies_well(*given, bias):
            return None
        return decode_kernels.tried(
            "attention",
            (query, key, value, self.trunk[layer][0], *(branches or ())[:1]),
            lambda: decode_kernels.attend(*given, self.column, bias, scaling),
            lambda: kernel_checks.attention_gap(decode_kernels.attend, *given, bias, scaling),
        )

    def _on_trunk(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        batch, heads, _, width = query.shape
        keys, values = self.trunk[layer]
        keys.index_copy_(2, self.column, key)
        values.index_copy_(2, self.column, value)
        kv_heads, length = keys.shape[1:3]
        query = query.reshape(batch * kv_heads, -1, width)
        scores = query.new_empty(*query.shape[:2], length, dtype=_wide(query.dtype))
        _product(query, keys.flatten(0, 1).transpose(1, 2), scores)
        weights = _weights(scores.view(batch, -1, length), self._bias(window), scaling, value.dtype)
        return torch.bmm(weights.view_as(scores), values.flatten(0, 1)).view(batch, 1, heads, -1)

    def _bias(self, window: int | None) -> Tensor:
        """What is added to the scores of a row: -inf where a key is hidden. (B, 1, T), with branches (B, 1, T + S).

        The column that is written is always visible: no row of the softmax is empty.
        """
        if window not in self._biases:
            bias = self._trunk_bias(window)
            if self.branches is not None:
                bias = torch.cat([bias, self._branch_bias(window).expand(len(bias), -1)], dim=1)
            self._biases[window] = bias[:, None]
        return self._biases[window]

    def _trunk_bias(self, window: int | None) -> Tensor:
        visible = self.visible_BT
        if window is not None:
            assert self.place_BT is not None and self.place_B is not None
            visible = visible & (self.place_BT > self.place_B[:, None] - window)
        return self._hidden(visible)

    def _branch_bias(self, window: int | None) -> Tensor:
        assert self.branches is not None
        index = torch.arange(self.branches[0][0].shape[3], device=self.column.device)
        visible = index <= self.column
        return self._hidden(visible if window is None else visible & (index > self.column - window))

    def _hidden(self, visible: Tensor) -> Tensor:
        zeros = torch.zeros(visible.shape, dtype=_wide(self.trunk[0][0].dtype), device=visible.device)
        return zeros.masked_fill(~visible, float("-inf"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _weights(scores_BRT: Tensor, bias_B1T: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Attention weights (B, rows, T) in ``dtype`` from products of queries and keys."""
    return torch.add(bias_B1T, scores_BRT, alpha=scaling).softmax(-1).to(dtype)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``a @ b`` in float32 or wider into ``out``, from half-precision matrices without a wide copy of them where torch
    can."""
    if a.dtype == out.dtype:
        torch.bmm(a, b, out=out)
    elif not a.is_cuda or not _WIDE_PRODUCTS:
        torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)
    elif _writes_wide(a.device, a.dtype, out.dtype):
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.bmm(a, b, out_dtype=out.dtype))


@cache
def _writes_wide(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether such a product may be written into part of a tensor. Tried once, before anything is recorded."""
    a, into = torch.eye(16, dtype=dtype, device=device)[None], torch.zeros(1, 16, 24, dtype=wide, device=device)
    try:
        torch.bmm(a, a, out_dtype=wide, out=into[..., 4:20])
    except (RuntimeError, TypeError):
        return False
    return torch.equal(into[0, :, 4:20], torch.eye(16, dtype=wide, device=device)) and int(into.count_nonzero()) == 16
