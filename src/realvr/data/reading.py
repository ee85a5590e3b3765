"""Reading samples from any supported input under the user's policy for bad rows."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from realvr.data import reasons
from realvr.data.boxes import unshown_box
from realvr.data.detect import check_columns, detect, files_of, format_named
from realvr.data.readers.base import Context, Format, ReadOptions, Row
from realvr.data.reasons import BadRow
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.hub.datasets import HubFiles
from realvr.imaging.files import ImageError
from realvr.runs.files import publish

DETAIL = 300
"""Characters of a detail that are shown: a damaged row may quote a name of any length."""


@dataclass
class Report:
    """What became of every row. ``rows == ok + sum(dropped.values())`` always holds."""

    rows: int = 0
    ok: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """First occurrence of each reason, for a person to look at."""
    boxes: Counter[str] = field(default_factory=Counter)
    """Accepted rows with boxes, by what the boxes were read as: ``fractions`` or ``pixels``."""
    files: dict[Path, None] = field(default_factory=dict)
    """Files that rows came from, in order."""
    quarantine: str | Path | None = None
    """JSONL file that lists every dropped or repaired row; there is none after a reading without such a row."""
    on_progress: Callable[[float], None] | None = None
    _file: TextIO | None = None
    _listed: bool = False

    def add(self, reason: str, detail: str, row: Row, file: Path, dropped: bool, name: str | None = None) -> None:
        """Count a dropped row (or rows) or a repair, and list it."""
        (self.dropped if dropped else self.repaired)[reason] += row.count
        self.examples.setdefault(reason, f"{file}, row {row.number}: {detail[:DETAIL]}")
        if self.quarantine is None:
            return
        if self._file is None:
            self._file = self._open(Path(self.quarantine))
        entry: dict[str, Any] = {"file": str(file), "row": row.number, "reason": reason, "detail": detail}
        entry |= {"dropped": dropped} | ({"rows": row.count} if row.count != 1 else {}) | ({"id": name} if name else {})
        self._file.write(json.dumps(entry, ensure_ascii=True) + "\n")

    def _open(self, target: Path) -> TextIO:
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            return _part(target).open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"quarantine file {target}: cannot be written ({error.strerror or error})") from None

    def close(self) -> None:
        """Put the quarantine file in its place; where no row was listed, one of an earlier reading goes."""
        if self.quarantine is None:
            return
        target = Path(self.quarantine)
        try:
            if self._file is not None:
                self._file.close()
                if (part := _part(target)) != target:
                    publish(part, target.resolve())
                self._file, self._listed = None, True
            elif not self._listed and is_quarantine(target):
                target.unlink()
        except OSError as error:
            raise UserError(f"quarantine file {target}: cannot be written ({error.strerror or error})") from None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _part(target: Path) -> Path:
    """Where a file is written until it is whole; devices such as /dev/stderr are written to as they are."""
    target = target.resolve()
    return target.with_name(f".{target.name}.part") if target.is_file() or not target.exists() else target


def is_quarantine(path: Path) -> bool:
    """Whether a file was written as a quarantine file: nothing else is ever removed or replaced."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 20)
        found = json.loads(first) if first.strip() else {}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (not first or {"file", "row", "reason", "detail"} <= set(found))


def read(
    path: str | Path,
    format: str | Format | None = None,
    options: ReadOptions | None = None,
    report: Report | None = None,
) -> Iterator[Sample]:
    """Samples of a file, a folder or a dataset on the hub (``hf:OWNER/NAME#SPLIT``), in order, one at a time.

    ``format`` is detected unless named or given. Bad rows are dropped and counted in ``report``, or stop the reading
    with a `UserError` that names file and row (``policy="strict"``). A file that cannot be read at all raises at once.
    """
    options = options or ReadOptions()
    path = Path(path)
    fmt = format if isinstance(format, Format) else format_of(path, format, options)
    if fmt.pixels_only and options.boxes == "fractions":
        raise UserError(f"{path}: boxes of {fmt.name} are in pixels by definition; leave out --boxes fractions")
    return _Reading(fmt, options, report if report is not None else Report()).samples(path)


