"""``realvr demo``: from the packaged checkpoints to a report, on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from realvr.demo import run
from realvr.demo.display import clock
from realvr.demo.words import table
from realvr.evaluation.tables import wide_console

INTERRUPTED = 130


@dataclass(frozen=True)
class DemoCommand(run.DemoOptions):
    """Options of ``realvr demo``.

    Args:
        steps: Steps of LVR-RL and ReaLVR; by default 100, with --quick 4.
    """


def demo(settings: DemoCommand) -> int:
    """Train, evaluate and compare small models of the paper's methods on this machine, in about five minutes.

    From the packaged base (mini-base) a short Stage 1; from the packaged Stage-1 checkpoint (mini) LVR-RL and ReaLVR;
    then five mini-benchmarks with the latent ablations, counterfactual pairs and latent exchange, and a report whose
    path is printed last. Needs no network and no GPU. The same command goes on where a run was stopped.

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
    shown.print(table(finished.summary, shown.width))
    for note in finished.summary["notes"]:
        shown.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    took = f"took {clock(finished.seconds)}; numbers in {settings.out / 'summary.json'}"
    shown.print(took, highlight=False, soft_wrap=True)
    print(finished.page)
    return 0
