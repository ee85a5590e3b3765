"""``realvr world make | show``: splits of the embedded world on disk, or on a contact sheet."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from realvr.runs.launching import INTERRUPTED
from realvr.world import making

Kinds = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: the usual ones)")]


@dataclass(frozen=True)
class MakeCommand(making.MakeSettings):
    """Options of ``realvr world make``."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="(required)")]
    kinds: Kinds = ()


def make(settings: MakeCommand) -> int:
    """Write splits of the embedded world under OUT, each in a folder of its own, in the layout of the real data.

    Same seed, same bytes.

    Examples:
      realvr world make runs/world
      realvr world make runs/world --split train-boxes mmvp --seed 1
    """
    table = Table("split", "rows", "files")
    try:
        splits = making.make(settings)
    except KeyboardInterrupt:
        print(
            f"realvr: interrupted; run the same command to finish it; for other settings name another folder than "
            f"{settings.out}",
            file=sys.stderr,
        )
        return INTERRUPTED
    for made in splits:
        table.add_row(
            made.split, f"{made.rows:,}", ", ".join(str(file.relative_to(settings.out)) for file in made.files)
        )
    Console(stderr=True).print(table)
    return 0


@dataclass(frozen=True)
class ShowCommand(making.ShowSettings):
    """Options of ``realvr world show``."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURE", help_behavior_hint="(required)")]
    kinds: Kinds = ()


def show(settings: ShowCommand) -> int:
    """Draw a contact sheet: the first examples of a split with their questions, options, answers and evidence boxes.

    Examples:
      realvr world show sheet.png
      realvr world show sheet.png --split blink --limit 20
    """
    drawn = making.show(settings)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"{drawn} examples of {settings.split} in {settings.out}", highlight=False)
    return 0
