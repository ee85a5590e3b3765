"""Attention rows that a probe asks for, computed beside the attention itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from realvr.backbone.attention import Probe

# Weights of a pooled probe that exist at once.
_POOLED_WEIGHTS = 2**24


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, causal: bool) -> Tensor:
    """Post-softmax attention (B, H, R, Tk) of ``query`` (B, H, R, d) on ``key`` (B, H_kv, Tk, d), without repeating
    keys. In float32 or wider."""
    batch, heads, rows, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    scores = (folded @ key.transpose(2, 3) * scaling).view(batch, heads, rows, length)
    if mask is None and causal:
        index = torch.arange(length, device=key.device)
        mask = (index <= index[length - rows :, None])[None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide)


def probed(probe: Probe, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """What a probe asks for of (B, H, Tq, d) queries on (B, H_kv, Tk, d) keys."""
    queries = query.shape[2]
    if probe.pool is not None:
        return _pooled(probe, query, key, mask, scaling)
    with torch.set_grad_enabled(probe.gradient and torch.is_grad_enabled()):
        if probe.rows is not None:
            if mask is None and queries > 1:
                index = torch.arange(key.shape[2], device=key.device)
                mask = (index <= index[key.shape[2] - queries :, None])[None, None]
            pick = probe.rows.to(query.device)[:, None, :, None]
            query = query.gather(2, pick.expand(-1, query.shape[1], -1, query.shape[3]))
            if mask is not None:
                mask = mask.expand(query.shape[0], -1, -1, -1).gather(2, pick.expand(-1, 1, -1, mask.shape[3]))
        weights = weights_of(query, key, mask, scaling, causal=probe.rows is None and queries > 1)
        if isinstance(probe.columns, slice):
            weights = weights[..., probe.columns]
        if not probe.heads:
            weights = weights.mean(1)  # of the chosen columns: a view would keep all of them
        if isinstance(probe.columns, Tensor):
            pick = probe.columns.to(weights.device)[:, None]
            pick = pick if not probe.heads else pick[:, None]
            weights = weights.gather(-1, pick.expand(*weights.shape[:-1], -1))
        return weights if probe.gradient else weights.detach()


def _pooled(probe: Probe, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """``left @ rows @ right`` of a pooled probe, in chunks of queries of at most `_POOLED_WEIGHTS` weights."""
    assert probe.pool is not None
    left, right = (matrix.to(query.device, torch.float32)[:, None] for matrix in probe.pool)
    batch, heads, queries, _ = query.shape
    index = torch.arange(queries, device=query.device).expand(batch, -1) if probe.rows is None else probe.rows
    if mask is None and queries > 1:
        column = torch.arange(key.shape[2], device=key.device)
        mask = (column <= column[key.shape[2] - queries :, None])[None, None]
    size = max(1, _POOLED_WEIGHTS // (batch * heads * key.shape[2]))
    total = None
    for start in range(0, index.shape[1], size):
        part = replace(probe, rows=index[:, start : start + size], pool=None)
        rows = probed(part, query, key, mask, scaling)
        rows = rows if probe.heads else rows[:, None]
        pooled = left[..., start : start + size].to(rows.dtype) @ (rows @ right.to(rows.dtype))
        total = pooled if total is None else total + pooled
    assert total is not None
    return total if probe.heads else total[:, 0]
