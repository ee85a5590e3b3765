"""``realvr data check | show | export``: what data files hold, and the same in another layout."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realvr.cli.arguments import Columns
from realvr.data import checking, conversion, reasons, showing
from realvr.data.readers.jsonl import to_json
from realvr.errors import UserError

USABLE, TOO_FEW_USABLE, UNREADABLE = 0, 1, 2
Input = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")]

SHOWN_COUNTS = 12
"""Numbers of boxes that ``data check`` lists one by one."""


def _fail(errors: Iterable[object]) -> None:
    """As the other verbs do, for one input of several."""
    for error in errors:
        print(f"realvr: error: {error}", file=sys.stderr)


@dataclass(frozen=True)
class CheckCommand(checking.CheckSettings):
    """Options of ``realvr data check``.

    Args:
        json: Print one JSON object.
    """

    paths: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")]
    columns: Columns = ()
    json: bool = False


def check(settings: CheckCommand) -> int:
    """Read every row, open every image, and say what is usable.

    Exit code: 0 usable, 1 an input loses more than --max-dropped of its rows (or all, or a listed file), 2 one could
    not be read (or --policy strict met a bad row). Other inputs are still read after one that could not be.

    Examples:
      realvr data check hr_bench_4k.tsv MMVP/ --quarantine bad.jsonl
      realvr data check train.json --images /data/images --json
      realvr data check hf:owner/name#train --columns question=problem answer=solution
    """
    done = checking.check(settings)
    if settings.json:
        print(json_module.dumps(done.result, ensure_ascii=False))
    else:
        _print_check(done.result)
    _fail(done.unreadable or done.lost)
    return UNREADABLE if done.unreadable else TOO_FEW_USABLE if done.lost else USABLE


def _print_check(result: dict[str, Any]) -> None:
    """Tables of what was read; an input of which nothing could be read has only its error."""
    read = [entry for entry in result["files"] if "error" not in entry or entry["rows"]]
    if not read:
        return
    console = Console(highlight=False)
    table = Table()
    for name in ("input", "format", "rows", "ok", "dropped"):
        table.add_column(name, overflow="fold", justify="left" if name in ("input", "format") else "right")
    for entry in read:
        lost = sum(entry["dropped"].values())
        table.add_row(
            escape(entry["path"]), entry.get("format", "?"), f"{entry['rows']:,}", f"{entry['ok']:,}", f"{lost:,}"
        )
    console.print(table)
    for title, known in (("dropped", reasons.DROP_REASONS), ("repaired", reasons.REPAIR_REASONS)):
        for reason, count in result[title].items():
            console.print(f"{title} {count:,} [bold]{reason}[/]: {escape(known.get(reason, ''))}", soft_wrap=True)
            console.print(f"  first: {escape(result['examples'][reason])}", soft_wrap=True)
    boxes, answers = result["boxes"], result["answers"]
    units = ", ".join(f"{unit} in {count:,} rows" for unit, count in boxes["read_as"].items())
    console.print(
        f"boxes: {boxes['boxes']:,} in {boxes['samples_with_boxes']:,} of {result['ok']:,} samples"
        + (f"; read as {units}" if units else "")
    )
    if boxes["boxes"]:
        console.print(_boxes_by_sample(boxes), soft_wrap=True)
    if "area" in boxes:
        shares = ", ".join(f"{name} {value:.4f}" for name, value in boxes["area"].items())
        console.print(f"box area, share of the image: {shares}", soft_wrap=True)
    if answers["multiple_choice"]:
        total = sum(answers["multiple_choice"].values())
        letters = ", ".join(f"{k} {v:,} ({v / total:.0%})" for k, v in answers["multiple_choice"].items())
        console.print(f"answers, multiple choice: {letters}", soft_wrap=True)
    if answers["free_distinct"]:
        common = ", ".join(f"{key!r} {count:,}" for key, count in list(answers["free_most_common"].items())[:5])
        console.print(f"answers, free: {answers['free_distinct']:,} distinct; {escape(common)}", soft_wrap=True)
    console.print(
        f"images: {result['images']['referenced']:,} referenced, {result['images']['missing']:,} rows miss one"
    )


def _boxes_by_sample(boxes: dict[str, Any]) -> str:
    """How many boxes samples have, which must fit K where a span has one slot a box."""
    counts = list(boxes["per_sample"].items())
    shown = ", ".join(f"{number} in {samples:,}" for number, samples in counts[:SHOWN_COUNTS])
    text = f"boxes by sample: {shown}" + (f", … up to {counts[-1][0]}" if len(counts) > SHOWN_COUNTS else "")
    if boxes["on_several_images"]:
        text += f"; on several images in {boxes['on_several_images']:,}"
    if boxes["samples_with_earlier_boxes"]:
        text += f"; earlier replies have boxes in {boxes['samples_with_earlier_boxes']:,}"
    return text


@dataclass(frozen=True)
class ShowCommand(showing.ShowSettings):
    """Options of ``realvr data show``.

    Args:
        json: Print one JSON object a line.
        model: Checkpoint (directory, hub id or packaged name) whose own token grid is drawn. Its weights are not read.
    """

    path: Input
    columns: Columns = ()
    json: bool = False
    model: str | None = None


def show(settings: ShowCommand) -> int:
    """Print the first samples of a file as they will be used.

    Images are opened only where needed. Exit code: 0 a sample was shown, 1 there is none, 2 the input or an image to be
    drawn could not be read.

    Examples:
      realvr data show viscot.json --limit 3 --json
      realvr data show viscot.json --limit 20 --save pictures/
      realvr data show train.jsonl --save pictures/ --model runs/own/sft/final
    """
    if settings.model and settings.family:
        raise UserError("--model and --family: the checkpoint knows its family; leave out one of them")
    grids = _grids(settings.model, settings.max_tokens) if settings.model else None
    console = Console(highlight=False, soft_wrap=True)
    shown, count = showing.Shown(), 0
    try:
        for sample in showing.show(settings, shown, grids):
            count += 1
            if settings.json:
                print(json_module.dumps(to_json(sample), ensure_ascii=False))
            else:
                _print_sample(console, to_json(sample))
    finally:
        _fail(shown.undrawn)
    for reason, dropped in shown.dropped.items():
        print(f"dropped {dropped}: {reason} ({shown.examples[reason]})", file=sys.stderr)
    return UNREADABLE if shown.undrawn else USABLE if count else TOO_FEW_USABLE


def _grids(model: str, max_tokens: int | None) -> showing.Grids:
    from realvr.backbone.loading import token_grids  # torch, which nothing else here needs

    return token_grids(model, max_tokens)


def _print_sample(console: Console, row: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(row['id'])}[/]")
    for name, value in row.items():
        if name != "id" and value:
            console.print(f"  {name}: {escape(value if isinstance(value, str) else json_module.dumps(value))}")


@dataclass(frozen=True)
class ExportCommand(conversion.ExportSettings):
    """Options of ``realvr data export``."""

    path: Input
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="(required)")]
    columns: Columns = ()


def export(settings: ExportCommand) -> int:
    """Write the samples of a file in another layout.

    Exit code: 0 written, 1 nothing to write, 2 bad input.

    Examples:
      realvr data export viscot.json --to lvr out/train.json
      realvr data export train.jsonl --to virl39k out/train.parquet
      realvr data export viscot.json --to jsonl out/train.jsonl --link
    """
    done = conversion.export(settings)
    written, report = done.written, done.report
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {written.rows:,} rows to {escape(', '.join(map(str, written.files)))}")
    if written.linked:
        console.print(f"linked {written.linked:,} images")
    for reason, count in report.dropped.items():
        console.print(f"dropped {count:,} {reason}: {escape(report.examples[reason])}")
    for why, count in written.skipped.items():
        console.print(f"left out {count:,}: {escape(why)}")
    if written.lost:
        lost = ", ".join(f"{name} of {count:,} rows" for name, count in written.lost.items())
        console.print(f"this layout has no place for: {lost}")
    return USABLE if written.rows else TOO_FEW_USABLE
