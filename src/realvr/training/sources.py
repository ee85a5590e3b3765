"""The data of a run: its sources read once, counted, held against ``data.max_dropped``, and mixed.

Nothing here imports torch, so that a run over files that cannot be used ends before its model is loaded.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.data import census, reasons
from realvr.data.census import Census, Fingerprint, SourceCensus
from realvr.data.mixture import Mixture
from realvr.data.readers.base import ReadOptions
from realvr.data.reading import Report, read
from realvr.data.reasons import FileError
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.hub.datasets import find, is_hub
from realvr.runs.progress import Bar
from realvr.training.agreement import data_facts, refuse_differences
from realvr.training.held_out import held_out_questions, note_training_on
from realvr.training.records import DATA_FILE

if TYPE_CHECKING:
    from realvr.evaluation.questions import Questions
    from realvr.training.sections import SourceSettings
    from realvr.training.settings import TrainSettings
    from realvr.training.task import Ranks

RECORD = "data.json"
"""File of a run's folder that says what became of the rows."""


@dataclass(frozen=True)
class TrainingData:
    """Usable samples by source, what became of the others, and (on the first rank) what the files looked like."""

    samples: dict[str, list[Sample]]
    weights: dict[str, float]
    census: Census
    fingerprint: Fingerprint
    held_out: Questions | None = None
    """What the run is validated on."""

    def mixture(self, settings: TrainSettings, rank: int = 0, world: int = 1) -> Mixture[Sample]:
        """The mixture that the settings describe."""
        shares = self.weights if len(self.samples) > 1 or 0 in self.weights.values() else None
        other_data = settings.checkpoint.changed_data == "accept"
        return Mixture(
            self.samples, shares, seed=settings.data.seed, rank=rank, world=world, accept_other_data=other_data
        )


def training_data(settings: TrainSettings, ranks: Ranks) -> TrainingData:
    """Read every source once, print what can be used, and stop where too much cannot. Every rank calls it.

    Each rank lists the rows; the first alone looks at the images and hashes the files.
    """
    data, first = settings.data, ranks.rank == 0
    _same_commits(data.sources, ranks)
    lists: list[tuple[SourceSettings, list[Sample], Report]] = []
    for number, source in enumerate(data.sources):
        options = ReadOptions(
            images=Path(source.images) if source.images else None,
            policy=data.policy,
            check_images="none",
            duplicates=source.duplicates,
            boxes=source.boxes,
            columns=source.columns,
        )
        with Bar(f"data: {source.path}", 1.0, first, share=True) as bar:
            report = Report(on_progress=bar.set)
            try:
                lists.append((source, list(read(source.path, source.format, options, report)), report))
            except FileError as error:  # name the setting, not the flag of the data verbs
                text = str(error).replace("--columns", f"data.sources.{number}.columns")
                raise UserError(text.replace("--format", f"--data.sources.{number}.format")) from None
    images = census.distinct_images([sample for _, samples, _ in lists for sample in samples]) if first else []
    stats = census.image_stats(images)
    missing: set[str] = ranks.gather_objects(census.absent(images, stats))[0]
    kept: dict[str, list[Sample]] = {}
    weights: dict[str, float] = {}
    counted: list[SourceCensus] = []
    for number, (source, samples, report) in enumerate(lists):
        name = source.path if source.path not in kept else f"{source.path}#{number}"
        if source.ordered is not None:
            samples = [replace(sample, ordered=source.ordered) for sample in samples]
        kept[name], found = census.count(source.path, samples, report, missing)
        weights[name] = source.weight
        counted.append(found)
    refused: UserError | None = None
    for number, (source, found) in enumerate(zip(data.sources, counted, strict=True)):
        why = _why_refused(source, found, number, data.max_dropped) if source.weight > 0 and not refused else None
        refused = refused or why
        if first and why is None:  # the error has the line of its source
            print(f"data: {found.line()}", file=sys.stderr, flush=True)
    if refused:
        raise refused
    files = [path for _, _, report in lists for path in report.files if path.is_file()] if first else []
    files += [Path(source.path) for source in data.sources if first and Path(source.path).is_file()]
    hashes = census.hash_files(list(dict.fromkeys(files)), _known_hashes(settings.run.out))
    refuse_differences(ranks, data_facts(kept) if ranks.world > 1 else {})
    held_out = held_out_questions(settings.validation)
    if held_out is not None and first:
        note_training_on(held_out, data, kept)
    return TrainingData(kept, weights, Census(counted), Fingerprint(hashes, images, stats), held_out)


def _same_commits(sources: Sequence[SourceSettings], ranks: Ranks) -> None:
    """Every rank looks a dataset of the hub up by itself, and its owner may have changed it in between."""
    names = [source.path for source in sources if is_hub(source.path)]
    found = ranks.gather_objects([find(name).commit for name in names])
    for name, *commits in zip(names, *found, strict=True):
        if len(set(commits)) > 1:
            raise UserError(f"{name} was changed while the run was starting: start again, or name a revision with @")


def _why_refused(source: SourceSettings, found: SourceCensus, number: int, most: float) -> UserError | None:
    """The error of a source that loses more rows than allowed, or all of them, or a whole file that it lists."""
    why = census.too_much_lost(found.rows, found.usable, found.dropped, most, "data.max_dropped")
    if why is None:
        return None
    worst = max(found.dropped, key=lambda reason: found.dropped[reason], default=None)
    lost_file = next((reason for reason in found.dropped if reason in reasons.LISTED_FILE_LOST), None)
    shown = lost_file or worst
    where = f" (first: {found.first[shown]})" if shown else ""
    ways = reasons.ways_out(found.dropped, f"--data.sources.{number}.")
    ways.append(f"`{check_command(source)}` lists every dropped row")
    if found.usable:
        ways.append(f"--data.max-dropped {1 if lost_file else above(found.dropped_share)} trains on the others")
    return UserError(f"{found.line()}{where}: {why}. {'; '.join(ways)}")


def check_command(source: SourceSettings) -> str:
    """The command that lists every bad row of a source, read as training reads it."""
    words = ["realvr", "data", "check", source.path]
    if source.format != "auto":
        words += ["--format", source.format]
    if source.images:
        words += ["--images", str(source.images)]
    if source.boxes:
        words += ["--boxes", source.boxes]
    if source.columns:
        words += ["--columns", *(f"{name}={column}" for name, column in source.columns.items())]
    if source.duplicates != "drop":
        words += ["--duplicates", source.duplicates]
    return shlex.join([*words, "--quarantine", "bad.jsonl"])


def above(share: float) -> float:
    """A limit in whole per cent that admits the share."""
    return min(1.0, math.ceil(share * 100) / 100)


def _known_hashes(out: Path) -> dict[str, dict[str, Any]]:
    """Hashes that an earlier start of this run has taken; none where its record cannot be read."""
    try:
        return DATA_FILE.load(out / RECORD)["files"]
    except UserError:
        return {}
