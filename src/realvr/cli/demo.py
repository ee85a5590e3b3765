"""``realvr demo``: from the packaged checkpoints to a report, on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from realvr.demo.plan import DemoSettings, quick_settings, steps_of
from realvr.errors import UserError

INTERRUPTED = 130
NEEDED = {"accelerate": "train"}
"""Packages of extras that the demo uses."""


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
    settings = _settings(quick, seed, steps)
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: at least one process is needed")
    _check_packages()
    count = workers or min(_cores(), 4)
    try:
        with _sigterm_stops():
            return _run(Path(out), settings, count, take_over)
    except KeyboardInterrupt:
        print(f"realvr: stopped; what was done is kept in {out}, and the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _settings(quick: bool, seed: int, steps: int | None) -> DemoSettings:
    if seed < 0:
        raise UserError(f"--seed is {seed}: it must not be negative")
    if steps is not None and steps < 1:
        raise UserError(f"--steps is {steps}: at least one is needed")
    settings = quick_settings(seed) if quick else DemoSettings(seed=seed)
    return settings if steps is None else replace(settings, rl_steps=steps)


def _check_packages() -> None:
    """Before minutes of work, not after them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({NEEDED[name] for name in missing}))
        raise UserError(f"the demo needs {' and '.join(missing)}: pip install 'realvr[{extras}]'")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _sigterm_stops:
    """SIGTERM like Ctrl-C: the processes of the demo save what they have."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def _run(out: Path, settings: DemoSettings, workers: int, take_over: bool) -> int:
    from realvr.demo.display import Display, clock
    from realvr.demo.files import is_done, open_demo_folder
    from realvr.demo.summary import collect, index, table
    from realvr.demo.team import run_steps
    from realvr.evaluation.tables import wide_console
    from realvr.runs.files import write_json

    console = Console(stderr=True, soft_wrap=True)
    begun = time.monotonic()
    with open_demo_folder(out, settings, take_over):
        steps = steps_of(settings)
        done = {step.name for step in steps if is_done(out, step)}
        if done:
            console.print(f"{out}: {len(done)} of {len(steps)} steps were done before", highlight=False, markup=False)
        with Display(out, steps, done, workers, console) as display:
            run_steps(out, steps, workers, display)
        summary = collect(out, settings)
        write_json(out / "summary.json", summary)
        write_json(out / "demo.json", index(summary))
        page = write_report(out)
    shown = wide_console()
    shown.print(table(summary, shown.width))
    for note in summary["notes"]:
        shown.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    shown.print(
        f"took {clock(time.monotonic() - begun)}; numbers in {out / 'summary.json'}", highlight=False, soft_wrap=True
    )
    print(page)
    return 0


def write_report(out: Path) -> Path:
    """The page of a finished demo; returns its path."""
    from realvr.report.page import build

    return Path(build((out,), out / "report", title="realvr demo"))
