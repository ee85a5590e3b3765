"""Decoder attention through one registered function: our keys and values, our masks, attention rows on request.

Stock layers call the function that is registered under ``TEXT_ATTENTION``. When a :class:`Pass` travels with the call
(a plain keyword argument of ``language_model``), the function

* prepends the keys and values of earlier passes, which the decoding state keeps itself. No ``past_key_values`` object
  is involved, so nothing is dropped silently when HF gradient checkpointing is on: a recomputed layer sees the same
  tensors;
* builds the mask from the facts of each column: is it real (padding), which segment it belongs to (packed examples,
  branches of one prompt), which image block (Gemma 3 attends both ways inside an image), where it is in a
  sliding window;
* hands out attention rows, or the whole matrix inside the graph, without ``output_attentions``.

Without a :class:`Pass` it is stock SDPA, so the same model object still works with stock ``forward`` and ``generate``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TEXT_ATTENTION = "realvr_text"

# Below this many query rows a masked pass folds the query heads of a K/V head into rows instead of repeating K and V.
_FOLD_ROWS = 32

Segments = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of one layer, in pieces along time: each (B, H_kv, t_i, d)."""


@dataclass
class Columns:
    """What the mask needs to know of every column of a batch, (B, T) each; None where it does not apply.

    ``real`` is False for padding. ``segment`` isolates packed examples and branches: a key of segment -1 (the trunk) is
    visible to all, any other key only to queries of the same segment. ``block`` numbers the image a column belongs to
    (-1: none); only families whose image tokens attend to each other in both directions set it. ``window_position`` is
    the column's index in its own sequence, on which a sliding window is measured; only families with sliding windows
    set it (branches of one prompt stand side by side, so the distance between columns is not that between tokens).
    ``image_visibility`` hides visual tokens from some queries (an option of Stage 1): a key of value 1 is invisible to
    queries of value 2.
    """

    length: int
    real: Tensor | None = None
    segment: Tensor | None = None
    block: Tensor | None = None
    window_position: Tensor | None = None
    image_visibility: Tensor | None = None

    def facts(self) -> tuple[Tensor | None, ...]:
        """Everything but the length, in one order: to compare or join two of them."""
        return self.real, self.segment, self.block, self.window_position, self.image_visibility

    def visible(self, queries: int, window: int | None, device: torch.device) -> Tensor | None:
        """Boolean mask (B or 1, 1, queries, length) for the last ``queries`` columns, or None where plain causal
        (queries == length) or unmasked (queries == 1) attention is the same thing."""
        window = window if window is not None and window < self.length else None
        plain = self.real is None and self.segment is None and self.image_visibility is None and window is None
        if plain and (queries == 1 or (queries == self.length and self.block is None)):
            return None
        key = torch.arange(self.length, device=device)
        query = key[self.length - queries :, None]
        mask = (key <= query)[None]
        if self.block is not None:
            q_block = self.block[:, -queries:, None]
            mask = mask | ((q_block == self.block[:, None]) & (q_block >= 0))
        if window is not None:
            window_position = key[None] if self.window_position is None else self.window_position
            mask = mask & (window_position[:, None] > window_position[:, -queries:, None] - window)
        if self.segment is not None:
            k_segment = self.segment[:, None]
            mask = mask & ((k_segment == -1) | (k_segment == self.segment[:, -queries:, None]))
        if self.image_visibility is not None:
            mask = mask & ~((self.image_visibility[:, -queries:, None] == 2) & (self.image_visibility[:, None] == 1))
        if self.real is not None:
            # A padding query sees at least itself: no row of the softmax is empty, so no NaN can leak.
            mask = (mask & self.real[:, None]) | (key == query)
        return mask[:, None]


@dataclass
class Probe:
    """Asks a pass for post-softmax attention of some of its queries.

    ``rows`` (B, R) indexes this pass's queries; None means all. ``columns`` selects keys by absolute column: a slice,
    or a (B, C) index; None means all. ``layers[l]`` is then (B, R, C), the mean over heads, or (B, H, R, C) with
    ``heads``. Rows are detached unless ``gradient`` is set. They are float32 also for a half-precision model: a readout
    takes means and small differences of them.
    """

    rows: Tensor | None = None
    columns: slice | Tensor | None = None
    heads: bool = False
    gradient: bool = False
    layers: dict[int, Tensor] = field(default_factory=dict)

    def stack(self) -> Tensor:
        """All layers, (L, B, R, C) or (L, B, H, R, C)."""
        return torch.stack([self.layers[index] for index in sorted(self.layers)])

    def mean(self) -> Tensor:
        """Mean over layers and heads, (B, R, C)."""
        rows = self.stack()
        return rows.mean((0, 2)) if self.heads else rows.mean(0)


