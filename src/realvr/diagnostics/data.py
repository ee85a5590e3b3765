"""What a diagnostic is asked about: samples or pairs of a file, those that have what it needs. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest

from realvr.data.boxes import unshown_box
from realvr.data.readers.base import ReadOptions
from realvr.data.reading import Report
from realvr.data.sample import Sample
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.folders import BENCHMARK, read_all
from realvr.diagnostics.pairs import (
    Asked,
    Pair,
    PairReport,
    fingerprint,
    first_of_each,
    pair_up,
    read_asked,
    read_pairs,
    with_singles,
)
from realvr.diagnostics.parts import Item, Skip
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.errors import UserError

# A picture that cannot be used is met when it is read, and its sample is counted among the errors.
_OPTIONS = ReadOptions(check_images="none", broken_images="keep")


@dataclass(frozen=True)
class Data:
    """Samples or pairs, and what was left out of them."""

    items: list[Item]
    digest: str
    """SHA-256 over what is asked."""
    left_out: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def read_data(diagnostic: Diagnostic, settings: DiagnoseSettings) -> Data:
    """What a diagnostic measures, samples chosen as a suite of tests does; a `UserError` where the data lacks what it
    needs."""
    if diagnostic.needs.pairs:
        reading = read_asked if diagnostic.needs.singles else read_pairs
        pairs, report = reading(settings.data, settings.limit)
        if diagnostic.needs.boxes and not any(view.boxes for pair in pairs for view in pair.views):
            raise UserError(_no_boxes(diagnostic, settings.data, len(pairs)))
        return Data(pairs, fingerprint(pairs), report.counts(), report.lines())
    source = Source(settings.data)
    found = source.take(diagnostic, settings.limit)
    told = [f"{len(source.pairs)} pairs: of each only the original picture is asked about, edits in turn"]
    return replace(found, lines=list(dict.fromkeys([*source.lines(), *(told if source.pairs else ()), *found.lines])))


def picture_key(sample: Sample) -> str:
    """Names the pictures of a sample by their pixels: equal for questions about the same ones."""
    shown = [sample.images[place].picture() for place in sample.shown]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


class Source:
    """Data that several diagnostics share, read once. Where there are pairs, diagnostics on samples get the original
    views, edits and benchmarks taken in turn, so that a smaller number is a fair part of a larger one."""

    def __init__(self, path: object) -> None:
        self.path = path
        self._rows = Report()

    @cached_property
    def _every(self) -> list[Sample]:
        found = list(read_all(str(self.path), _OPTIONS, self._rows))
        if not found:
            raise UserError(f"{self.path}: no sample can be read (realvr data check {self.path} says why)")
        return found

    @cached_property
    def _paired(self) -> tuple[list[Pair], PairReport]:
        pairs, report = pair_up(self._every)
        report.dropped_rows = sum(self._rows.dropped.values())
        return pairs, report

    @property
    def pairs(self) -> list[Pair]:
        """All pairs; empty where the data has none."""
        return self._paired[0]

    @cached_property
    def _several(self) -> bool:
        return len({sample.tags.get(BENCHMARK) for sample in self._every}) > 1

    @cached_property
    def samples(self) -> list[Sample]:
        """All samples; of pairs, the original views. Those of no pair count where the data is several benchmarks."""
        if not self.pairs and not self._several:
            return self._every
        asked: list[Asked] = with_singles(self._every, self.pairs, PairReport()) if self._several else [*self.pairs]
        kinds: dict[tuple[str, str], list[Sample]] = {}
        for one in asked:
            kinds.setdefault((one.original.tags.get(BENCHMARK, ""), one.edit), []).append(one.original)
        return [sample for sample in chain.from_iterable(zip_longest(*kinds.values())) if sample is not None]

    def lines(self) -> list[str]:
        """A sentence for everything that was left out."""
        dropped = sum(self._rows.dropped.values())
        if self.pairs:
            report = self._paired[1]
            return (replace(report, single=[]) if self._several else report).lines()
        return [f"{dropped} rows could not be read (realvr data check says why)"] if dropped else []

    def take(self, diagnostic: Diagnostic, limit: int | None) -> Data:
        """What one diagnostic measures; raises `Skip` where the data lacks what it needs."""
        if not diagnostic.needs.pairs:
            try:
                return _samples(diagnostic, self.samples, self.path, limit, sum(self._rows.dropped.values()))
            except UserError as error:
                raise Skip(str(error)) from None
        if diagnostic.needs.singles:
            report = replace(self._paired[1], single=[], unreadable=[*self._paired[1].unreadable])
            both = first_of_each(with_singles(self._every, self.pairs, report), limit)
            return Data(both, fingerprint(both), report.counts())
        if not self.pairs:
            raise Skip(
                f"{self.path} has no counterfactual pairs (two samples that share 'pair'; `realvr world make OUT "
                "--split counterfactual` draws some)"
            )
        pairs = first_of_each(self.pairs, limit)
        if diagnostic.needs.boxes and not any(view.boxes for pair in pairs for view in pair.views):
            raise Skip(_no_boxes(diagnostic, self.path, len(pairs)))
        return Data(pairs, fingerprint(pairs), self._paired[1].counts())


def _samples(diagnostic: Diagnostic, every: Sequence[Sample], path: object, limit: int | None, dropped: int) -> Data:
    samples = [sample for sample in every if sample.boxes] if diagnostic.needs.boxes else list(every)
    if diagnostic.needs.boxes and not samples:
        raise UserError(_no_boxes(diagnostic, path, len(every)))
    if not samples:
        raise UserError(f"{path}: no sample can be read (realvr data check {path} says why)")
    left_out = {"dropped_rows": dropped, "without_boxes": len(every) - len(samples)}
    told = {
        "dropped_rows": "rows could not be read (realvr data check says why)",
        "without_boxes": "samples have no evidence boxes and were left out",
    }
    lines = [f"{left_out[name]} {sentence}" for name, sentence in told.items() if left_out[name]]
    samples = samples[:limit]
    digest = hashlib.sha256()
    for sample in samples:
        boxes = [[box.image, *box.xyxy] for box in sample.boxes]
        digest.update(json.dumps([sample.id, sample.question, *sample.choices, sample.answer, boxes]).encode())
    return Data(samples, digest.hexdigest(), left_out, lines)


def with_shown_boxes(samples: Iterable[Sample]) -> tuple[list[Sample], list[tuple[Sample, str]]]:
    """Samples whose boxes are on pictures that are shown, and the others with the reason."""
    shown: list[Sample] = []
    hidden: list[tuple[Sample, str]] = []
    for sample in samples:
        problem = unshown_box(sample)
        if problem is None:
            shown.append(sample)
        else:
            hidden.append((sample, f"{sample.source or sample.id}: {problem}"))
    return shown, hidden


def _no_boxes(diagnostic: Diagnostic, path: object, count: int) -> str:
    return (
        f"{path}: none of its {count} samples has evidence boxes, which diagnostic {diagnostic.name} needs: "
        "give data with boxes (realvr data show DATA draws them; `realvr world make OUT --split validation` makes some)"
    )
