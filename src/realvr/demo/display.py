"""How the demo goes: a bar for all steps and one for each that runs; single lines where nobody watches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from typing_extensions import override

from realvr.demo.choice import choice
from realvr.demo.files import last_metrics, progress
from realvr.demo.plan import Step
from realvr.demo.summary import headline
from realvr.demo.team import Watcher
from realvr.runs.progress import Bars, interval

_START = 6.0
"""Seconds until a process has imported what it needs."""


class Display(Watcher):
    """``done`` are the names of steps that an earlier run completed."""

    def __init__(self, folder: Path, steps: Sequence[Step], done: set[str], workers: int, console: Console) -> None:
        self.folder, self.steps, self.workers, self.console = folder, list(steps), workers, console
        self.complete = set(done)
        self.begun_at = time.monotonic()
        self.own_cost = 0.0
        """Cost of what this run has completed, which tells how fast the machine is."""
        self._from: dict[str, tuple[float, int]] = {}
        self._every, self._said = interval(), time.monotonic()
        self.bars = Bars(console)
        self._total = self.bars.add("demo", sum(step.cost for step in steps))
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Display:
        self.bars.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.__exit__()

    # ------------------------------------------------------------------ what happens

    @override
    def begun(self, step: Step) -> None:
        already = progress(self.folder, step)
        self._from[step.name] = (time.monotonic(), already)
        self._tasks[step.name] = self.bars.add(f"  {step.title}", step.units or None)
        if already and not self.console.is_terminal:
            self._say(f"{step.title}: goes on after {already} of {step.units}")

    @override
    def tick(self, running: Sequence[Step]) -> None:
        if not self.console.is_terminal:
            self._lines(running)
            return
        for step in running:
            count = progress(self.folder, step)
            self.bars.set(self._tasks[step.name], count, note=self._state(step, count))
        partial = sum(step.cost * self._share(step) for step in running)
        before = sum(step.cost for step in self.steps if step.name in self.complete)
        self.bars.set(self._total, before + partial, note=self._overall(running))

    def _lines(self, running: Sequence[Step]) -> None:
        """Where nobody watches: what runs, about every 30 seconds."""
        if not self._every or time.monotonic() - self._said < self._every:
            return
        states = [f"{step.title} {self._state(step, progress(self.folder, step))}".strip() for step in running]
        self._say(f"{self._overall(running)}; running: {'; '.join(states)}")

    @override
    def finished(self, step: Step, outcome: dict[str, Any]) -> None:
        self.complete.add(step.name)
        self.own_cost += step.cost
        self.bars.remove(self._tasks.pop(step.name))
        number = f"step {len(self.complete)} of {len(self.steps)}"
        found = headline(self.folder, step)
        text = f"{number}  {step.title}{': ' + found if found else ''}  ({clock(outcome['seconds'])})"
        left = self.seconds_left([other for other in self.steps if other.name in self._tasks])
        self._say(text if self.console.is_terminal else f"{text}  ~{clock(left)} left")

    # ------------------------------------------------------------------ how long still

    def seconds_left(self, running: Sequence[Step]) -> float:
        """Of all steps, from their costs and the speed so far."""
        elapsed = time.monotonic() - self.begun_at
        partial = sum(step.cost * self._new_share(step) for step in running)
        open_cost = sum(step.cost for step in self.steps if step.name not in self.complete)
        open_cost -= sum(step.cost * self._share(step) for step in running)
        # Twenty seconds at the speed that was measured when the costs were, then more and more the speed of this run.
        speed = (self.own_cost + partial + 20.0 * self.workers) / (max(elapsed - _START, 0.0) + 20.0)
        return open_cost / speed + max(_START - elapsed, 0.0)

    def _overall(self, running: Sequence[Step]) -> str:
        number = min(len(self.complete) + 1, len(self.steps))
        return f"step {number} of {len(self.steps)}, ~{clock(self.seconds_left(running))} left"

    def _share(self, step: Step) -> float:
        return progress(self.folder, step) / step.units if step.units else 0.0

    def _new_share(self, step: Step) -> float:
        already = self._from[step.name][1]
        return max(progress(self.folder, step) - already, 0) / step.units if step.units else 0.0

    def _state(self, step: Step, count: int) -> str:
        since, already = self._from[step.name]
        parts = [f"{count}/{step.units}"] if step.units else []
        if step.units and count > already:
            left = (time.monotonic() - since) / (count - already) * (step.units - count)
            parts.append(f"eta {clock(left)}")
        if step.training is not None:
            name = choice().recipes[step.training.recipe].watch
            value = last_metrics(self.folder, step).get(name)
            parts += [f"{name} {value:.3g}"] if value is not None else []
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self.console.print(text, highlight=False, markup=False)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
