"""A demo from beginning to end: its steps in several processes, then the numbers, a table and a report."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console

from realvr.demo.choice import choice
from realvr.demo.display import Display
from realvr.demo.files import is_done, open_demo_folder
from realvr.demo.plan import DemoSettings, steps_of
from realvr.demo.summary import DEMO_FILE, DemoSummary, collect, index
from realvr.demo.team import run_steps
from realvr.errors import UserError, require
from realvr.report.find import ARM_LIST
from realvr.report.page import build
from realvr.report.results import ARMS_FILE

"""Packages of extras that the demo uses."""


@dataclass(frozen=True)
class Finished:
    """``summary.json``, the path of the page, and the seconds it took."""

    summary: DemoSummary
    page: Path
    seconds: float


@dataclass(frozen=True)
class DemoOptions:
    """Where a demo runs, and how long.

    Args:
        out: Folder for everything; another demo in it is never overwritten.
        quick: Every step in seconds, to check an installation. The numbers mean nothing.
        seed: Seed of the pictures, of the order of the data and of the trainings.
        steps: Steps of the compared trainings; by default what arms.yaml says.
        workers: Processes, one core each; by default as many as there are cores, at most 4.
        take_over: Take OUT from a demo on another machine that is gone for certain.
    """

    out: Path = Path("runs/demo")
    quick: bool = False
    seed: int = 0
    steps: int | None = None
    workers: int | None = None
    take_over: bool = False


def demo(options: DemoOptions) -> Finished:
    """Train, evaluate and compare the arms of the demo, and write its report."""
    settings = demo_settings(options.quick, options.seed, options.steps)
    return run_demo(Path(options.out), settings, options.workers, options.take_over)


def demo_settings(quick: bool = False, seed: int = 0, steps: int | None = None) -> DemoSettings:
    """Settings of a demo; ``steps`` of the compared trainings, by default what ``arms.yaml`` says."""
    if seed < 0:
        raise UserError(f"--seed is {seed}: it must not be negative")
    if steps is not None and steps < 1:
        raise UserError(f"--steps is {steps}: at least one is needed")
    settings = DemoSettings(quick, seed)
    return settings if steps is None else settings.replaced(**{choice().steps: steps})


def run_demo(out: Path, settings: DemoSettings, workers: int | None = None, take_over: bool = False) -> Finished:
    """Do what is not done yet in ``out``; SIGTERM stops like Ctrl-C, after the processes have saved what they have."""
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: at least one process is needed")
    require(["accelerate"], "train", "the demo")  # before minutes of work, not after them
    count = workers or min(_cores(), 4)
    console = Console(stderr=True, soft_wrap=True)
    begun = time.monotonic()
    with _SigtermStops() as stops, open_demo_folder(out, settings, take_over):
        steps = steps_of(settings)
        done = {step.name for step in steps if is_done(out, step)}
        if done:
            console.print(f"{out}: {len(done)} of {len(steps)} steps were done before", highlight=False, markup=False)
        with Display(out, steps, done, count, console) as display:
            run_steps(out, steps, count, display, stops.check)
        summary = collect(out, settings)
        DEMO_FILE.dump(out / "summary.json", summary)
        ARMS_FILE.dump(out / ARM_LIST, index(summary))
        page = build((out,), out / "report", title="realvr demo")
    return Finished(summary, page, time.monotonic() - begun)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _SigtermStops:
    """SIGTERM like Ctrl-C: the processes of the demo save what they have."""

    def __enter__(self) -> Self:
        self._wished = False
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._wished = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Stop now if that was wished: Python drops an exception that a signal raises inside a finalizer."""
        if self._wished:
            raise KeyboardInterrupt
