"""``realvr new``: a small random checkpoint of any family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from realvr.families import FAMILIES
from realvr.zoo.new import NewSettings
from realvr.zoo.new import new as make


@dataclass(frozen=True)
class NewCommand(NewSettings):
    """Options of ``realvr new``."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]


def new(settings: NewCommand) -> int:
    """Make a random model of a stock transformers class, with tokenizer and image processor, in a plain HF directory.

    Its answers are noise; everything else (training, evaluation, diagnostics) runs on it as on a real checkpoint.

    Examples:
      realvr new --family qwen2.5-vl --size tiny runs/tiny-qwen
      realvr new --family gemma3 runs/tiny-gemma --seed 1
    """
    directory = make(settings)
    size = sum(file.stat().st_size for file in directory.iterdir())
    family = FAMILIES[settings.family].name
    print(f"{directory}: a {settings.size} {family} with random weights ({size / 1e6:.1f} MB)")
    print(f'try: realvr ask {directory} IMAGE "QUESTION" --latents 4')
    return 0
