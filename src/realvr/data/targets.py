"""From evidence boxes to visual tokens, slot by slot: what the latents of a span are trained to be. numpy only.

Training chooses among these (`realvr.training.targets`); diagnostics compare latents with them. ``starts`` are the
numbers of visual tokens before each image of the prompt, and of all. A target below the number of visual tokens is that
token of the prompt; those from there on are ``pools``, each the mean of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from realvr.data.boxes import center_token, target_tokens
from realvr.data.sample import Box
from realvr.imaging.types import Grid

Tokens = NDArray[np.int64]


def as_evidence(boxes: list[Box], given: bool, grids: Sequence[Grid], starts: Sequence[int]) -> Tokens:
    """Every visual token of the evidence, once; box by box where the order is the ``given`` one."""
    if given:
        found = [target_tokens([box.xyxy], grids[box.image]) + starts[box.image] for box in boxes]
    else:
        own = [[box.xyxy for box in boxes if box.image == place] for place in range(len(grids))]
        found = [target_tokens(each, grids[place]) + starts[place] for place, each in enumerate(own) if each]
    tokens = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    _, first = np.unique(tokens, return_index=True)
    return tokens[np.sort(first)]


def fixed(
    boxes: list[Box],
    given: bool,
    grids: Sequence[Grid],
    starts: Sequence[int],
    latents: int,
    pools: list[Tokens],
    *,
    target: Literal["center", "mean"] = "center",
    whole_image: bool = False,
) -> Tokens:
    """K targets, one for each box and the last repeated; adds to ``pools``. Without boxes none, or K times the mean of
    the ``whole_image``."""
    visual = starts[-1]

    def pooled(tokens: Tokens) -> int:
        if len(tokens) == 1:
            return int(tokens[0])
        pools.append(tokens)
        return visual + len(pools) - 1

    def center(box: Box) -> int:
        return starts[box.image] + (center_token(box.xyxy, grids[box.image]) or 0)

    if not boxes:
        whole = whole_image and latents and grids
        targets = [pooled(np.arange(starts[len(grids)], dtype=np.int64))] * latents if whole else []
        return np.array(targets, dtype=np.int64)
    order = _thinned(boxes if given else sorted(boxes, key=center), latents)
    if target == "center":
        targets = [center(box) for box in order]
    else:
        targets = [pooled(target_tokens([box.xyxy], grids[box.image]) + starts[box.image]) for box in order]
    return np.array([*targets, *[targets[-1]] * (latents - len(targets))], dtype=np.int64)


def _thinned(boxes: list[Box], most: int) -> list[Box]:
    """At most ``most`` boxes at even distances, the first and the last among them (of one: the last)."""
    if len(boxes) <= most:
        return boxes
    if most == 1:
        return boxes[-1:]
    last, gaps = len(boxes) - 1, most - 1
    return [boxes[(2 * number * last + gaps) // (2 * gaps)] for number in range(most)]
