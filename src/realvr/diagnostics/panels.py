"""Panels of the case browser, made of saved records: what every diagnostic has measured of the samples of a page.

Records are joined by the ids of samples and pairs, so only those of a run on the same data with the same number of
latents count; the page says so where there are others. Journals are read line by line, and only records of the page's
cases are kept. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realvr.diagnostics.base import Diagnostic
from realvr.errors import UserError
from realvr.registry import place_of
from realvr.runs.journal import Kind, Record, records_of
from realvr.widgets.browser import Measured, Panel

AGGREGATE_ONLY = {
    "variation": "how far latents differ between pictures, and between questions on one picture",
    "task-structure": "whether the task can be read from the states of all questions",
    "rank": "how many directions the latents of all questions vary in",
}
"""Diagnostics whose numbers exist over many questions only, and what these are: a case has nothing to show of them."""


@dataclass(frozen=True)
class Source:
    """Where one diagnostic left its records, and what it was run with."""

    kind: type[Diagnostic]
    folder: Path
    settings: Mapping[str, Any]

    @property
    def journal(self) -> Path:
        """Its records."""
        return self.folder / f"{self.kind.name}.jsonl"


def join(own: Source, sources: Sequence[Source], ids: Collection[str]) -> list[Measured]:
    """What ``sources`` have of the samples ``ids``, which ``own`` has chosen; diagnostics without a panel are left
    out."""
    return [_measured(own, source, ids) for source in sources if has_panel(source.kind)]


def has_panel(kind: type[Diagnostic]) -> bool:
    """Whether a diagnostic shows something of single cases."""
    return kind.panel is not Diagnostic.panel or kind.panels is not Diagnostic.panels


def _measured(own: Source, source: Source, ids: Collection[str]) -> Measured:
    kind = source.kind
    missing = _other_run(own.settings, source.settings)
    if not missing and not source.journal.is_file():
        missing = f"its records ({source.journal.name}) are not beside its numbers"
    panels = {} if missing else _panels(source, ids)
    return Measured(kind.name, kind.title, kind.question, panels, missing)


def _other_run(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Why records of one run are none of the other's samples; empty where nothing speaks against it."""
    data = [one.get("data") for one in (first, second)]
    if all(data) and len({str(Path(str(path)).resolve()) for path in data}) > 1:
        return f"it was measured on other data ({data[1]})"
    latents = [one.get("latents") for one in (first, second)]
    if None not in latents and latents[0] != latents[1]:
        return f"it was measured with K = {latents[1]}, the cases with K = {latents[0]}"
    return ""


def _panels(source: Source, ids: Collection[str]) -> dict[str, list[Panel]]:
    diagnostic, found = source.kind(), dict[str, list[Record]]()
    for record in records_of(source.journal, Kind(diagnostic.key)):
        name = record.get(diagnostic.item)
        if name in ids:
            found.setdefault(str(name), []).append(record)
    made = {name: _panels_of(diagnostic, records, source.journal) for name, records in found.items()}
    return {name: panels for name, panels in made.items() if panels}


def _panels_of(diagnostic: Diagnostic, records: Sequence[Record], journal: Path) -> list[Panel]:
    """The panels of one case. What cannot be made is the fault of the file, or of a user's own diagnostic."""
    try:
        made = diagnostic.panels(records)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{journal}: what is recorded of {records[0][diagnostic.item]!r:.80} makes no panel ({what}); delete its "
            f"lines and run the diagnostic again, or correct panel of {place_of(type(diagnostic))}"
        ) from error
    panels = [panel for panel in made if panel is not None]
    if not all(isinstance(panel, Panel) for panel in panels):
        raise UserError(f"{place_of(type(diagnostic))}: panel must return a Panel of realvr.widgets.browser, or None")
    return panels
