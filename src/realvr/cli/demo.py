"""``realvr demo``: from the packaged checkpoints to a report, on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from realvr.demo import run
from realvr.demo.display import clock
from realvr.demo.tables import tables
from realvr.evaluation.tables import wide_console
from realvr.runs.launching import INTERRUPTED


@dataclass(frozen=True)
class DemoCommand(run.DemoOptions):
    """Options of ``realvr demo``.

    Args:
        steps: Steps of each Stage 2; by default 60, with --quick 4.
    """


def demo(settings: DemoCommand) -> int:
    """Show on this machine, in about four minutes, that latents can be read, followed and moved.

    The packaged models answer questions that take several looks, with their latents and with others; Stage 2 starts
    where trails get longer than Stage 1 has shown; five mini-benchmarks, edited pairs, latent exchange, steering; and a
    report whose path is printed last. Needs no network and no GPU. The same command goes on where a run was stopped.

    Examples:
      realvr demo
      realvr demo --quick --out runs/quick
      realvr demo --steps 200 --out runs/longer
    """
    try:
        finished = run.demo(settings)
    except KeyboardInterrupt:
        kept = f"what was done is kept in {settings.out}, and the same command goes on"
        print(f"realvr: stopped; {kept}", file=sys.stderr)
        return INTERRUPTED
    shown = wide_console()
    for line in finished.summary["leading"]:
        shown.print(line, highlight=False, markup=False, soft_wrap=True)
    for table in tables(finished.summary, shown.width):
        shown.print(table)
    for note in finished.summary["notes"]:
        shown.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    took = f"took {clock(finished.seconds)}; numbers in {settings.out / 'summary.json'}"
    shown.print(took, highlight=False, soft_wrap=True)
    print(finished.page)
    return 0
