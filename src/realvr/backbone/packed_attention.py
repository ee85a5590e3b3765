"""Attention inside each example of packed rows: as many causal sequences, without a mask over the whole row.

The mask of a packed row has (T x T) entries, most of them False, and keeps attention from its causal kernel. The
examples of a row are independent causal sequences: on a GPU in 16 bits torch's ``varlen_attn`` takes them in place;
elsewhere, or if this torch has no such function, those of similar length run as one batch of plain causal SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from realvr.backbone import flash_checks
from realvr.backbone.vision import Chunks


@dataclass(frozen=True)
class Packed:
    """Where the examples of R packed rows lie in their flattened (R * T) columns. The padding behind the last one of
    a row is a sequence of its own, whose states nobody reads."""

    chunks: Chunks
    place: Tensor  # (R * T,) where each column stands among the examples, bucket by bucket

    @staticmethod
    def build(segment_RT: Tensor) -> Packed:
        """From the segments of packed rows, on the CPU: examples numbered over all rows, one value below 0 for
        padding."""
        numbers, lengths = segment_RT.flatten().unique_consecutive(return_counts=True)
        examples = numbers[numbers >= 0]
        if len(examples.unique()) < len(examples) or bool((numbers == -1).any()):
            raise ValueError("packed attention needs examples that each lie in one piece, and no trunk (segment -1)")
        chunks = Chunks.build(lengths)
        order = torch.cat([bucket.index.flatten()[bucket.keep] for bucket in chunks.buckets])
        return Packed(chunks, order.argsort())

    def to(self, device: torch.device, non_blocking: bool = True) -> Packed:
        """The same on a device."""
        return Packed(self.chunks.to(device), self.place.to(device, non_blocking=non_blocking))

    @property
    def longest(self) -> int:
        """Columns of the longest example."""
        return self.chunks.longest


@cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """Variable-length attention of torch and the names of its parameters; None where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def has_flash(query: Tensor) -> bool:
    """Whether flash attention takes this query: a GPU that has it, 16 bits, a head width of its kernels."""
    sixteen = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    return query.is_cuda and sixteen and 0 < width <= 256 and width % 8 == 0 and _recent(query.device)


@cache
def _recent(device: torch.device) -> bool:
    """Ampere or later, or an AMD GPU, whose torch knows by itself."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def has_varlen(query: Tensor) -> bool:
    """Whether ``varlen_attn`` takes this query, and computes what it should."""
    return has_flash(query) and _varlen() is not None and flash_checks.packs(query)


def attend_packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float
) -> Tensor:
    """Causal attention of (R, H, T, d) queries inside each example; returns (R, T, H, d)."""
    return (_attend_varlen if has_varlen(query) else _attend_buckets)(module, query, key, value, packed, scaling)


def _attend_varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float
) -> Tensor:
    """One kernel for all examples."""
    rows, _, columns, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (R * T, H, d)
    out = attend_varlen(q, k, v, packed.chunks.boundaries, packed.longest, scaling, causal=True)
    return out.unflatten(0, (rows, columns))


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float, causal: bool
) -> Tensor:
    """Attention of (N, H, d) queries inside each of the sequences that ``ends`` (n + 1,) int32 cuts them into; returns
    (N, H, d). What releases of torch call things differs: only what is there is named."""
    found = _varlen()
    assert found is not None
    attend, names = found
    options: dict[str, Any] = {}
    if causal:
        options = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "scale" in names:
        options["scale"] = scaling
    elif (factor := scaling * query.shape[-1] ** 0.5) != 1:  # the function scales by its own d^-1/2
        query = query * factor
    if key.shape[1] < query.shape[1]:
        if "enable_gqa" in names:
            options["enable_gqa"] = True
        else:
            share = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    out: Tensor = attend(query, key, value, ends, ends, longest, longest, **options)
    return out


def _attend_buckets(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float
) -> Tensor:
    """Examples of similar length side by side, the shorter ones padded at their end: no query of an example comes after
    its padding, so causal attention needs no mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # takes seconds to import

    rows, _, columns, _ = query.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * T, H, d)
    parts = []
    for bucket in packed.chunks.buckets:
        n, m = bucket.index.shape
        index = bucket.index.flatten()
        q, k, v = (x.index_select(0, index).unflatten(0, (n, m)).transpose(1, 2) for x in flat)
        part = sdpa_attention_forward(module, q, k, v, None, scaling=scaling)[0].flatten(0, 1)  # (n * m, H, d)
        parts.append(part.index_select(0, bucket.keep) if bucket.padded else part)
    return torch.cat(parts).index_select(0, packed.place).unflatten(0, (rows, columns))
