"""A small random checkpoint of any family (``realvr new``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NewSettings:
    """What to make, and where.

    Args:
        directory: Where to write it; must not exist or be empty.
        family: One of qwen2.5-vl, qwen3-vl, qwen3-vl-moe, internvl3, gemma3.
        size: Size of the model.
        seed: Seed of the random weights; the same seed gives the same bytes.
    """

    directory: Path
    family: str
    size: str = "tiny"
    seed: int = 0


def new(settings: NewSettings) -> Path:
    """Write the checkpoint; returns its folder."""
    from realvr.runs.quiet import quiet_transformers
    from realvr.zoo.tiny import build

    quiet_transformers()
    return build(settings.family, settings.size, Path(settings.directory), settings.seed)
