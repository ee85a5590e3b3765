"""``realvr data check | show | export``: plain functions that print and return an exit code."""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realvr.data import census, overlay, reasons
from realvr.data.boxes import preview_grid
from realvr.data.detect import detect, format_named
from realvr.data.export import write
from realvr.data.readers.base import BoxUnit, ReadOptions
from realvr.data.readers.jsonl import to_json
from realvr.data.reading import Report, is_quarantine, read
from realvr.data.sample import Sample
from realvr.data.statistics import Statistics
from realvr.errors import UserError
from realvr.families import FAMILIES
from realvr.imaging.cache import ImageCache
from realvr.imaging.files import IMAGE_MISSING, ImageError
from realvr.imaging.types import Grid
from realvr.runs.progress import Bar

USABLE, TOO_FEW_USABLE, UNREADABLE = 0, 1, 2
Policy = Literal["skip", "strict"]
Grids = Callable[[Image.Image], Grid]


def _fail(error: Exception) -> None:
    """As the other verbs do, for one input of several."""
    print(f"realvr: error: {error}", file=sys.stderr)


def check(
    paths: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")],
    format: str | None = None,
    policy: Policy = "skip",
    json: bool = False,
    images: Path | None = None,
    boxes: BoxUnit | None = None,
    quarantine: Path | None = None,
    max_dropped: float = 0.2,
    duplicates: Literal["drop", "rename"] = "drop",
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Read every row, open every image, and say what is usable.

    Exit code: 0 usable, 1 an input loses more than --max-dropped of its rows (or all, or a listed file), 2 one could
    not be read (or --policy strict met a bad row). Other inputs are still read after one that could not be.

    Examples:
      realvr data check hr_bench_4k.tsv MMVP/ --quarantine bad.jsonl
      realvr data check train.json --images /data/images --json

    Args:
        paths: Data files or folders, in any supported format.
        format: Name of the format, where it should not be detected.
        policy: skip drops and counts bad rows; strict stops at the first, naming file and row.
        json: Print one JSON object.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        quarantine: JSONL file to list dropped and repaired rows in. One of an earlier check is replaced, or removed.
        max_dropped: Largest share of the rows of an input that may be dropped.
        duplicates: drop or rename rows whose id was used before.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    options = ReadOptions(images, policy, "decode", duplicates, split, mmvp_corrected, boxes)
    if not 0 <= max_dropped <= 1:
        raise UserError(f"--max-dropped {max_dropped}: a share between 0 and 1 is expected")
    if quarantine is not None and any(_same(quarantine, path) for path in paths):
        raise UserError(f"{quarantine}: the quarantine file would overwrite an input; choose another name")
    if quarantine is not None and quarantine.is_file() and not is_quarantine(quarantine):
        raise UserError(f"{quarantine}: exists and is not a quarantine file; choose another name, or remove it")
    return _check(list(paths), format, options, Report(quarantine=quarantine), max_dropped, json)


def _same(one: Path, other: Path) -> bool:
    """Whether two names lead to one file, by links too."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _check(
    inputs: list[Path], format: str | None, options: ReadOptions, report: Report, max_dropped: float, json: bool
) -> int:
    statistics = Statistics()
    files: list[dict[str, Any]] = []
    with report, Bar("data check", len(inputs), share=True) as bar:
        for number, path in enumerate(inputs):
            report.on_progress = lambda part, before=number: bar.set(before + part, note=f"{report.ok:,} ok")
            files.append(_check_one(path, format, options, report, statistics))
    over = [entry for entry in files if _over(entry, max_dropped)]
    result = _result(files, report, statistics) | {"max_dropped": max_dropped}
    result["usable"] = result["usable"] and not over
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
    for entry in over:
        _fail(UserError(_too_many(entry, max_dropped)))
    return TOO_FEW_USABLE if over else USABLE


def _over(entry: dict[str, Any], most: float) -> bool:
    """Whether an input lost more rows than allowed, or all of them."""
    return "error" not in entry and _why_over(entry, most) is not None


def _why_over(entry: dict[str, Any], most: float) -> str | None:
    return census.too_much_lost(entry["rows"], entry["ok"], entry["dropped"], most, "--max-dropped")


def _too_many(entry: dict[str, Any], most: float) -> str:
    ways = "; ".join(reasons.ways_out(entry["dropped"], "--"))
    text = f"{entry['path']}: {_why_over(entry, most)}"
    return f"{text}. {ways}" if ways else text


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
        "boxes": statistics.boxes() | {"read_as": dict(report.boxes)},
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
    units = ", ".join(f"{unit} in {count:,} rows" for unit, count in boxes["read_as"].items())
    console.print(
        f"boxes: {boxes['boxes']:,} in {boxes['samples_with_boxes']:,} of {result['ok']:,} samples"
        + (f"; read as {units}" if units else "")
    )
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
    boxes: BoxUnit | None = None,
    model: str | None = None,
    family: str | None = None,
    max_tokens: int | None = None,
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Print the first samples of a file as they will be used.

    Images are opened only where needed. Exit code: 0 a sample was shown, 1 there is none, 2 the input or an image to be
    drawn could not be read.

    Examples:
      realvr data show viscot.json --limit 3 --json
      realvr data show viscot.json --limit 20 --save pictures/
      realvr data show train.jsonl --save pictures/ --model runs/own/sft/final

    Args:
        path: Data file or folder, in any supported format.
        limit: How many samples.
        json: Print one JSON object a line.
        save: Folder for the images, with boxes and the covered visual tokens drawn in and the question under them.
        format: Name of the format, where it should not be detected.
        policy: skip drops bad rows; strict stops at the first, naming file and row.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        model: Checkpoint (directory, hub id or packaged name) whose own token grid is drawn. Its weights are not read.
        family: Without a model: the family whose typical token grid is drawn; qwen2.5-vl by default.
        max_tokens: Visual tokens per image, at most, for families whose grid follows the image size. By default the
            checkpoint's, or 1280 without a model.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    options = ReadOptions(images, policy, "none", split=split, mmvp_corrected=mmvp_corrected, boxes=boxes)
    return _show(path, limit, json, format, options, save, _grids(model, family, max_tokens))


def _grids(model: str | None, family: str | None, max_tokens: int | None) -> Grids:
    """Image -> grid of its visual tokens: a checkpoint's own, or a typical one of a family."""
    if family is not None and family not in FAMILIES:
        raise UserError(f"no family {family!r}; choose one of {', '.join(FAMILIES)}")
    if model is None:
        return lambda image: preview_grid(family or "qwen2.5-vl", image.size, max_tokens or 1280)
    if family is not None:
        raise UserError("--model and --family: the checkpoint knows its family; leave out one of them")
    from realvr.backbone.loading import load_processor  # torch, which nothing else here needs

    processor = load_processor(model, max_tokens)
    return lambda image: processor(image).grid


def _show(
    path: Path, limit: int, json: bool, format: str | None, options: ReadOptions, save: Path | None, grids: Grids
) -> int:
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
                status = max(status, _save(sample, number, save, grids, opened))
    except UserError as error:
        _fail(error)
        return UNREADABLE
    for reason, count in report.dropped.items():
        print(f"dropped {count}: {reason} ({report.examples[reason]})", file=sys.stderr)
    return status if report.ok else TOO_FEW_USABLE


def _save(sample: Sample, number: int, folder: Path, grids: Grids, opened: ImageCache) -> int:
    try:
        overlay.save(sample, number, folder, grids, opened)
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
    boxes: BoxUnit | None = None,
    link: bool = False,
    split: str = "val",
    mmvp_corrected: bool = False,
) -> int:
    """Write the samples of a file in another layout.

    Exit code: 0 written, 1 nothing to write, 2 bad input.

    Examples:
      realvr data export viscot.json --to lvr out/train.json
      realvr data export train.jsonl --to virl39k out/train.parquet
      realvr data export viscot.json --to jsonl out/train.jsonl --link

    Args:
        path: Data file or folder, in any supported format.
        out: File to write, or folder for mmvp and blink.
        to: jsonl, visual-cot, lvr, virl39k, mmvp, blink, hr-bench, mme-realworld or vstar.
        format: Name of the input's format, where it should not be detected.
        policy: skip leaves out bad rows and samples that the layout cannot hold; strict stops at the first.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        link: Link image files into the new folder instead of copying them (hard links; symbolic ones on another disk).
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """
    options = ReadOptions(images, policy, "exists", split=split, mmvp_corrected=mmvp_corrected, boxes=boxes)
    return _export(path, out, to, format, options, link)


def _export(path: Path, out: Path, to: str, format: str | None, options: ReadOptions, link: bool) -> int:
    report = Report()
    try:
        if _same(out, path):
            raise UserError(f"{out}: the export would overwrite its own input; choose another file")
        if to.lower() in ("mmvp", "blink") and out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out}: the folder is not empty; name a new one, so that no file there is overwritten")
        with Bar(f"{path} as {to}", 1.0, share=True) as bar:
            report.on_progress = bar.set
            written = write(read(path, format, options, report), to, out, strict=options.policy == "strict", link=link)
    except OSError as error:
        _fail(UserError(f"{out}: cannot be written ({error.strerror or error})"))
        return UNREADABLE
    except UserError as error:
        _fail(error)
        return UNREADABLE
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
