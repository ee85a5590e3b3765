"""``realvr data check | show | export``: plain functions that print and return an exit code."""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realvr.backbone.families import FAMILIES
from realvr.data import overlay, reasons
from realvr.data.detect import detect, format_named
from realvr.data.export import write
from realvr.data.image_cache import ImageCache
from realvr.data.image_file import IMAGE_MISSING, ImageError
from realvr.data.readers.base import ReadOptions
from realvr.data.readers.jsonl import to_json
from realvr.data.reading import Report, read
from realvr.data.sample import Sample
from realvr.data.statistics import Statistics
from realvr.errors import UserError
from realvr.progress import Bar

USABLE, NOTHING_USABLE, UNREADABLE = 0, 1, 2
Policy = Literal["skip", "strict"]


def _fail(error: Exception) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {escape(str(error))}", highlight=False)


def check(
    paths: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")],
    format: str | None = None,
    policy: Policy = "skip",
    json: bool = False,
    images: Path | None = None,
    quarantine: Path | None = None,
    duplicates: Literal["drop", "rename"] = "drop",
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Read every row, open every image, and say what is usable.

    Exit code: 0 usable, 1 every row was dropped, 2 an input could not be read (or --policy strict met a bad row). Other
    inputs are still read after one that could not be.

    Examples:
      realvr data check hr_bench_4k.tsv MMVP/ --quarantine bad.jsonl
      realvr data check train.json --images /data/images --json

    Args:
        paths: Data files or folders, in any supported format.
        format: Name of the format, where it should not be detected.
        policy: skip drops and counts bad rows; strict stops at the first, naming file and row.
        json: Print one JSON object.
        images: Folder that image paths are relative to; by default that of the data file.
        quarantine: JSONL file to list dropped and repaired rows in.
        duplicates: drop or rename rows whose id was used before.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    options = ReadOptions(images, policy, "decode", duplicates, split, mmvp_corrected)
    if quarantine is not None and any(_same(quarantine, path) for path in paths):
        raise UserError(f"{quarantine}: the quarantine file would overwrite an input; choose another name")
    return _check(list(paths), format, options, Report(quarantine=quarantine), json)


def _same(one: Path, other: Path) -> bool:
    """Whether two names lead to one file, by links too."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _check(inputs: list[Path], format: str | None, options: ReadOptions, report: Report, json: bool) -> int:
    statistics = Statistics()
    files: list[dict[str, Any]] = []
    with report, Bar("data check", len(inputs), share=True) as bar:
        for number, path in enumerate(inputs):
            report.on_progress = lambda part, before=number: bar.set(before + part, note=f"{report.ok:,} ok")
            files.append(_check_one(path, format, options, report, statistics))
    result = _result(files, report, statistics)
    if json:
        print(json_module.dumps(result, ensure_ascii=False))
    else:
        _print_check(result)
    if not files:
        _fail(UserError("no file named; name at least one data file or folder"))
    for entry in files:
        if "error" in entry:
            _fail(UserError(entry["error"]))
    if not files or any("error" in entry for entry in files):
        return UNREADABLE
    return USABLE if report.ok else NOTHING_USABLE


def _check_one(
    path: Path, format: str | None, options: ReadOptions, report: Report, statistics: Statistics
) -> dict[str, Any]:
    """Read one input; what it came to, with ``error`` where it could not be read to its end."""
    rows, ok = report.rows, report.ok
    dropped, repaired = Counter(report.dropped), Counter(report.repaired)
    entry: dict[str, Any] = {"path": str(path)}
    try:
        fmt = format_named(format) if format and format != "auto" else detect(path)
        entry["format"] = fmt.name
        for sample in read(path, fmt.name, options, report):
            statistics.add(sample)
    except UserError as error:
        entry["error"] = str(error)
        entry["reason"] = getattr(error, "reason", "bad_row")
    entry |= {"rows": report.rows - rows, "ok": report.ok - ok}
    return entry | {"dropped": dict(report.dropped - dropped), "repaired": dict(report.repaired - repaired)}


def _result(files: list[dict[str, Any]], report: Report, statistics: Statistics) -> dict[str, Any]:
    return {
        "usable": report.ok > 0 and not any("error" in entry for entry in files),
        "files": files,
        "rows": report.rows,
        "ok": report.ok,
        "dropped": dict(sorted(report.dropped.items())),
        "repaired": dict(sorted(report.repaired.items())),
        "examples": report.examples,
        "images": {"referenced": statistics.images, "missing": report.dropped[IMAGE_MISSING]},
        "boxes": statistics.boxes(),
        "answers": statistics.answers(),
        "tasks": dict(statistics.tasks.most_common()),
    }


def _print_check(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table()
    for name in ("input", "format", "rows", "ok", "dropped"):
        table.add_column(name, overflow="fold", justify="left" if name in ("input", "format") else "right")
    for entry in result["files"]:
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
    console.print(f"boxes: {boxes['boxes']:,} in {boxes['samples_with_boxes']:,} of {result['ok']:,} samples")
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


def show(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")],
    limit: int = 5,
    json: bool = False,
    save: Path | None = None,
    format: str | None = None,
    policy: Policy = "skip",
    images: Path | None = None,
    family: str = "qwen2.5-vl",
    max_tokens: int = 1280,
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Print the first samples of a file as they will be used.

    Images are opened only where needed. Exit code: 0 a sample was shown, 1 there is none, 2 the input or an image to be
    drawn could not be read.

    Examples:
      realvr data show viscot.json --limit 3 --json
      realvr data show viscot.json --limit 20 --save pictures/

    Args:
        path: Data file or folder, in any supported format.
        limit: How many samples.
        json: Print one JSON object a line.
        save: Folder for the images, with boxes and the covered visual tokens drawn in.
        format: Name of the format, where it should not be detected.
        policy: skip drops bad rows; strict stops at the first, naming file and row.
        images: Folder that image paths are relative to; by default that of the data file.
        family: Model family whose typical token grid is drawn.
        max_tokens: Visual tokens per image, at most, for families whose grid follows the image size.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    if family not in FAMILIES:
        raise UserError(f"no family {family!r}; choose one of {', '.join(FAMILIES)}")
    options = ReadOptions(images, policy, "none", split=split, mmvp_corrected=mmvp_corrected)
    return _show(path, limit, json, format, options, (save, family, max_tokens))


def _show(
    path: Path, limit: int, json: bool, format: str | None, options: ReadOptions, drawing: tuple[Path | None, str, int]
) -> int:
    save, family, max_tokens = drawing
    report = Report()
    console = Console(highlight=False, soft_wrap=True)
    status, opened = USABLE, ImageCache()
    try:
        for number, sample in enumerate(islice(read(path, format, options, report), max(0, limit)), start=1):
            row = to_json(sample)
            if json:
                print(json_module.dumps(row, ensure_ascii=False))
            else:
                _print_sample(console, row)
            if save is not None:
                status = max(status, _save(sample, number, save, family, max_tokens, opened))
    except UserError as error:
        _fail(error)
        return UNREADABLE
    for reason, count in report.dropped.items():
        print(f"dropped {count}: {reason} ({report.examples[reason]})", file=sys.stderr)
    return status if report.ok else NOTHING_USABLE


def _save(sample: Sample, number: int, folder: Path, family: str, max_tokens: int, opened: ImageCache) -> int:
    try:
        overlay.save(sample, number, folder, family, max_tokens, opened)
    except ImageError as error:
        _fail(error)
        return UNREADABLE
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return USABLE


def _print_sample(console: Console, row: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(row['id'])}[/]")
    for name, value in row.items():
        if name != "id" and value:
            console.print(f"  {name}: {escape(value if isinstance(value, str) else json_module.dumps(value))}")


def export(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="(required)")],
    to: str,
    format: str | None = None,
    policy: Policy = "skip",
    images: Path | None = None,
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Write the samples of a file in another layout.

    Exit code: 0 written, 1 nothing to write, 2 bad input.

    Examples:
      realvr data export viscot.json --to lvr out/train.json
      realvr data export train.jsonl --to virl39k out/train.parquet

    Args:
        path: Data file or folder, in any supported format.
        out: File to write, or folder for mmvp and blink.
        to: jsonl, visual-cot, lvr, virl39k, mmvp, blink, hr-bench or mme-realworld.
        format: Name of the input's format, where it should not be detected.
        policy: skip leaves out bad rows and samples that the layout cannot hold; strict stops at the first.
        images: Folder that image paths are relative to; by default that of the data file.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    options = ReadOptions(images, policy, "exists", split=split, mmvp_corrected=mmvp_corrected)
    return _export(path, out, to, format, options)


def _export(path: Path, out: Path, to: str, format: str | None, options: ReadOptions) -> int:
    report = Report()
    try:
        if _same(out, path):
            raise UserError(f"{out}: the export would overwrite its own input; choose another file")
        if to.lower() in ("mmvp", "blink") and out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out}: the folder is not empty; name a new one, so that no file there is overwritten")
        with Bar(f"{path} as {to}", 1.0, share=True) as bar:
            report.on_progress = bar.set
            written = write(read(path, format, options, report), to, out, strict=options.policy == "strict")
    except OSError as error:
        _fail(UserError(f"{out}: cannot be written ({error.strerror or error})"))
        return UNREADABLE
    except UserError as error:
        _fail(error)
        return UNREADABLE
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {written.rows:,} rows to {escape(', '.join(map(str, written.files)))}")
    for reason, count in report.dropped.items():
        console.print(f"dropped {count:,} {reason}: {escape(report.examples[reason])}")
    for why, count in written.skipped.items():
        console.print(f"left out {count:,}: {escape(why)}")
    if written.lost:
        lost = ", ".join(f"{name} of {count:,} rows" for name, count in written.lost.items())
        console.print(f"this layout has no place for: {lost}")
    return USABLE if written.rows else NOTHING_USABLE