def format_of(path: Path, name: str | None, options: ReadOptions) -> Format:
    """The format of an input: the one that is named, that of our own rows where ``columns`` names theirs, or the one
    that is detected."""
    if options.columns and name and name != "auto" and format_named(name).name != "jsonl":
        raise UserError(f"{path}: columns are for rows in our own layout; leave out the format {name}")
    if name and name != "auto":
        return format_named(name)
    return format_named("jsonl") if options.columns else detect(path)


class _Reading:
    """One pass over one input."""

    def __init__(self, fmt: Format, options: ReadOptions, report: Report) -> None:
        self.fmt = fmt
        self.options = options
        self.report = report
        self.seen: set[int] = set()  # hashes of ids: an id string each would cost 100 MB on a million rows
        self.verified: set[Any] = set()
        self.state: dict[Path, dict[str, Any]] = {}

    def samples(self, path: Path) -> Iterator[Sample]:
        files = files_of(path, self.fmt, self.options)
        # HR-Bench counts from 0 in its 4K and in its 8K file: one folder with both must not lose one as duplicates.
        several = len(files) > 1 and self.fmt.name == "hr-bench"
        for position, file in enumerate(files):
            if position and isinstance(files, HubFiles):
                check_columns(file, self.fmt, self.options)
            for row in self.fmt.rows(file, self.options):
                if several:
                    row = replace(row, prefix=f"{file.stem}/")
                if self.report.on_progress is not None:
                    self.report.on_progress((position + row.progress) / len(files))
                sample = self._row(row, row.file or file)
                if sample is not None:
                    yield sample

    def _row(self, row: Row, file: Path) -> Sample | None:
        """The sample of a row, or None where it is dropped."""
        self.report.rows += row.count
        self.report.files.setdefault(file)
        folder = Path(row.images or self.options.images or file.parent)
        ctx = Context(file, folder, row.number, self.options, self.state.setdefault(file, {}))
        sample: Sample | None = None
        try:
            if row.error is not None:
                raise row.error
            sample = self.fmt.parse(row.data, ctx)
            sample = self._unique(replace(sample, id=row.prefix + sample.id), ctx)
            if (problem := unshown_box(sample)) is not None:
                raise BadRow(reasons.BOX_NOT_SHOWN, problem)
            for image in sample.images:
                self._check_image(image)
        except (BadRow, ImageError) as error:
            detail = error.detail if isinstance(error, BadRow) else str(error)
            self._stop_if_strict(error.reason, detail, row, file)
            self.report.add(error.reason, detail, row, file, True, sample.id if sample else None)
            return None
        for reason, detail in ctx.notes:
            self._stop_if_strict(reason, detail, row, file)
            self.report.add(reason, detail, row, file, False, sample.id)
        self.report.ok += 1
        if ctx.boxes is not None:
            self.report.boxes[ctx.boxes] += 1
        self.seen.add(hash(sample.id))
        return sample

    def _stop_if_strict(self, reason: str, detail: str, row: Row, file: Path) -> None:
        if self.options.policy == "strict":
            self.report.close()
            raise UserError(
                f"{file}, row {row.number}: {reason}: {detail} (policy is strict; skip drops and counts it)"
            )

    def _unique(self, sample: Sample, ctx: Context) -> Sample:
        """The sample under an id that no accepted row has, or `BadRow`."""
        if hash(sample.id) not in self.seen:
            return sample
        if self.options.duplicates == "drop":
            raise BadRow(reasons.DUPLICATE_ID, f"id {sample.id!r:.80} was used by an earlier row")
        number = 2
        while hash(f"{sample.id}#{number}") in self.seen:
            number += 1
        ctx.note(reasons.DUPLICATE_ID, f"id {sample.id!r:.80} renamed with #{number}")
        return replace(sample, id=f"{sample.id}#{number}")

    def _check_image(self, image: ImageRef) -> None:
        """Check as far as the options say, each distinct image once."""
        depth = self.options.check_images
        if depth == "none" or (depth == "exists" and image.path is None):
            return
        key = image.path or image.slice
        if key is not None and key in self.verified:
            return
        if depth == "exists":
            _must_be_file(image)
        else:
            digest = image.content_hash()
            if digest not in self.verified:
                image.verify()
            self.verified.add(digest)
        if key is not None:
            self.verified.add(key)


def _must_be_file(image: ImageRef) -> None:
    """A stat call, not a read: fine for a million rows."""
    if image.path is not None and not os.path.isfile(image.path):  # never raises, unlike Path.is_file
        image.read()  # raises with the exact reason
