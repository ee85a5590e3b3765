"""Counterfactual pairs: an original and an edited picture under one question, with the two right answers.

Whether an edit changes the answer is decided here from the canonical answers (``y0 != y1``), never taken from a tag; a
tag that says otherwise is reported. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from realvr.answers import canonical_answer, equal
from realvr.data.readers.base import ReadOptions
from realvr.data.reading import Report
from realvr.data.sample import Sample
from realvr.diagnostics.folders import BENCHMARK, read_all
from realvr.errors import UserError
from realvr.imaging.pictures import picture_keys

NO_EDIT = "pairs"
"""Edit type of pairs whose data names none (MMVP)."""
_SHOWN = 3


@dataclass(frozen=True)
class Pair:
    """Two views of one question. Both truths are canonical: a letter where there are options."""

    edit: str
    original: Sample
    edited: Sample

    @property
    def id(self) -> str:
        """The tag that both samples carry."""
        return str(self.original.pair)

    @property
    def views(self) -> tuple[Sample, Sample]:
        """The original first."""
        return self.original, self.edited

    @cached_property
    def truths(self) -> tuple[str, str]:
        """``(y0, y1)``."""
        first, second = (canonical_answer(view.answer, view.choices) for view in self.views)
        if first is None or second is None:
            raise UserError(f"pair {self.id}: a right answer names no option of its question")
        return first, second

    @property
    def changed(self) -> bool:
        """Whether the pair is in C (the right answer changes) or in U."""
        return not equal(*self.truths, self.original.choices)

    @property
    def parts_at(self) -> int | None:
        """For a pair of trails, the number (from 1) of the first cell at which they differ; None where that is not
        known."""
        trail = self.original.meta.get("trail")
        found = trail.get("parts_at") if isinstance(trail, dict) else None
        return found if isinstance(found, int) else None


@dataclass(frozen=True)
class Single:
    """One question about its own pictures, with what a `Pair` has: for a diagnostic that takes both."""

    original: Sample

    @property
    def id(self) -> str:
        """The sample's."""
        return self.original.id

    @property
    def edit(self) -> str:
        """There is none."""
        return ""

    @property
    def views(self) -> tuple[Sample, ...]:
        """The only one."""
        return (self.original,)

    @cached_property
    def truths(self) -> tuple[str, ...]:
        """The right answer."""
        found = canonical_answer(self.original.answer, self.original.choices)
        if found is None:
            raise UserError(f"{self.id}: the right answer names no option of its question")
        return (found,)


Asked = Pair | Single


def benchmark_of(item: Asked) -> str:
    """Benchmark that a question is of: the folder that it was read from where there are several, else its task."""
    return item.original.tags.get(BENCHMARK) or item.original.task


@dataclass
class PairReport:
    """What was left out of the pairs, and what looked wrong, by pair id."""

    single: list[str] = field(default_factory=list)
    """Samples without a pair id."""
    incomplete: list[str] = field(default_factory=list)
    """Not exactly one original and one edited view."""
    different: list[str] = field(default_factory=list)
    """Question or options differ between the views."""
    unreadable: list[str] = field(default_factory=list)
    """A right answer that names no option."""
    contradictions: list[str] = field(default_factory=list)
    """The tag ``changed`` disagrees with the answers. The answers count and the pair is kept."""
    dropped_rows: int = 0
    """Rows that could not be read at all."""

    def counts(self) -> dict[str, int]:
        """How many of each, for the records."""
        return {name: value if isinstance(value, int) else len(value) for name, value in vars(self).items()}

    def lines(self) -> list[str]:
        """One sentence for each thing that is not zero."""
        told = {
            "single": "samples have no pair and were left out",
            "incomplete": "pairs lack one of their two views and were left out",
            "different": "pairs ask different questions of their two views and were left out",
            "unreadable": "pairs have a right answer that names no option and were left out",
            "contradictions": "pairs have a tag 'changed' that contradicts their answers; the answers count",
        }
        lines = (
            [f"{self.dropped_rows} rows could not be read (realvr data check says why)"] if self.dropped_rows else []
        )
        for name, sentence in told.items():
            ids: list[str] = getattr(self, name)
            if ids:
                more = ", …" if len(ids) > _SHOWN else ""
                lines.append(f"{len(ids)} {sentence}: {', '.join(ids[:_SHOWN])}{more}")
        return lines


def read_pairs(path: str | Path, limit: int | None = None) -> tuple[list[Pair], PairReport]:
    """Pairs of any file or folder that `realvr.data.read` reads, edit by edit in file order.

    ``limit`` keeps the first so many of each edit. An input without a single pair is an error.
    """
    _, pairs, report = _read(path, limit)
    if not pairs:
        raise UserError(
            f"{path}: no counterfactual pair found. Two samples that share 'pair', tagged view=original and "
            "view=edited, make one; `realvr world make OUT --split counterfactual` draws some"
            + "".join(f"; {line}" for line in report.lines())
        )
    return first_of_each(pairs, limit), report


