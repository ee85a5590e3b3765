"""``realvr data import``: boxes of labelling tools, with questions, as our JSON lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from realvr.data import importing

WRITTEN, NOTHING_WRITTEN = 0, 1


@dataclass(frozen=True)
class ImportCommand(importing.ImportSettings):
    """Options of ``realvr data import``."""

    layout: Annotated[tyro.conf.Positional[Literal["coco", "voc"]], tyro.conf.arg(help_behavior_hint="(required)")]
    files: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="FILE", help_behavior_hint="(required)")]


def import_boxes(settings: ImportCommand) -> int:
    """Make training data from boxes that a labelling tool has written.

    Without --questions every picture gets questions from templates, whose answers follow from its boxes: whether it
    shows any object of a category (as often no as yes), how many there are, and in which quarter of it a single one is.
    Such rows are tagged "question": "template". With --questions FILE the rows of that file are joined to the pictures;
    their evidence is every box of the category they name.

    Exit code: 0 written, 1 nothing to write, 2 bad input.

    Examples:
      realvr data import coco instances_val2017.json --images val2017/ --out coco/val.jsonl --link
      realvr data import voc Annotations/ --images JPEGImages/ --out mine/train.jsonl
      realvr data import voc Annotations/ --questions questions.csv --out mine/train.jsonl
    """
    done = importing.import_boxes(settings)
    counts, losses = done.counts, done.losses
    left = f": {settings.out} is left as it is" if settings.out.exists() else ""
    text = f"wrote {done.rows:,} rows to {settings.out}" if done.rows else f"no row to write{left}"
    made = ", ".join(f"{count:,} {name}" for name, count in counts.items() if name.startswith("of "))
    console = Console(highlight=False, soft_wrap=True)
    categories = f"{len(done.categories):,} categories"
    console.print(f"{counts['pictures']:,} pictures with {counts['boxes']:,} boxes of {categories}")
    console.print(escape(text + (f" ({made})" if made else "")))
    for reason, count in losses.counts.most_common():
        console.print(f"left out {count:,} [bold]{reason}[/]: first: {escape(losses.first[reason])}")
    return WRITTEN if done.rows else NOTHING_WRITTEN
