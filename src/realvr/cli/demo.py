"""``realvr demo``: from the packaged checkpoints to a report, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

INTERRUPTED = 130


def demo(
    out: Path = Path("runs/demo"),
    quick: bool = False,
    seed: int = 0,
    steps: int | None = None,
    workers: int | None = None,
    take_over: bool = False,
) -> int:
    """Train, evaluate and compare small models of the paper's methods on this machine, in about five minutes.

    From the packaged base (mini-base) a short Stage 1; from the packaged Stage-1 checkpoint (mini) LVR-RL and ReaLVR;
    then five mini-benchmarks with the latent ablations, counterfactual pairs and latent exchange, and a report whose
    path is printed last. Needs no network and no GPU. The same command goes on where a run was stopped.

    Examples:
      realvr demo
      realvr demo --quick --out runs/quick
      realvr demo --steps 200 --out runs/longer

    Args:
        out: Folder for everything; another demo in it is never overwritten.
        quick: Every step in seconds, to check an installation. The numbers mean nothing.
        seed: Seed of the pictures, of the order of the data and of the trainings.
        steps: Steps of LVR-RL and ReaLVR; by default 100, with --quick 4.
        workers: Processes, one core each; by default as many as there are cores, at most 4.
        take_over: Take OUT from a demo on another machine that is gone for certain.
    """
    from realvr.demo.display import clock
    from realvr.demo.run import demo_settings, run_demo
    from realvr.demo.words import table
    from realvr.evaluation.tables import wide_console

    try:
        finished = run_demo(Path(out), demo_settings(quick, seed, steps), workers, take_over)
    except KeyboardInterrupt:
        print(f"realvr: stopped; what was done is kept in {out}, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    shown = wide_console()
    shown.print(table(finished.summary, shown.width))
    for note in finished.summary["notes"]:
        shown.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    took = f"took {clock(finished.seconds)}; numbers in {out / 'summary.json'}"
    shown.print(took, highlight=False, soft_wrap=True)
    print(finished.page)
    return 0
