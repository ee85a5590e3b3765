"""The vision tower without host loops: batched chunk attention, and the tower's index tensors computed for all images
at once.

Stock Qwen vision attention runs one call per window and per image unless the attention implementation's name contains
"flash", in which case it hands over the chunk boundaries instead. ``VISION_ATTENTION`` is such a name: all chunks of
similar length run in one batched SDPA call. The index tensors (rotary positions, window order, boundaries) are passed
through the documented ``image_*`` keywords of ``get_image_features``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realvr.families import Stock

VISION_ATTENTION = "realvr_flash_chunks"
KEPT_PATCHES = 2**19
"""Patches whose index tensors are kept: about 50 of their bytes each."""


@dataclass
class Bucket:
    """Chunks of similar length: ``index`` (n, m) into the patch sequence, padded by repeating a chunk's first patch;
    ``real`` (n, 1, 1, m) says which are not padding, ``keep`` lists their places in the flattened (n * m,)."""

    index: Tensor
    real: Tensor
    keep: Tensor
    padded: bool

    def to(self, device: torch.device) -> Bucket:
        """The same on a device."""
        index, real, keep = (x.to(device, non_blocking=True) for x in (self.index, self.real, self.keep))
        return Bucket(index, real, keep, self.padded)


@dataclass
class Chunks:
    """How a patch sequence splits into attention chunks."""

    boundaries: Tensor  # (n + 1,) int32, cumulative lengths
    buckets: tuple[Bucket, ...]
    longest: int

    @staticmethod
    def build(lengths: Tensor) -> Chunks:
        """From chunk ``lengths`` (n,) on the CPU. Lengths within a factor of two share a bucket, so padding at most
        doubles the work whatever the mix of image sizes; the loop is over at most a dozen buckets, never over
        chunks."""
        ends = lengths.cumsum(0)
        starts = ends - lengths
        level = torch.ceil(torch.log2(lengths.double())).long()
        buckets = []
        for value in level.unique().tolist():
            members = (level == value).nonzero()[:, 0]
            size = lengths[members]
            column = torch.arange(int(size.max()))
            real = column[None] < size[:, None]
            index = torch.where(real, starts[members, None] + column, starts[members, None])
            keep = real.flatten().nonzero()[:, 0]
            buckets.append(Bucket(index, real[:, None, None], keep, padded=keep.numel() < index.numel()))
        return Chunks(F.pad(ends, (1, 0)).to(torch.int32), tuple(buckets), int(lengths.max()))

    def to(self, device: torch.device) -> Chunks:
        """The same on a device."""
        buckets = tuple(bucket.to(device) for bucket in self.buckets)
        return Chunks(self.boundaries.to(device, non_blocking=True), buckets, self.longest)


def attend_chunks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    realvr_chunks: Sequence[Chunks] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each chunk of (1, H, N, d) query/key/value; returns (1, N, H, d)."""
    if cu_seq_lens_q is None:
        raise RuntimeError(f"'{VISION_ATTENTION}' needs chunk boundaries: use it for Qwen vision towers only")
    chunks = next((known for known in realvr_chunks if known.boundaries is cu_seq_lens_q), None)
    if chunks is None:  # a direct stock call: correct, at the price of one host synchronisation
        chunks = Chunks.build(cu_seq_lens_q.diff().cpu().long()).to(query.device)
    if len(chunks.buckets) == 1 and not chunks.buckets[0].padded:  # as they lie, without a copy
        n, m = chunks.buckets[0].index.shape
        q, k, v = (x[0].unflatten(1, (n, m)).transpose(0, 1) for x in (query, key, value))  # (n, H, m, d)
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    packed = torch.stack([query[0], key[0], value[0]]).transpose(1, 2)  # (3, N, H, d)
    out = torch.empty_like(packed[0])
    for bucket in chunks.buckets:
        q, k, v = packed[:, bucket.index].transpose(2, 3)  # (n, H, m, d)
        mask = bucket.real if bucket.padded else None
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling).transpose(1, 2).flatten(0, 1)
        out = out.index_copy(0, bucket.index.flatten()[bucket.keep], part[bucket.keep])
    return out[None], None


