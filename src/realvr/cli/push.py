"""``realvr push``: a model on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from realvr.cli.arguments import NONE
from realvr.training.push import PushSettings
from realvr.training.push import push as push_model


@dataclass(frozen=True)
class PushCommand(PushSettings):
    """Options of ``realvr push``."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OWNER/NAME")]
    also: Annotated[Sequence[Path], tyro.conf.arg(help_behavior_hint=NONE)] = ()


def push(settings: PushCommand) -> int:
    """Upload a model with its card to the Hugging Face hub, in one commit.

    A run stands for its final model. Incomplete folders and pickles are refused. The card names the repository in its
    examples, and links to the card of its latents where `realvr diagnose --card` has left one. Afterwards OWNER/NAME is
    a MODEL for every verb, and for stock transformers.

    Examples:
      realvr push runs/own/rl owner/my-model --private
      realvr push runs/own/rl/best owner/my-model --revision best
      realvr push runs/own/rl owner/my-model --also runs/report --dry-run
      realvr diagnose runs/own/rl/final --data DATA --out runs/own/rl/diagnose --card
      realvr push runs/own/rl owner/my-model
    """
    done = push_model(settings)
    for name, size in sorted(done.files.items()):
        print(f"{size:>15,}  {name}")
    print(done.url or f"dry run: {len(done.files)} files would be uploaded to {settings.repo}")
    return 0
