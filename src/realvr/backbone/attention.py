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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from realvr.backbone.attention_rows import probed, weights_of
from realvr.backbone.packed_attention import Packed, attend_packed
from realvr.backbone.span_attention import Run, Trunk, attend_span, behind_trunk
from realvr.backbone.split_attention import Split, attend_split, usable, weights_on
from realvr.backbone.static import StaticPass

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

    ``pool``, two matrices (B, Q, R) and (B, C, P), keeps ``left @ rows @ right`` (B, Q, P) of each layer instead of the
    rows: sums over bins of queries and keys. The rows are then made a few queries at a time, so that all queries of a
    long prompt can be asked for without a matrix of all pairs.
    """

    rows: Tensor | None = None
    columns: slice | Tensor | None = None
    heads: bool = False
    gradient: bool = False
    pool: tuple[Tensor, Tensor] | None = None
    layers: dict[int, Tensor] = field(default_factory=dict)

    def on_trunk(self, length: int) -> bool:
        """Whether all rows are asked for, without gradient, on a run of the first ``length`` columns."""
        columns, plain = self.columns, self.rows is None and self.pool is None and not self.gradient
        return plain and isinstance(columns, slice) and columns.indices(length) == (columns.start, columns.stop, 1)

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
    that one can differentiate through it (saliency).

    With ``watch`` no matrix is kept: ``watch(layer, weights)`` enters the graph in place of the weights and returns
    what the layer goes on with. Where layers are checkpointed it is called again for every layer that is recomputed, so
    that one layer's matrix is alive at a time.
    """

    layers: dict[int, Tensor] = field(default_factory=dict)
    watch: Callable[[int, Tensor], Tensor] | None = None


class Pass:
    """One pass of the decoder: what came before it, who sees whom, and what to record.

    No dataclass: FSDP2 looks into those that a layer is called with, and hands the layer a copy. ``device`` is where
    the batch is. Layers may be elsewhere; what probes record of them comes there. ``packed`` says where the examples
    of packed rows lie: attention then runs inside each instead of through a mask, unless something else is asked for (a
    past, probes, images that attend both ways or are hidden, a sliding window shorter than an example). ``split`` says
    that the new columns are branches behind a trunk: attention then runs over the trunk and inside each branch, unless
    something else is asked for (a matrix, probes of more than some columns of the trunk or with gradient, hidden
    images, a sliding window shorter than trunk and branch). ``trunk`` says that they are a step of a span behind one
    piece of keys and values: attention then runs over that piece as it lies and over the span's own columns, unless
    something else is asked for (a matrix, probes, hidden images). ``join``: see `remember`.
    """

    def __init__(
        self,
        past: list[Segments],
        columns: Columns,
        probes: tuple[Probe, ...] = (),
        matrix: Matrix | None = None,
        device: torch.device | None = None,
        packed: Packed | None = None,
        join: bool = False,
        split: Split | None = None,
        trunk: Trunk | None = None,
    ) -> None:
        self.past, self.columns, self.probes, self.matrix, self.device = past, columns, probes, matrix, device
        plain = columns.image_visibility is None and matrix is None
        self._packed = packed if plain and columns.block is None and not (past or probes) else None
        self._packed_on: dict[torch.device, Packed] = {}
        self._split = usable(split, plain, probes)
        self._split_on: dict[torch.device, Split] = {}
        self._trunk = behind_trunk(trunk, plain and not probes)
        self._runs: dict[tuple[int | None, torch.device], tuple[Run, ...]] = {}
        self.new: dict[int, Segments] = {}
        self._open = True
        self._merged = self._split is None and (join or not torch.is_grad_enabled())
        self._masks: dict[tuple[int | None, torch.device], Tensor | None] = {}

    def close(self) -> list[Segments]:
        """Keys and values of all layers with this pass's own appended.

        Later calls come from the recomputation of a checkpointed layer during backward; they must not overwrite what
        the state already holds. A checkpointed layer also keeps this object alive, so it must let go of every tensor
        of its own graph: a circle through the graph is invisible to Python's collector and would never be freed.
        """
        self._open = False
        new, self.new = self.new, {}
        self.probes = tuple(replace(probe, layers={}) for probe in self.probes)
        self.matrix = None if self.matrix is None else Matrix(watch=self.matrix.watch)
        if self.past and len(self.past) != len(new):
            raise RuntimeError(f"{len(new)} of {len(self.past)} layers went through '{TEXT_ATTENTION}'")
        return [new[layer] for layer in sorted(new)]

    def remember(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this pass's keys and values; return them behind the earlier ones.

        Without gradients the joined tensors replace the pieces, so that a long decode does not join ever more of them.
        With gradients the pieces stay apart: the joined copy belongs to this pass alone and a checkpointed layer
        frees it. A chain of short passes whose joined copies are kept anyway asks for these too (``join``): each
        gradient then goes back through two pieces, not through as many as there were passes.
        """
        pieces = (*(self.past[layer] if self.past else ()), (key, value))
        whole = joined(pieces)
        if self._open:
            self.new[layer] = (whole,) if self._merged else pieces
        return whole

    def beside(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this pass's keys and values; return the earlier ones by themselves."""
        if self._open:
            self.new[layer] = (*self.past[layer], (key, value))
        return joined(self.past[layer])

    def behind(self, layer: int, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Keep this pass's keys and values; return those of the trunk as they lie, and these behind the span's."""
        trunk, *earlier = self.past[layer]
        own = joined((*earlier, (key, value)))
        if self._open:
            self.new[layer] = (trunk, own) if self._merged else (trunk, *earlier, (key, value))
        return trunk, own

    def mask(self, queries: int, window: int | None, device: torch.device) -> Tensor | None:
        """The mask of layers with this sliding window on this device, built once a pass."""
        if (window, device) not in self._masks:
            home = self.device or device
            built = self.columns.visible(queries, window, home) if home == device else self.mask(queries, window, home)
            self._masks[window, device] = None if built is None else built.to(device)
        return self._masks[window, device]

    def packed(self, window: int | None, device: torch.device) -> Packed | None:
        """Where packed examples lie, if layers with this sliding window may attend inside each by itself; None where
        only the mask will do."""
        if self._packed is None or (window is not None and window < self._packed.longest):
            return None
        if device not in self._packed_on:
            self._packed_on[device] = self._packed.to(device)
        return self._packed_on[device]

    def split(self, window: int | None, query: Tensor) -> Split | None:
        """Where branches lie, if layers with this window may attend to trunk and branch one by one; else None."""
        if self._split is None or not self._split.takes(query, window):
            return None
        if query.device not in self._split_on:
            self._split_on[query.device] = self._split.to(query.device)
        return self._split_on[query.device]

    def runs(self, window: int | None, query: Tensor) -> tuple[Run, ...] | None:
        """What each query of a latent step sees of the trunk, if layers with this window may attend to trunk and span
        one by one; else None."""
        place = self.columns.window_position
        window = window if window is not None and window < self.columns.length else None
        if self._trunk is None or (window is not None and place is None) or not self._trunk.takes(query, window):
            return None
        if (window, query.device) not in self._runs:
            folds = query.shape[1] // self.past[0][0][0].shape[1]
            self._runs[window, query.device] = self._trunk.runs(query.shape[2], folds, window, place, query.device)
        return self._runs[window, query.device]

    def record(self, layer: int, store: dict[int, Tensor], value: Tensor) -> None:
        """Keep a tensor of a layer; a checkpointed layer that runs again keeps nothing twice."""
        if self._open:
            store[layer] = value


def joined(pieces: Segments) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer in one piece."""
    if len(pieces) == 1:
        return pieces[0]
    keys, values = zip(*pieces, strict=True)
    if not torch.is_grad_enabled():
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)
    return _Joined.apply(*keys), _Joined.apply(*values)


class _JoinedNode(FunctionCtx):
    lengths: list[int]


class _Joined(torch.autograd.Function):
    """`torch.cat` over columns. Its gradients are views of one tensor: that of a few columns, which may wait until all
    other layers have gone backward, would keep a gradient of the whole prompt alive in every layer. Here only the
    longest piece gets a view."""

    @staticmethod
    def forward(ctx: _JoinedNode, *pieces: Tensor) -> Tensor:
        ctx.lengths = [piece.shape[2] for piece in pieces]
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx: _JoinedNode, grad: Tensor) -> tuple[Tensor, ...]:
        return taken_apart(grad, ctx.lengths)


