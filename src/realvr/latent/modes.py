"""How steps of decoding are run. No torch."""

from __future__ import annotations

import math
from typing import Literal

FastMode = Literal["off", "static", "graph", "auto"]
"""``off``: tensors grow with every token. ``static``: fixed shapes. ``graph``: the same, as CUDA graphs. ``auto``:
``graph`` on a CUDA device where steps can be recorded, otherwise ``off``."""
COLUMNS, TOKENS = 256, 64
"""What lengths of prompts (`bucket`) and completions (`round_up`) are rounded up to in fixed shapes."""


def is_static(mode: FastMode, device: str, *, sharded: bool = False, lockstep: bool = False) -> bool:
    """Whether steps on a device of this type have fixed shapes. ``sharded``: modules gather weights in hooks, which
    cannot be recorded. ``lockstep``: processes decode in step with each other."""
    if mode == "auto":
        return device == "cuda" and not sharded
    return mode != "off" and not lockstep


def recomputed_layers(share: float, layers: int) -> int:
    """How many layers are recomputed in the backward pass, the first ones, of a share of them: rounded up."""
    return math.ceil(share * layers - 1e-9) or int(share > 0)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def bucket(value: int, multiple: int) -> int:
    """The size of a buffer for ``value`` columns: the next multiple; from 16 of them on the next of eight sizes between
    two powers of 2, so that there are few and none is more than an eighth too large."""
    coarser = max((value // multiple).bit_length() - 4, 0)
    return round_up(value, multiple << coarser)
