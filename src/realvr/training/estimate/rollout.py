"""Memory of rollouts: what one group of prompts needs, and how many prompts fit together."""

from __future__ import annotations

import math
from dataclasses import replace

from realvr.latent.modes import COLUMNS, TOKENS, bucket, round_up
from realvr.training.estimate.activations import Workload, vision_bytes
from realvr.training.estimate.shape import Decoder

SAMPLED_BYTES = 24
"""Per logit while tokens are chosen: log-probabilities of 32 bits, their running sum in 64, and what comes between."""
ENCODED_TOGETHER = 8192
"""Visual tokens up to which pictures are encoded together in Stage 2; one picture may have more. A GPU is full with
fewer."""


def rollout_bytes(d: Decoder, work: Workload) -> dict[str, int]:
    """What a rollout of ``work.together`` prompts needs beside the weights, by what holds it, at its fullest."""
    features = work.prompts * work.visual * d.width * d.itemsize * (1 + d.deepstack)
    fullest = max(_moments(d, work), key=lambda parts: sum(parts.values()))
    return fullest | {"activations": fullest["activations"] + features} | buffer_bytes(d, work)


def cache_bytes(d: Decoder, work: Workload) -> int:
    """The most that keys and values ever take in it, static buffers included."""
    most = max(parts["keys and values"] for parts in _moments(d, work))
    return most + sum(buffer_bytes(d, work).values())


def _moments(d: Decoder, work: Workload) -> list[dict[str, int]]:
    """When pictures are encoded, in the prompts' pass, and in the last decoding step."""
    prompts, every = work.together or work.prompts, work.prompts
    encoded = min(every * work.visual, max(work.visual, ENCODED_TOGETHER))
    column = 2 * d.key * d.itemsize * d.layers
    before = prompts * work.tokens * column
    sampled = SAMPLED_BYTES * d.vocab * prompts * work.group
    # A pass joins old keys and values with its own, layer by layer; the old ones are there until its end.
    after = 2 * prompts * (work.tokens + work.span + work.group * work.answer) * column
    last = [{"keys and values": after, "activations": sampled}]
    if work.static:
        span = prompts * (work.tokens + work.span) * column
        last = [{"keys and values": before + span, "activations": 0}, {"keys and values": span, "activations": sampled}]
    return [
        {"keys and values": 0, "activations": vision_bytes(d, encoded)},
        {"keys and values": before, "activations": _prompt_bytes(d, work, prompts)},
        *last,
    ]


def buffer_bytes(d: Decoder, work: Workload) -> dict[str, int]:
    """Static buffers of one shape; prompts and completions of other lengths would get more of them."""
    if not work.static:
        return {}
    prompts = work.together or work.prompts
    columns = bucket(work.tokens + work.span, COLUMNS) + work.group * round_up(work.static, TOKENS)
    return {"static buffers": prompts * columns * 2 * d.key * d.itemsize * d.layers}


def _prompt_bytes(d: Decoder, work: Workload, prompts: int) -> int:
    """The prompts' pass without gradient: states, and the widest moment of one layer, which is in its MLP or in its
    attention. Padded rows need a mask, under which keys and values are repeated for each head; so do rows with windows
    (Gemma 3, whose images attend both ways), which have another one for those layers."""
    masked = work.padded or d.windowed > 0
    b, mask = d.itemsize, work.tokens * masked
    mlp = 3 * d.ffn
    if d.experts:  # gathered inputs and outputs of each expert
        mlp = d.experts_per_token * (3 * d.ffn + 2 * d.width)
    attention = 4 * d.query + 2 * d.key + (2 * d.query + mask) * masked
    masks = mask * (2 if d.windowed else 1)
    return prompts * work.tokens * (b * (6 * d.width + max(mlp, attention)) + masks)


def rollout_group(d: Decoder, work: Workload, left: float | None) -> int:
    """Prompts that are rolled out together: as asked for, or as many as ``left`` bytes hold (None: all), but one."""
    if work.together is not None:
        return min(work.together, work.prompts)
    low, high = 1, work.prompts
    while low < high and left is not None:
        middle = math.ceil((low + high) / 2)
        if sum(rollout_bytes(d, replace(work, together=middle)).values()) <= left:
            low = middle
        else:
            high = middle - 1
    return high if left is None else low
