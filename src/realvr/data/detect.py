"""Which format a file is in, and which files an input stands for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from realvr.data import parquet, reasons
from realvr.data.readers import blink, hr_bench, jsonl, lvr, mme_realworld, mmvp, virl39k, visual_cot, vstar
from realvr.data.readers.base import Format, ReadOptions
from realvr.data.reasons import FileError
from realvr.data.streams import json_rows, open_file
from realvr.data.tables import table_header
from realvr.hub.datasets import HubFiles, find, is_hub

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        visual_cot.FORMAT,
        virl39k.FORMAT,
        lvr.FORMAT,
        lvr.META_FORMAT,
        mmvp.FORMAT,
        blink.FORMAT,
        hr_bench.FORMAT,
        mme_realworld.FORMAT,
        vstar.FORMAT,
        jsonl.FORMAT,
    )
}

# From the most to the least telling columns: HR-Bench columns minus the cycle are nearly those of MME-RealWorld.
_TABLES = (hr_bench.FORMAT, mme_realworld.FORMAT, blink.FORMAT, virl39k.FORMAT, vstar.FORMAT)
_PARQUET = (*_TABLES, jsonl.FORMAT)
_PROBE_ROWS = 5


def format_named(name: str) -> Format:
    """The format of a name, written with dashes or underscores."""
    key = name.lower().replace("_", "-")
    if key not in FORMATS:
        raise FileError(reasons.FORMAT_UNKNOWN, f"no format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[key]


def detect(path: Path) -> Format:
    """The format of a file or folder, from its name and its first rows; raises `FileError` where there is none."""
    if is_hub(path):
        return detect(HubFiles(find(str(path)), pictures=False)[0])
    if not path.exists():
        raise FileError(reasons.FILE_MISSING, f"{path}: no such file or folder")
    if path.is_dir():
        return _detect_folder(path)
    with open_file(path):
        pass
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _by_columns(path, parquet.columns(path), _PARQUET)
    if suffix == ".tsv":
        return _by_columns(path, table_header(path), _TABLES)
    if suffix == ".csv":
        return FORMATS["mmvp"]
    if suffix in (".json", ".jsonl"):
        return _detect_json(path)
    raise FileError(
        reasons.FORMAT_UNKNOWN, f"{path}: {suffix or 'no'} extension; .json, .jsonl, .tsv, .parquet or .csv is expected"
    )


def _detect_folder(path: Path) -> Format:
    if (path / mmvp.QUESTIONS).exists():
        return FORMATS["mmvp"]
    first = next(iter(parquet.files_in(path)), None)
    if first is None:
        raise FileError(
            reasons.NOT_A_FILE,
            f"{path}: is a folder without {mmvp.QUESTIONS} (MMVP) or parquet files; name the data file inside it",
        )
    return _by_columns(first, parquet.columns(first), _PARQUET)


def _lost(fmt: Format, found: list[str]) -> list[str]:
    """Columns that a table lacks, by the layout of the format that is nearest."""
    return min(([name for name in layout if name not in found] for layout in fmt.tables), key=len)


def _by_columns(path: Path, found: list[str], formats: Sequence[Format]) -> Format:
    for fmt in formats:
        if not _lost(fmt, found):
            return fmt
    likely = max(formats, key=lambda fmt: max(len(set(layout) & set(found)) for layout in fmt.tables))
    named = "" if jsonl.FORMAT not in formats else "; --columns question=COLUMN … names those of questions and answers"
    raise FileError(
        reasons.WRONG_COLUMNS,
        f"{path}: columns {', '.join(found)[:200]} fit no format; nearest is {likely.name}, which also needs "
        f"{', '.join(_lost(likely, found))}{named}",
    )


def _detect_json(path: Path) -> Format:
    rows = list(islice(json_rows(path), _PROBE_ROWS))
    objects = [row.data for row in rows if row.error is None]
    for data in objects:
        if name := _json_format(data):
            return FORMATS[name]
    if not objects:
        why = str(rows[0].error) if rows else "no rows"
        if any(row.error is not None and row.error.reason == reasons.NOT_UTF8 for row in rows):
            raise FileError(reasons.NOT_UTF8, f"{path}: not UTF-8; save the file as UTF-8")
        raise FileError(reasons.FILE_UNREADABLE, f"{path}: no JSON object in the first rows ({why})")
    keys = ", ".join(map(str, objects[0]))[:200] or "none"
    raise FileError(reasons.FORMAT_UNKNOWN, f"{path}: keys {keys} fit no format; name one with --format")


def _json_format(row: dict[str, Any]) -> str | None:
    folded = {mme_realworld.fold_key(str(key)) for key in row}
    if {"answerchoices", "groundtruth"} <= folded:
        return "mme-realworld"
    if {"data_path", "image_folder"} <= set(row):
        return "lvr-meta"
    if set(vstar.REQUIRED) <= set(row):
        return "vstar"
    if "conversations" in row:
        images = row.get("image")
        marked = isinstance(images, list) and any("###" in str(entry) for entry in images)
        return "visual-cot" if marked else "lvr"
    if {"bboxs", "question", "answer"} <= set(row):
        return "visual-cot"
    if "images" in row and ("question" in row or "turns" in row):
        return "jsonl"
    return None


def files_of(path: Path, fmt: Format, options: ReadOptions) -> Sequence[Path]:
    """The files that one input stands for, in a fixed order. Those of a dataset on the hub are fetched when they are
    taken, and `check_columns` of all but the first is for who takes them."""
    if is_hub(path):
        files = HubFiles(find(str(path)), pictures=options.images is None)
        check_columns(files[0], fmt, options)
        return files
    if not path.exists():
        raise FileError(reasons.FILE_MISSING, f"{path}: no such file or folder")
    if not path.is_dir():
        check_columns(path, fmt, options)
        return [path]
    if not fmt.folders:
        raise FileError(reasons.NOT_A_FILE, f"{path}: is a folder; {fmt.title} is expected as a file")
    found = parquet.files_in(path) if fmt.files is None else fmt.files(path, options)
    if not found:
        raise FileError(reasons.NOT_A_FILE, f"{path}: is a folder without parquet files")
    for file in found:
        check_columns(file, fmt, options)
    return found


def check_columns(path: Path, fmt: Format, options: ReadOptions) -> None:
    """Refuse a table whose columns are not those of a format that was named explicitly."""
    suffix = path.suffix.lower()
    if options.columns:
        jsonl.check_names(path, options)
    if not fmt.tables or suffix not in (".parquet", ".tsv"):
        return
    found = parquet.columns(path) if suffix == ".parquet" else table_header(path)
    if lost := _lost(fmt, jsonl.translated(found, options)):
        raise FileError(
            reasons.WRONG_COLUMNS, f"{path}: no column {', '.join(lost)} ({fmt.title}); found {', '.join(found)[:200]}"
        )
