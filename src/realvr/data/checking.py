"""What of data files can be used: every row read, every image opened (``realvr data check``). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from realvr.data import census, reasons
from realvr.data.readers.base import BoxUnit, ReadOptions
from realvr.data.readers.jsonl import column_pairs
from realvr.data.reading import Report, format_of, is_quarantine, read
from realvr.data.statistics import Statistics
from realvr.errors import UserError
from realvr.imaging.files import IMAGE_MISSING
from realvr.runs.progress import Bar

Policy = Literal["skip", "strict"]


@dataclass(frozen=True)
class CheckSettings:
    """Which files to check, and how they are read.

    Args:
        paths: Data files or folders in any supported format, or datasets of the hub, hf:OWNER/NAME#SPLIT.
        format: Name of the format, where it should not be detected.
        policy: skip drops and counts bad rows; strict stops at the first, naming file and row.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        quarantine: JSONL file to list dropped and repaired rows in. One of an earlier check is replaced, or removed.
        max_dropped: Largest share of the rows of an input that may be dropped.
        duplicates: drop or rename rows whose id was used before.
        columns: For rows of questions and answers in columns with other names: question=problem answer=solution.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """

    paths: Sequence[Path]
    format: str | None = None
    policy: Policy = "skip"
    images: Path | None = None
    boxes: BoxUnit | None = None
    quarantine: Path | None = None
    max_dropped: float = 0.2
    duplicates: Literal["drop", "rename"] = "drop"
    split: str = "val"
    mmvp_corrected: bool = False
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """What a check came to."""

    result: dict[str, Any]
    """Counts, with ``usable``, and ``files`` for each input."""
    unreadable: list[str]
    """Why inputs could not be read to their end."""
    lost: list[str]
    """Inputs that lost more rows than allowed, in words."""


def check(settings: CheckSettings) -> Check:
    """Read every row and open every image. Other inputs are still read after one that could not be."""
    quarantine, inputs = settings.quarantine, [Path(path) for path in settings.paths]
    if not 0 <= settings.max_dropped <= 1:
        raise UserError(f"--max-dropped {settings.max_dropped}: a share between 0 and 1 is expected")
    if quarantine is not None and any(same_file(quarantine, path) for path in inputs):
        raise UserError(f"{quarantine}: the quarantine file would overwrite an input; choose another name")
    if quarantine is not None and quarantine.is_file() and not is_quarantine(quarantine):
        raise UserError(f"{quarantine}: exists and is not a quarantine file; choose another name, or remove it")
    options = ReadOptions(
        settings.images,
        settings.policy,
        "decode",
        settings.duplicates,
        settings.split,
        settings.mmvp_corrected,
        settings.boxes,
        columns=column_pairs(settings.columns),
    )
    statistics, report = Statistics(), Report(quarantine=quarantine)
    files: list[dict[str, Any]] = []
    with report, Bar("data check", len(inputs), share=True) as bar:
        for number, path in enumerate(inputs):
            report.on_progress = lambda part, before=number: bar.set(before + part, note=f"{report.ok:,} ok")
            files.append(_check_one(path, settings.format, options, report, statistics))
    unreadable = [entry["error"] for entry in files if "error" in entry]
    if not files:
        unreadable = ["no file named; name at least one data file or folder"]
    lost = [_too_many(entry, settings.max_dropped) for entry in files if _over(entry, settings.max_dropped)]
    result = _result(files, report, statistics) | {"max_dropped": settings.max_dropped}
    return Check(result | {"usable": result["usable"] and not lost}, unreadable, lost)


def same_file(one: Path, other: Path) -> bool:
    """Whether two names lead to one file, by links too."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


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
        fmt = format_of(path, format, options)
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
