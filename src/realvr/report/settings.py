"""What ``realvr report`` is asked to do, and the report from it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realvr.errors import UserError
from realvr.runs.progress import busy


@dataclass(frozen=True)
class ReportSettings:
    """Folders with results, and how the page shows them.

    Args:
        runs: Folders with results.
        out: Folder for index.html and data.json.
        title: Heading of the page.
        baseline: Name of the arm that the others are compared with; by default LVR-RL, else the first.
        policy: Scores under this policy, as realvr score --policy wrote them; by default each run's own.
    """

    runs: Sequence[Path]
    out: Path
    title: str = "realvr report"
    baseline: str | None = None
    policy: str | None = None


def write_report(settings: ReportSettings) -> Path:
    """Write the page; returns its path."""
    if not settings.runs:
        raise UserError("no run named: realvr report RUN… --out DIR")
    from realvr.report.page import build

    runs = tuple(map(Path, settings.runs))
    with busy("writing the report"):
        page = build(runs, settings.out, title=settings.title, baseline=settings.baseline, policy=settings.policy)
    return Path(page)