def _within(counts: Tensor) -> Tensor:
    """0 … n-1 inside each of the images, concatenated."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def patch_positions(patch_grids_N2: Tensor, merge: int) -> Tensor:
    """(row, column) of every patch (P, 2) in the tower's order: merge blocks in raster order, raster inside a block."""
    counts = patch_grids_N2.prod(-1)
    blocks_across = (patch_grids_N2[:, 1] // merge).repeat_interleave(counts)
    within = _within(counts)
    block, inner = within // merge**2, within % merge**2
    row = block // blocks_across * merge + inner // merge
    return torch.stack([row, block % blocks_across * merge + inner % merge], dim=-1)


def window_order(token_grids_N2: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Order of merged tokens by window (N,), and the number of merged tokens in each window."""
    counts = token_grids_N2.prod(-1)
    image = torch.arange(len(counts)).repeat_interleave(counts)
    across = token_grids_N2[:, 1].repeat_interleave(counts)
    within = _within(counts)
    row, col = within // across, within % across
    windows_across = -(-token_grids_N2[:, 1] // side)
    windows = windows_across * -(-token_grids_N2[:, 0] // side)
    first = (windows.cumsum(0) - windows)[image]
    window = first + row // side * windows_across[image] + col // side
    order = torch.argsort(window, stable=True)
    return order, torch.bincount(window, minlength=int(windows.sum()))


def tower_inputs(patch_grids_N2: Tensor, config: Stock, device: torch.device) -> dict[str, Any]:
    """Keyword arguments for ``get_image_features`` of a Qwen core: every index tensor its tower would build in a
    loop."""
    merge = config.spatial_merge_size
    grid_thw = F.pad(patch_grids_N2, (1, 0), value=1)
    whole = Chunks.build(patch_grids_N2.prod(-1)).to(device)
    chunks = [whole]
    kwargs: dict[str, Any] = {
        "image_grid_thw": grid_thw,
        "image_position_ids": patch_positions(patch_grids_N2, merge).to(device, non_blocking=True),
        "image_cu_seqlens": whole.boundaries,
        "image_max_seqlen": whole.longest,
    }
    if hasattr(config, "window_size"):
        side = config.window_size // merge // config.patch_size
        order, sizes = window_order(patch_grids_N2 // merge, side)
        windows = Chunks.build(sizes * merge**2).to(device)
        chunks.append(windows)
        kwargs["image_window_index"] = order.to(device, non_blocking=True)
        kwargs["image_cu_window_seqlens"] = windows.boundaries
        kwargs["image_max_window_seqlen"] = windows.longest
    if hasattr(config, "num_position_embeddings"):
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=int(config.num_position_embeddings**0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=merge,
        )
        kwargs["image_interp_indices"] = indices.to(device, non_blocking=True)
        kwargs["image_interp_weights"] = weights.to(device, non_blocking=True)
    kwargs["realvr_chunks"] = tuple(chunks)
    return kwargs


class TowerInputs:
    """`tower_inputs` of one backbone; those of the last few sets of grids are kept, since pictures of one size
    recur."""

    def __init__(self, config: Stock) -> None:
        self._config = config
        self._kept: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    def __call__(self, patch_grids: Sequence[tuple[int, int]], device: torch.device) -> dict[str, Any]:
        """Keyword arguments for images of these (rows, columns) of patches."""
        key = (*patch_grids, device)
        found = self._kept.pop(key, None)
        if found is None:
            with torch.inference_mode(False):  # they may serve a pass with gradients later
                found = tower_inputs(torch.tensor(patch_grids), self._config, device)
        self._kept[key] = found
        while len(self._kept) > 1 and sum(map(_patches, tuple(self._kept))) > KEPT_PATCHES:
            self._kept.popitem(last=False)
        return found


def _patches(key: tuple[Any, ...]) -> int:
    return sum(rows * columns for rows, columns in key[:-1])


def upload(pixels: Sequence[Tensor], dtype: torch.dtype, device: torch.device, pinned: bool) -> Tensor:
    """Pixels of all images, one after the other, on the device and in the model's type.

    ``pinned``: each is converted in main memory and copied from pinned memory, so that half the bytes travel and the
    host does not wait for them. Without it they are converted on the device.
    """
    if not pinned:
        return torch.cat(list(pixels)).to(device, dtype, non_blocking=True)
    parts = [staged(each, dtype).to(device, non_blocking=True) for each in pixels]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def staged(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels in main memory as `upload` wants them: in the model's type, in pinned memory."""
    ready = pixels.to(dtype)
    return ready if ready.is_pinned() else ready.pin_memory()


def register() -> None:
    """Make ``VISION_ATTENTION`` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(VISION_ATTENTION, attend_chunks)
    AttentionMaskInterface.register(VISION_ATTENTION, sdpa_mask)
