"""Visual tokens of the training pictures, computed once: in Stage 1 the vision tower is frozen, and every epoch would
compute the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.imaging.types import ImageInput

CHUNK = 256
"""Pictures encoded at a time. Fixed, so that a run that continues computes the very same numbers."""


class KeptFeatures:
    """Looks visual tokens up instead of computing them. `fill` it once, in an order that does not change."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._start: dict[str, int] = {}
        self._kept: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._start)

    def fill(self, images: Iterable[ImageInput]) -> None:
        """Encode every picture once and keep the result on the device."""
        unique = list({image.key: image for image in images}.values())
        parts, start = [], 0
        for first in range(0, len(unique), CHUNK):
            visual = self.backbone.encode_images(unique[first : first + CHUNK])
            parts.append((visual.features_ND, *visual.deepstack))
        for image in unique:
            self._start[image.key] = start
            start += image.tokens
        self._kept = tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def __call__(self, images: tuple[ImageInput, ...]) -> VisualTokens:
        """The visual tokens of ``images``, in order, as `Backbone.encode_images` gives them."""
        if not images:
            return self.backbone.encode_images(images)
        counts = torch.tensor([image.tokens for image in images])
        starts = torch.tensor([self._start[image.key] for image in images])
        before = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum())) + (starts - before).repeat_interleave(counts)
        index = index.to(self.backbone.device, non_blocking=True)
        features, *deepstack = (kept[index] for kept in self._kept)
        return VisualTokens(features, tuple(deepstack), tuple(image.grid for image in images))
