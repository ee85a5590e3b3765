"""Reading data that may be a folder with several benchmarks: one folder each, by the name of a benchmark or with our
JSON lines (``samples.jsonl``), as `realvr world make` leaves them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from realvr.data.readers.base import Format, ReadOptions
from realvr.data.reading import Report, read
from realvr.data.sample import Sample
from realvr.evaluation.benchmark import BENCHMARKS, base_name
from realvr.evaluation.questions import locate

OWN = "samples.jsonl"
BENCHMARK = "benchmark"
"""Tag of samples that were read from a folder with several benchmarks."""


def benchmarks_in(path: str | Path) -> dict[str, tuple[Path, Format | None]]:
    """The benchmarks of a folder by name, each with its data and, where it is known, its format; empty where the path
    is data itself."""
    folder = Path(path)
    if not folder.is_dir() or (folder / OWN).is_file():
        return {}
    found: dict[str, tuple[Path, Format | None]] = {}
    for inside in sorted(folder.iterdir()):
        if not inside.is_dir():
            continue
        if (inside / OWN).is_file():
            found[inside.name] = inside / OWN, None
        elif base_name(inside.name.lower()) in BENCHMARKS:
            found[inside.name] = locate(inside.name.lower(), inside)
    return found


def read_all(path: str | Path, options: ReadOptions, report: Report) -> Iterator[Sample]:
    """Samples of a file or folder; of several benchmarks one after the other, ids and pairs behind the benchmark's
    name, which is also a tag."""
    several = benchmarks_in(path)
    if not several:
        yield from read(path, options=options, report=report)
    for name, (file, fmt) in several.items():
        for sample in read(file, fmt, options, report):
            yield replace(
                sample,
                id=f"{name}/{sample.id}",
                pair=None if sample.pair is None else f"{name}/{sample.pair}",
                tags=sample.tags | {BENCHMARK: name},
            )
