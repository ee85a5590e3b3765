"""``realvr report``: a page from the results of finished runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from realvr.cli.arguments import Policy
from realvr.report.settings import ReportSettings, write_report


@dataclass(frozen=True)
class ReportCommand(ReportSettings):
    """Options of ``realvr report``."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN…", help_behavior_hint="(required)")
    ]
    policy: Policy = None


def report(settings: ReportCommand) -> int:
    """Write a page with tables and figures from saved results; no model is run.

    RUN is any folder: training runs, evaluations, counterfactual pairs and latent exchange are found in it and below
    it, and sorted into arms by the model they are about. The page is one file that opens from the disk, without a
    server or a network; the same numbers are beside it in data.json.

    Examples:
      realvr report runs/demo --out runs/demo/report
      realvr report runs/rl runs/eval runs/pairs --out runs/report --baseline rl
      realvr report runs/eval --policy vlmevalkit --out runs/report-vlmevalkit
    """
    print(write_report(settings))
    return 0
