"""The questions of a benchmark, in the order in which they are asked. Images stay undecoded.

A row whose image is missing or cannot be opened stays a question: it is met when it is asked, recorded with its error,
and counts as wrong. A row that cannot become a question at all (no answer, broken text, …) is counted in ``dropped``
and reported. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realvr.data.detect import FORMATS, detect
from realvr.data.readers.base import Format, ReadOptions
from realvr.data.reading import Report, read
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.benchmark import BENCHMARKS, MINI, Benchmark, base_name, benchmark_of, data_path
from realvr.evaluation.identity import called, from_world

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass
class Questions:
    """What is asked under the name ``bench``. Ids are unique; pairs and option cycles stand together."""

    bench: str
    samples: list[Sample]
    path: str = ""
    format: str = ""
    rows: int = 0
    """Rows that were read, usable or not."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that cannot be asked, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first dropped row of each reason, in words."""
    tasks: tuple[str, ...] = ()
    """Subtasks that were chosen; empty: all."""
    missing_tasks: tuple[str, ...] = ()
    """Chosen subtasks that the files do not hold."""
    limit: int | None = None
    world: bool = False
    """Drawn by the embedded world."""

    def __len__(self) -> int:
        return len(self.samples)

    def describe(self) -> dict[str, Any]:
        """Facts for the record of a run, JSON-compatible. ``sha256`` covers ids, wording (a benchmark's own
        prompt included), options and answers."""
        digest, bench = hashlib.sha256(), benchmark_of(self.bench)
        worded = bench.prompt.__func__ is not Benchmark.prompt.__func__  # type: ignore[attr-defined]
        for sample in self.samples:
            texts = [(turn.role, turn.text) for turn in sample.turns]
            row = [sample.id, texts, sample.choices, sample.answer, [image.id for image in sample.images]]
            row += [[(turn.role, turn.text) for turn in bench.prompt(sample)]] if worded else []
            digest.update(json.dumps(row).encode())
        return {
            "path": self.path,
            "format": self.format,
            "rows": self.rows,
            "dropped": self.dropped,
            "questions": len(self.samples),
            "tasks": list(self.tasks),
            "missing_tasks": list(self.missing_tasks),
            "limit": self.limit,
            "sha256": digest.hexdigest(),
        }

    def set_facts(self) -> dict[str, Any]:
        """What tells the published set from others, beside `describe`; see `realvr.evaluation.identity`."""
        return {
            "world": self.world,
            "task_rows": dict(Counter(sample.task for sample in self.samples)),
            "labels": self.labels(),
        }

    def labels(self) -> dict[str, str]:
        """SHA-256 of (id, right answer) of every question, by subtask: files whose labels were corrected differ here,
        however they are named and packed."""
        found: dict[str, list[str]] = defaultdict(list)
        for sample in self.samples:
            found[sample.task].append(json.dumps([sample.id, sample.answer]))
        return {task: hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest() for task, rows in found.items()}


def bench_name(name: str) -> str:
    """A name of the command line; those of the catalogue are known in whatever case."""
    return name.lower() if base_name(name.lower()) in BENCHMARKS else name


def parse_bench(text: str) -> tuple[str, Path]:
    """``NAME=PATH`` -> (name, path)."""
    name, equals, path = text.partition("=")
    if not equals or not path or not _NAME.fullmatch(name):
        raise UserError(
            f"--bench {text!r}: write NAME=PATH, where NAME is {', '.join(BENCHMARKS.names())}, one of these after "
            f"{MINI} for what realvr world make writes, or a name of letters, digits, '.', '_' and '-' of your own"
        )
    return bench_name(name), Path(path)


def locate(name: str, path: str | Path) -> tuple[Path, Format]:
    """(data file or folder, format) of a benchmark; cheap, so that a wrong path is found before a model is loaded.

    A benchmark with a reader of its own is taken at its word; files in the layouts of `realvr.data` are looked at.
    """
    path = Path(path)
    if base_name(name) not in BENCHMARKS:
        return path, detect(path)
    bench = benchmark_of(name)
    path = data_path(bench, path)
    if bench.reader.name not in FORMATS:
        return path, bench.reader
    try:
        format = detect(path)
    except UserError as error:
        raise UserError(f"{name}: {error}; {bench.expectation()}") from None
    if format.name not in (bench.reader.name, "jsonl"):
        raise UserError(f"{name}: {path} is in the format {format.name}; {bench.expectation()}")
    return path, format


