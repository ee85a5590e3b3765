"""``realvr new``: a small random checkpoint of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from realvr.families import FAMILIES


def new(
    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")],
    family: str,
    size: str = "tiny",
    seed: int = 0,
) -> int:
    """Make a random model of a stock transformers class, with tokenizer and image processor, in a plain HF directory.

    Its answers are noise; everything else (training, evaluation, diagnostics) runs on it as on a real checkpoint.

    Examples:
      realvr new --family qwen2.5-vl --size tiny runs/tiny-qwen
      realvr new --family gemma3 runs/tiny-gemma --seed 1

    Args:
        directory: Where to write it; must not exist or be empty.
        family: One of qwen2.5-vl, qwen3-vl, qwen3-vl-moe, internvl3, gemma3.
        size: Size of the model.
        seed: Seed of the random weights; the same seed gives the same bytes.
    """
    from realvr.runs.quiet import quiet_transformers
    from realvr.zoo.tiny import build

    quiet_transformers()
    build(family, size, directory, seed)
    size_bytes = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: a {size} {FAMILIES[family].name} with random weights ({size_bytes / 1e6:.1f} MB)")
    print(f'try: realvr ask {directory} IMAGE "QUESTION" --latents 4')
    return 0
