"""Processes that share the steps of a demo: each gets the next step whose needs are complete. No torch here."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from realvr.demo.files import is_done, set_done
from realvr.demo.plan import Step
from realvr.errors import UserError

_TICK = 0.4
_FAREWELL = 20.0
"""Seconds that a process has to save its work when the demo is stopped."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Watcher:
    """Receives progress. This one ignores it."""

    def begun(self, step: Step) -> None:
        """A step was given to a process."""
        ...

    def tick(self, running: Sequence[Step]) -> None:
        """Called a few times a second with the steps that run."""
        ...

    def finished(self, step: Step, outcome: dict[str, Any]) -> None:
        """A step is done."""
        ...


class Worker:
    """One process, idle or with a step."""

    def __init__(self, folder: Path, number: int) -> None:
        self.log = folder / "logs" / f"process-{number}.log"
        self.log.parent.mkdir(exist_ok=True)
        self.step: Step | None = None
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "realvr.demo.worker", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the demo, which lets its processes save first
                env=os.environ | ENVIRONMENT,
            )

    def give(self, step: Step) -> None:
        """Begin a step."""
        self.step = step
        self._say(step.name)

    def leave(self) -> None:
        """End an idle process."""
        self._say("")

    def _say(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended, which is noticed when its answer is read
            pass

    def outcome(self) -> dict[str, Any]:
        """Its answer, which must be there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self.process.wait()
        what = f"signal {-code}; was there enough memory?" if code < 0 else f"exit code {code}"
        return {"ok": False, "error": f"a process of the demo ended ({what})", "internal": True}


def run_steps(
    folder: Path,
    steps: Sequence[Step],
    workers: int,
    watcher: Watcher | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Do the steps that are not complete, at most ``workers`` at a time; returns when all are.

    ``check`` is called a few times a second, and what it raises stops the demo.
    """
    watcher = watcher or Watcher()
    done = {step.name for step in steps if is_done(folder, step)}
    waiting = [step for step in steps if step.name not in done]
    team: list[Worker] = []
    try:
        while waiting or any(worker.step for worker in team):
            check()
            _hand_out(folder, team, waiting, done, workers, watcher)
            for worker in _ready(team):
                step, outcome = worker.step, worker.outcome()
                assert step is not None
                worker.step = None
                if not outcome["ok"]:
                    raise _failure(step, outcome, worker.log)
                set_done(folder, step, outcome)
                done.add(step.name)
                watcher.finished(step, outcome)
            watcher.tick([worker.step for worker in team if worker.step])
    finally:
        _end(team)


def _hand_out(
    folder: Path,
    team: list[Worker],
    waiting: list[Step],
    done: set[str],
    workers: int,
    watcher: Watcher,
) -> None:
    for step in [step for step in waiting if done.issuperset(step.needs)]:
        idle = next((worker for worker in team if worker.step is None), None)
        if idle is None:
            if len(team) == workers:
                return
            idle = Worker(folder, len(team) + 1)
            team.append(idle)
        waiting.remove(step)
        idle.give(step)
        watcher.begun(step)


def _ready(team: Sequence[Worker]) -> list[Worker]:
    """Workers that have answered, after a short wait."""
    with selectors.DefaultSelector() as selector:
        for worker in team:
            if worker.step is not None and worker.process.stdout is not None:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select(_TICK)]


def _failure(step: Step, outcome: dict[str, Any], log: Path) -> BaseException:
    if outcome.get("stopped"):
        return KeyboardInterrupt()
    more = f"; {log} has the details" if outcome.get("internal") else ""
    return UserError(f"{step.title}: {outcome['error']}{more}. The same command goes on from here")


def _end(team: Sequence[Worker]) -> None:
    """Let every process save and end; what does not in time is killed, which costs the steps since its checkpoint."""
    for worker in team:
        worker.leave()  # after it has saved
        worker.process.terminate()
    deadline = time.monotonic() + _FAREWELL
    for worker in team:
        try:
            worker.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                pipe.close()