def read_asked(path: str | Path, limit: int | None = None) -> tuple[list[Asked], PairReport]:
    """Pairs, and behind them the samples of no pair."""
    every, pairs, report = _read(path, limit)
    found = with_singles(every, pairs, report)
    if not found:
        raise UserError(f"{path}: no sample can be read (realvr data check {path} says why)")
    return first_of_each(found, limit), report


def _read(path: str | Path, limit: int | None) -> tuple[list[Sample], list[Pair], PairReport]:
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}: at least one pair per edit is needed")
    reading = Report()
    # A picture that cannot be used is met when it is asked about, and its pair stays in the denominators.
    options = ReadOptions(check_images="none", broken_images="keep")
    every = list(read_all(path, options, reading))
    pairs, report = pair_up(every)
    report.dropped_rows = sum(reading.dropped.values())
    return every, pairs, report


def pair_up(samples: Iterable[Sample]) -> tuple[list[Pair], PairReport]:
    """Pairs of these samples, edits in order of their first appearance.

    Views are told apart by the tag ``view``; where both samples of a pair have none (MMVP), the first is the original.
    """
    report = PairReport()
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.pair is None:
            report.single.append(sample.id)
        else:
            groups.setdefault(sample.pair, []).append(sample)
    by_edit: dict[str, list[Pair]] = {}
    for name, members in groups.items():
        pair = _pair(name, members, report)
        if pair is not None:
            by_edit.setdefault(pair.edit, []).append(pair)
    return [pair for pairs in by_edit.values() for pair in pairs], report


def _pair(name: str, members: Sequence[Sample], report: PairReport) -> Pair | None:
    if len(members) != 2:
        report.incomplete.append(name)
        return None
    views = [member.tags.get("view") for member in members]
    if views == ["edited", "original"]:
        members = members[::-1]
    elif views not in (["original", "edited"], [None, None]):
        report.incomplete.append(name)
        return None
    original, edited = members
    if (original.question, original.choices) != (edited.question, edited.choices):
        report.different.append(name)
        return None
    pair = Pair(original.tags.get("edit") or NO_EDIT, original, edited)
    try:
        changed = pair.changed
    except UserError:
        report.unreadable.append(name)
        return None
    tags = {member.tags["changed"] for member in members if "changed" in member.tags}
    if tags - {"yes" if changed else "no"}:
        report.contradictions.append(name)
    return pair


def changed_pairs(pairs: Sequence[Pair], data: Path) -> list[Pair]:
    """Pairs whose right answer changes; an error where there is none."""
    changed = [pair for pair in pairs if pair.changed]
    if not changed:
        raise UserError(f"{data}: the right answer changes in none of its {len(pairs)} pairs; there is nothing to swap")
    return changed


def with_singles(samples: Iterable[Sample], pairs: Sequence[Pair], report: PairReport) -> list[Asked]:
    """The pairs, and behind them the samples of no pair; those without a readable answer are counted."""
    report.single.clear()  # they are not left out
    kept: list[Asked] = [*pairs]
    for sample in samples:
        if sample.pair is not None or not sample.shown:
            continue
        if canonical_answer(sample.answer, sample.choices) is None:
            report.unreadable.append(sample.id)
        else:
            kept.append(Single(sample))
    return kept


T = TypeVar("T", bound=Asked)


def first_of_each(pairs: Sequence[T], limit: int | None) -> list[T]:
    """At most ``limit`` pairs of each edit, in order; of several benchmarks, of each edit of each."""
    if limit is None:
        return list(pairs)
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for pair in pairs:
        kind = pair.original.tags.get(BENCHMARK, ""), pair.edit
        seen[kind] += 1
        if seen[kind] <= limit:
            kept.append(pair)
    return kept


def fingerprint(pairs: Iterable[Asked]) -> str:
    """SHA-256 over what is asked, in order, and the right answers; the pictures are not read."""
    digest = hashlib.sha256()
    for pair in pairs:
        asked = [pair.id, pair.edit, *(view.id for view in pair.views), pair.original.question, *pair.original.choices]
        digest.update(json.dumps([*asked, *pair.truths]).encode())
    return digest.hexdigest()


def unrelated(pairs: Sequence[Pair]) -> list[Pair | None]:
    """For each pair another one, whose picture serves as the unrelated control: the first, from half way round the list
    on, that shows as many pictures and none of its own (data may edit one scene in several ways). None where there is
    none."""
    known = iter(picture_keys([image for pair in pairs for view in pair.views for image in view.images]))
    keys = [{next(known) for view in pair.views for _ in view.images} for pair in pairs]
    return [_control(pairs, keys, index) for index in range(len(pairs))]


def _control(pairs: Sequence[Pair], keys: Sequence[set[Hashable]], index: int) -> Pair | None:
    count, shown = len(pairs), len(pairs[index].original.images)
    for step in range(count):
        other = (index + max(count // 2, 1) + step) % count
        if len(pairs[other].original.images) == shown and not keys[other] & keys[index]:
            return pairs[other]
    return None
