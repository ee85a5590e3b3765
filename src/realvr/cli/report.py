"""``realvr report``: a page from the results of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from realvr.errors import UserError
from realvr.runs.progress import busy


def report(
    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN…", help_behavior_hint="(required)")
    ],
    out: Path,
    title: str = "realvr report",
    baseline: str | None = None,
    policy: str | None = None,
) -> int:
    """Write a page with tables and figures from saved results; no model is run.

    RUN is any folder: training runs, evaluations, counterfactual pairs and latent exchange are found in it and below
    it, and sorted into arms by the model they are about. The page is one file that opens from the disk, without a
    server or a network; the same numbers are beside it in data.json.

    Examples:
      realvr report runs/demo --out runs/demo/report
      realvr report runs/rl runs/eval runs/pairs --out runs/report --baseline rl
      realvr report runs/eval --policy vlmevalkit --out runs/report-vlmevalkit

    Args:
        runs: Folders with results.
        out: Folder for index.html and data.json.
        title: Heading of the page.
        baseline: Name of the arm that the others are compared with; by default LVR-RL, else the first.
        policy: Scores under this policy, as realvr score --policy wrote them; by default each run's own.
    """
    if not runs:
        raise UserError("no run named: realvr report RUN… --out DIR")
    from realvr.report.page import build

    with busy("writing the report"):
        page = build(runs, out, title=title, baseline=baseline, policy=policy)
    print(page)
    return 0