@dataclass
class Matrix:
    """Asks a pass to compute attention eagerly and to keep every layer's matrix (B, H, Tq, Tk) inside the graph, so
    that one can differentiate through it (saliency)."""

    layers: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Pass:
    """One pass of the decoder: what came before it, who sees whom, and what to record."""

    past: list[Segments]
    columns: Columns
    probes: tuple[Probe, ...] = ()
    matrix: Matrix | None = None
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _open: bool = True
    _merged: bool = field(default_factory=lambda: not torch.is_grad_enabled())
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def close(self) -> list[Segments]:
        """Keys and values of all layers with this pass's own appended.

        Later calls come from the recomputation of a checkpointed layer during backward; they must not overwrite what
        the state already holds. A checkpointed layer also keeps this object alive, so it must let go of every tensor
        of its own graph: a circle through the graph is invisible to Python's collector and would never be freed.
        """
        self._open = False
        new, self.new = self.new, {}
        self.probes = tuple(replace(probe, layers={}) for probe in self.probes)
        self.matrix = None if self.matrix is None else Matrix()
        past = self.past or [()] * len(new)
        if len(past) != len(new):
            raise RuntimeError(f"{len(new)} of {len(past)} layers went through '{TEXT_ATTENTION}'")
        if self._merged:
            return [(new[layer],) for layer in sorted(new)]
        return [(*past[layer], new[layer]) for layer in sorted(new)]

    def remember(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this pass's keys and values; return them behind the earlier ones.

        Without gradients the joined tensors replace the pieces, so that a long decode does not join ever more of them.
        With gradients the pieces stay apart: the joined copy belongs to this pass alone and a checkpointed layer
        frees it.
        """
        own = (key, value)
        pieces = self.past[layer] if self.past else ()
        if pieces:
            keys, values = zip(*pieces, own, strict=True)
            key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        if self._open:
            self.new[layer] = (key, value) if self._merged else own
        return key, value

    def mask(self, queries: int, window: int | None, device: torch.device) -> Tensor | None:
        """The mask of layers with this sliding window, built once a pass."""
        if window not in self._masks:
            self._masks[window] = self.columns.visible(queries, window, device)
        return self._masks[window]

    def record(self, layer: int, store: dict[int, Tensor], value: Tensor) -> None:
        """Keep a tensor of a layer; a checkpointed layer that runs again keeps nothing twice."""
        if self._open:
            store[layer] = value


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, causal: bool) -> Tensor:
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


def _rows(probe: Probe, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    queries = query.shape[2]
    with torch.set_grad_enabled(probe.gradient and torch.is_grad_enabled()):
        if probe.rows is not None:
            if mask is None and queries > 1:
                index = torch.arange(key.shape[2], device=key.device)
                mask = (index <= index[key.shape[2] - queries :, None])[None, None]
            pick = probe.rows.to(query.device)[:, None, :, None]
            query = query.gather(2, pick.expand(-1, query.shape[1], -1, query.shape[3]))
            if mask is not None:
                mask = mask.expand(query.shape[0], -1, -1, -1).gather(2, pick.expand(-1, 1, -1, mask.shape[3]))
        weights = _weights(query, key, mask, scaling, causal=probe.rows is None and queries > 1)
        if not probe.heads:
            weights = weights.mean(1)
        if isinstance(probe.columns, slice):
            weights = weights[..., probe.columns]
        elif probe.columns is not None:
            pick = probe.columns.to(weights.device)[:, None]
            pick = pick if not probe.heads else pick[:, None]
            weights = weights.gather(-1, pick.expand(*weights.shape[:-1], -1))
        return weights if probe.gradient else weights.detach()


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Masked SDPA for few query rows: the query heads that share a K/V head become rows of one head, so K and V are
    read once instead of being repeated in memory."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    folded = query.reshape(batch, kv_heads, group * rows, width)
    mask = mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(mask.shape[0], 1, group * rows, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    realvr: Pass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function; returns the output as (B, Tq, H, d)."""
    if realvr is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    key, value = realvr.remember(layer, key, value)
    queries = query.shape[2]
    mask = realvr.mask(queries, sliding_window, query.device)
    for probe in realvr.probes:
        realvr.record(layer, probe.layers, _rows(probe, query, key, mask, scale))
    if realvr.matrix is not None:
        weights = _weights(query, key, mask, scale, causal=queries > 1).to(query.dtype)
        realvr.record(layer, realvr.matrix.layers, weights)
        out = weights @ repeat_kv(value, query.shape[1] // value.shape[1])
        return out.transpose(1, 2).contiguous(), None
    if mask is not None and key.shape[1] < query.shape[1] and queries <= _FOLD_ROWS:
        return _folded(query, key, value, mask, scale), None
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scale)


def register() -> None:
    """Make ``TEXT_ATTENTION`` known to transformers. Registering the mask function too matters: without it stock
    forwards would silently run unmasked.

    cuDNN's attention, which torch may prefer in 16 bits, plans again for every shape, and our shapes change with every
    batch: it is switched off for the process.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(TEXT_ATTENTION, attend)
    AttentionMaskInterface.register(TEXT_ATTENTION, sdpa_mask)
