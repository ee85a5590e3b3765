"""How many rows of each source can be used, why the others cannot, and what the files looked like. No torch.

The counting costs no pass of its own: it sums up the one that lists the rows. A record of the files (a hash) and of the
images (size and modification time, one ``stat`` each) tells a resumed run whether its data is still the same.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.data import reasons
from realvr.data.reading import Report
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.imaging.files import IMAGE_MISSING

SHOWN = 3
"""How many changed files or images a message names."""
_THREADS, _PART = 16, 256
_RACY_NS = 2_000_000_000  # an edit this soon after the last one may leave the modification time as it was
_ABSENT = (-1, -1)


@dataclass(frozen=True)
class SourceCensus:
    """What became of the rows of one source."""

    path: str
    rows: int
    usable: int
    with_boxes: int
    """Usable rows with at least one evidence box."""
    dropped: dict[str, int]
    repaired: dict[str, int]
    first: dict[str, str]
    """Where each reason was met first."""
    boxes_read_as: dict[str, int]
    """Rows by what their boxes were taken for: ``fractions`` or ``pixels``."""

    @property
    def dropped_share(self) -> float:
        """Share of the rows that training cannot use."""
        return dropped_share(self.rows, self.usable)

    def line(self) -> str:
        """In words, for example ``train.jsonl: 9 of 159 rows usable, 7 with evidence boxes; dropped: 150
        box_in_pixels``."""
        text = f"{self.path}: {self.usable:,} of {self.rows:,} rows usable, {self.with_boxes:,} with evidence boxes"
        if self.boxes_read_as.get("pixels"):
            text += " (" + ", ".join(f"{count:,} rows in {unit}" for unit, count in self.boxes_read_as.items()) + ")"
        if self.dropped:
            lost = sorted(self.dropped.items(), key=lambda item: -item[1])
            text += "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in lost)
        return text


@dataclass(frozen=True)
class Census:
    """What became of the rows of all sources."""

    sources: list[SourceCensus]

    @property
    def usable(self) -> int:
        """Usable rows of all sources."""
        return sum(source.usable for source in self.sources)

    @property
    def with_boxes(self) -> int:
        """Usable rows with evidence boxes, of all sources."""
        return sum(source.with_boxes for source in self.sources)

    def to_json(self) -> list[dict[str, Any]]:
        """As it is kept in the run's folder."""
        return [vars(source) for source in self.sources]


def count(path: str, samples: Sequence[Sample], report: Report, missing: set[str]) -> tuple[list[Sample], SourceCensus]:
    """The samples whose images all exist, and the census of their source. ``missing`` are paths of absent images."""
    kept: list[Sample] = []
    dropped, first = Counter(report.dropped), dict(report.examples)
    for sample in samples:
        lost = next((image for image in sample.images if str(image.path) in missing), None) if missing else None
        if lost is None:
            kept.append(sample)
        else:
            dropped[IMAGE_MISSING] += 1
            first.setdefault(IMAGE_MISSING, f"{sample.source}: no image file {lost.path}")
    with_boxes = sum(bool(sample.boxes) for sample in kept)
    found = SourceCensus(
        path, report.rows, len(kept), with_boxes, dict(dropped), dict(report.repaired), first, dict(report.boxes)
    )
    return kept, found


def dropped_share(rows: int, usable: int) -> float:
    """Share of the rows that cannot be used; 1 where there is no row."""
    return (rows - usable) / rows if rows else 1.0  # 1 - usable / rows would make 3 of 10 more than 0.3


def too_much_lost(rows: int, usable: int, dropped: Iterable[str], most: float, option: str) -> str | None:
    """Why an input is refused that may lose at most a share ``most`` of its rows, as ``option`` says; None where it is
    not."""
    share = dropped_share(rows, usable)
    if not usable:
        return "no row can be used"
    if share > most:
        return f"{share:.1%} of its rows dropped, {option} allows {most:.1%}"
    if most < 1 and any(reason in reasons.LISTED_FILE_LOST for reason in dropped):
        return "a listed file is lost with all its rows"
    return None


def distinct_images(samples: Sequence[Sample]) -> list[str]:
    """Paths of the image files of the samples, each once, in the order in which they come."""
    paths = (str(image.path) for sample in samples for image in sample.images if image.path is not None)
    return list(dict.fromkeys(paths))


def image_stats(paths: Sequence[str]) -> NDArray[np.int64]:
    """(N, 2) size and modification time in ns of each file; -1 where there is none. Nothing is opened."""

    def stat(path: str) -> tuple[int, int]:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return _ABSENT
        return found.st_size, found.st_mtime_ns

    parts = [paths[start : start + _PART] for start in range(0, len(paths), _PART)]
    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system answers many at once as fast as one
        found = [pair for part in pool.map(lambda part: [stat(path) for path in part], parts) for pair in part]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def absent(paths: Sequence[str], stats: NDArray[np.int64]) -> set[str]:
    """The paths that lead to no file."""
    return {paths[index] for index in np.flatnonzero(stats[:, 0] < 0).tolist()}


def hash_files(paths: Sequence[Path], known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Size, modification time and SHA-256 of each file; ``known`` records of unchanged size and time are trusted."""
    records: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            found = path.stat()
            before = known.get(str(path), {})
            same = (before.get("size"), before.get("mtime_ns")) == (found.st_size, found.st_mtime_ns)
            if same and before.get("hashed_ns", 0) > found.st_mtime_ns + _RACY_NS:
                records[str(path)] = dict(before)
                continue
            records[str(path)] = {
                "size": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "hashed_ns": time.time_ns(),
                "sha256": _sha256(path),
            }
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    return records


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """What the data of a run looked like. Files are compared by content, images by size and modification time."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    """Paths, in the order of the rows: the same files name the same images, so that a record needs no paths."""
    stats: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    def changes(self, files: Mapping[str, Mapping[str, Any]], stats: NDArray[np.int64]) -> list[str]:
        """How this data differs from an earlier record, in words; empty where it does not."""
        found = [f"{path} is no longer read" for path in files if path not in self.files]
        for path, now in self.files.items():
            before = files.get(path)
            if before is None:
                found.append(f"{path} is new")
            elif before["sha256"] != now["sha256"]:
                found.append(f"{path} was edited ({before['size']:,} bytes, now {now['size']:,})")
        if found:
            return found  # other rows: the images cannot be told apart by their order any more
        if len(stats) != len(self.stats):
            return [f"{len(stats):,} images, now {len(self.stats):,}"]
        moved = np.flatnonzero((stats != self.stats).any(axis=1))
        return [_image_change(self.images[i], stats[i].tolist(), self.stats[i].tolist()) for i in moved]


def _image_change(path: str, before: list[int], now: list[int]) -> str:
    if before[0] < 0 or now[0] < 0:
        return f"image {path} {'is new' if before[0] < 0 else 'is gone'}"
    if before[0] != now[0]:
        return f"image {path} was changed ({before[0]:,} bytes, now {now[0]:,})"
    return f"image {path} was written again (same size, other modification time)"
