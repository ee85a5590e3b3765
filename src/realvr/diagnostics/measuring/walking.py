"""One span against the visual tokens before it and the boxes of its sample: the record of diagnostic ``walk``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realvr.data.boxes import canvas_size, token_mask
from realvr.data.sample import Box, Sample
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.latent.walk import walk
from realvr.maths.evidence import similarity


def box_masks(sample: Sample, grids: Sequence[Grid]) -> list[NDArray[np.bool_]]:
    """Visual tokens (N,) of each box with area, or of all boxes together where their order means nothing.

    A picture that is shown several times counts wherever it is shown: it is the same place.
    """

    def tokens(boxes: Sequence[Box]) -> NDArray[np.bool_]:
        shown = zip(sample.shown, grids, strict=True)
        return np.concatenate([token_mask([b.xyxy for b in boxes if b.image == i], grid) > 0 for i, grid in shown])

    parts = [[box] for box in sample.boxes] if sample.ordered else [sample.boxes]
    return [mask for mask in map(tokens, parts) if mask.any()]


def walk_record(sample: Sample, latents_KD: Tensor, features_ND: Tensor, grids: Sequence[Grid]) -> dict[str, Any]:
    """Where each latent is, whether that is in its box and in any, and its cosines; lists have one entry a latent."""
    masks = box_masks(sample, grids)
    if not masks:
        raise UserError(f"{sample.source or sample.id}: no box covers any of its pictures")
    found = walk(latents_KD, features_ND, grids)
    own = [masks[min(t, len(masks) - 1)] for t in range(len(found))]
    every = np.any(masks, axis=0)
    places = sum(int(np.prod(canvas_size(grid))) for grid in grids)  # thumbnails are no place
    targets_KD = torch.stack([features_ND[torch.from_numpy(mask)].float().mean(0) for mask in own])
    cosine = similarity(latents_KD[:, None], targets_KD)[:, 0]
    return {
        "boxes": len(masks),
        "nearest": [[place.image, place.row, place.col] for place in found.places()],
        "inside": [bool(mask[token]) for mask, token in zip(own, found.nearest, strict=True)],
        "evidence": [bool(every[token]) for token in found.nearest],
        "chance": [float(mask.sum()) / places for mask in own],
        "chance_evidence": float(every.sum()) / places,
        "cosine": [round(value, 6) for value in cosine.tolist()],
        "nearest_cosine": [round(value, 6) for value in found.cosine.tolist()],
        "thumbnail": [bool(value) for value in found.thumbnail],
    }