def load(
    name: str,
    path: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    images: str | Path | None = None,
    variant: str | None = None,
    strict: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> Questions:
    """Read the questions of a benchmark (a registered name, or any name for any readable file).

    They get the name that they go by from here on, see `realvr.evaluation.identity.called`.

    ``tasks`` restricts to subtasks; None means the benchmark's usual ones, which may then be incomplete. ``limit``
    keeps at most that many questions, see `subset`. ``images`` is the folder that image paths are relative to.
    ``variant`` is one of the benchmark's own (`Benchmark.variants`). ``strict`` refuses a file with a row that
    cannot be asked.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}: at least one question must be asked")
    name = bench_name(name)
    where, format = locate(name, path)
    known, bench = base_name(name) in BENCHMARKS, benchmark_of(name)
    usual = bench.facts.tasks if known and format.name == bench.reader.name else ()
    chosen = tuple(usual if tasks is None else tasks)
    options = ReadOptions(
        images=images,
        policy="strict" if strict else "skip",
        check_images="none",
        broken_images="drop" if strict else "keep",
    )
    options = bench.read_options(options, variant)
    report = Report(on_progress=on_progress)
    samples: list[Sample] = []
    for part in _parts(where, chosen):
        samples += [sample for sample in read(part, format, options, report) if not chosen or sample.task in chosen]
    missing = tuple(task for task in chosen if task not in {sample.task for sample in samples})
    if tasks is not None and missing:
        raise UserError(f"{name}: {where} has no questions of {', '.join(missing)}")
    if not samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        why = f" ({reasons})" if reasons else ""
        more = f"; {bench.expectation()}" if known else ""
        raise UserError(f"{name}: {where} holds no question that can be asked{why}{more}")
    _refuse_repeated(name, samples)
    ordered = [sample for unit in units(samples) for sample in unit]
    world = known and from_world(where, samples)
    return Questions(
        called(name, where, format.name, world),
        subset(ordered, limit, bench) if limit else ordered,
        path=str(where),
        format=format.name,
        rows=report.rows,
        dropped=dict(report.dropped),
        examples={reason: report.examples[reason] for reason in report.dropped},
        tasks=chosen,
        missing_tasks=missing,
        limit=limit,
        world=world,
    )


def _parts(path: Path, tasks: Sequence[str]) -> list[Path]:
    """The folders of the chosen subtasks where a tree has them, so that the others are not even read."""
    found = [path / task for task in tasks if (path / task).is_dir()]
    return found or [path]


def _refuse_repeated(name: str, samples: Sequence[Sample]) -> None:
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise UserError(f"{name}: the question id {sample.id!r} occurs twice ({sample.source}); ids must be unique")
        seen.add(sample.id)


def image_key(image: ImageRef) -> Hashable:
    """Equal for references to the same picture, as far as that is known without reading files."""
    if image.data is not None:
        return hashlib.sha256(image.data).digest()
    return image.path or image.slice or image.id


def _unit_key(sample: Sample) -> Hashable:
    """What belongs together: a pair, or the option cycles of one question about one image."""
    if sample.pair is not None:
        return ("pair", sample.task, sample.pair)
    if sample.cycle is not None:
        keys = tuple(map(image_key, sample.images))
        return ("cycles", sample.question, tuple(sorted(sample.choices)), keys)
    return ("single", sample.id)


def units(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Pairs, option cycles and single questions, each unit at the place of its first member."""
    found: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        found.setdefault(_unit_key(sample), []).append(sample)
    return list(found.values())


def subset(samples: Sequence[Sample], limit: int, bench: type[Benchmark] = Benchmark) -> list[Sample]:
    """At most ``limit`` questions in whole units (one unit at least), spread evenly over subtasks and within them.

    Subtasks are the strata of ``bench``. No random numbers: the same questions for every budget, condition and model.
    Every subtask has one unit before any has two; after that their shares follow their sizes.
    """
    if limit >= len(samples):
        return list(samples)
    whole = units(samples)
    strata: dict[Hashable, list[int]] = defaultdict(list)
    for number, unit in enumerate(whole):
        strata[bench.stratum(unit[0])].append(number)
    count = max(1, limit * len(whole) // len(samples))
    while True:
        chosen = [whole[number] for number in sorted(_spread(list(strata.values()), count))]
        if count == 1 or sum(map(len, chosen)) <= limit:
            return [sample for unit in chosen for sample in unit]
        count -= 1


def _spread(strata: Sequence[Sequence[int]], count: int) -> list[int]:
    """``count`` members of the strata: the next always from the one of which the smallest share was taken."""
    taken = [0] * len(strata)
    for _ in range(count):
        open_ones = [k for k in range(len(strata)) if taken[k] < len(strata[k])]
        taken[min(open_ones, key=lambda k: (taken[k] / len(strata[k]), taken[k], -len(strata[k]), k))] += 1
    found = []
    for members, number in zip(strata, taken, strict=True):
        found += [members[(2 * j + 1) * len(members) // (2 * number)] for j in range(number)]
    return found