def taken_apart(grad: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Runs of columns, the longest as a view, the others in tensors of their own."""
    longest = max(lengths)
    parts = grad[:, :, : sum(lengths)].split(list(lengths), dim=2)
    return tuple(x if x.shape[2] == longest else x.clone() for x in parts)


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


def _attend_branches(
    layer: int, query: Tensor, key: Tensor, value: Tensor, split: Split, scaling: float, realvr: Pass
) -> Tensor:
    """Attention to the trunk and inside each branch, (B, Tq, H, d); probes read it from the scores' log-sum-exp."""
    trunk = realvr.beside(layer, key, value)
    out, lse = attend_split(query, trunk, (key, value), split, scaling)
    for probe in realvr.probes:
        rows = weights_on(query, trunk[0], lse, probe.columns, split, scaling)
        rows = rows if probe.heads else rows.mean(1)
        realvr.record(layer, probe.layers, rows.to(realvr.device or query.device))
    return out


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    realvr: Pass | StaticPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function; returns the output as (B, Tq, H, d)."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward  # takes seconds to import

    if realvr is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(realvr, StaticPass):
        return realvr.attend(layer, query, key, value, scale, sliding_window), None
    if (split := realvr.split(sliding_window, query)) is not None and not dropout:
        return _attend_branches(layer, query, key, value, split, scale, realvr), None
    if (runs := realvr.runs(sliding_window, query)) is not None and not dropout:
        return attend_span(query, *realvr.behind(layer, key, value), runs, scale), None
    key, value = realvr.remember(layer, key, value)
    queries = query.shape[2]
    if (packed := realvr.packed(sliding_window, query.device)) is not None and not dropout:
        return attend_packed(module, query, key, value, packed, scale), None
    mask = realvr.mask(queries, sliding_window, query.device)
    home = realvr.device or query.device
    for probe in realvr.probes:
        realvr.record(layer, probe.layers, probed(probe, query, key, mask, scale).to(home))
    if realvr.matrix is not None:
        weights = weights_of(query, key, mask, scale, causal=queries > 1).to(query.dtype)
        if realvr.matrix.watch is not None:
            weights = realvr.matrix.watch(layer, weights)
        else:
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
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(TEXT_ATTENTION, attend)
    AttentionMaskInterface.register(TEXT_ATTENTION, sdpa_mask)
