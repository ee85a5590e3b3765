"""Records of a run while it runs: JSON lines always, trackers on request (``log.to``), progress on the console."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realvr.runs.files import Json
from realvr.runs.guard import note
from realvr.runs.journal import Appender, keep_lines
from realvr.runs.progress import Bars, Ticker, duration
from realvr.training.boards import Boards
from realvr.training.sections import LogSettings

LINE = {
    "loss": "loss",
    "reward": "reward",
    "evidence/margin": "g",
    "validation/accuracy": "val_accuracy",
    "validation/reward": "val_reward",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "tokens_per_s": "tokens_per_s",
}
"""Metrics on the compact line, where a stage reports them, and what they are called there."""
_CELL = 300
_CUT = ("question", "completion")
"""Columns of a table that may be shortened: around an answer, never inside it."""
_ANSWER = re.compile(r"(<answer>.*?</answer>)", re.DOTALL)
_WIDTH = 160
"""Width of a table off a terminal."""


class Tracker:
    """Records of one run, written by the main process only; on the others every call does nothing.

    ``step`` is the number of optimizer steps done when the run starts or resumes: records of later
    steps came from a process that was killed, and are cut off.
    """

    def __init__(self, out: Path, settings: LogSettings, steps: int, step: int = 0, active: bool = True) -> None:
        self.out, self.settings, self.steps, self.active = out, settings, steps, active
        self.console = Console(stderr=True, soft_wrap=True)
        if not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console.width = _WIDTH
        self.last: dict[str, Any] = {}
        self._metrics: Appender | None = None
        self._completions: Appender | None = None
        self._validation: Appender | None = None
        self._boards: Boards | None = None
        self._bars: Bars | None = None
        self._durations: deque[float] = deque(maxlen=20)
        self._step, self._begun = step, time.monotonic()
        self._ticker = Ticker(self._waiting, active and settings.console and not self.console.is_terminal)
        if active:
            self._open(step)

    def _open(self, step: int) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        seen = last_step(self.out / "metrics.jsonl")
        self.last = truncate(self.out / "metrics.jsonl", step)
        truncate(self.out / "completions.jsonl", step)
        truncate(self.out / "validation.jsonl", step)
        self._metrics = Appender(self.out / "metrics.jsonl")
        self._completions = Appender(self.out / "completions.jsonl")
        self._boards = Boards(self.settings.to, self.out, self.settings.project, step + 1, seen)
        if self.settings.console and self.console.is_terminal:
            self._bars = Bars(self.console, "count", "elapsed", stay=True).__enter__()
            self._bar = self._bars.add("", self.steps, step)
        self._ticker.__enter__()

    def _waiting(self) -> str:
        """Line for a long step, off a terminal."""
        if self._step >= self.steps:
            return f"step {self._step}/{self.steps}: done, finishing the run"
        return f"step {self._step + 1}/{self.steps}: {duration(time.monotonic() - self._begun)} in this step"

    def log(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Record one step's metrics. ``step`` counts from 1."""
        if not self.active:
            return
        self._durations.append(seconds)
        self.last = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._write(self._metrics, {**self.last, "seconds": round(seconds, 6), "time": round(time.time(), 3)})
        if self._boards is not None:
            self._boards.add(step, metrics)
        line = self._line(metrics, step)
        if self._bars is not None:
            self._bars.set(self._bar, step, note=line)
        elif self.settings.console and (step % self.settings.every == 0 or step == self.steps or self._ticker.due):
            self.console.print(f"step {step}/{self.steps}  {line}", highlight=False)
            self._ticker.said()
        self._step, self._begun = step, time.monotonic()

    def _line(self, metrics: dict[str, float], step: int) -> str:
        shown = [f"{short} {metrics[name]:.4g}" for name, short in LINE.items() if name in metrics]
        left = sum(self._durations) / len(self._durations) * (self.steps - step)
        return "  ".join([*shown, f"eta {timedelta(seconds=round(left))}"])

    def table(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record sampled completions, and show them."""
        if not self.active or not rows:
            return
        for row in rows:
            self._write(self._completions, {"step": step, **_json(row)})
        if not self.settings.console:
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(title=f"step {step}", show_lines=True)
        for name in names:
            table.add_column(name, overflow="fold")  # rich would cut a long word off
        for row in rows:
            table.add_row(*(_cell(row.get(name), name in _CUT) for name in names))
        self.console.print(table)

    def validated(self, step: int, replies: list[dict[str, Any]]) -> None:
        """Record what the model answered to held-out questions."""
        if not self.active:
            return
        if self._validation is None:
            self._validation = Appender(self.out / "validation.jsonl")
        lines = ({"step": step, **_json(reply)} for reply in replies)
        self._validation.write([json.dumps(line, ensure_ascii=True, allow_nan=False) for line in lines], sync=False)

    def note(self, text: str) -> None:
        """Print one line."""
        if self.active:
            self.console.print(text, highlight=False, markup=False)

    def _write(self, file: Appender | None, value: dict[str, Any]) -> None:
        assert file is not None
        file.write([json.dumps(value, ensure_ascii=True, allow_nan=False)], sync=False)

    def close(self) -> None:
        """Finish the files and the display."""
        self._ticker.__exit__(None, None, None)
        if self._bars is not None:
            self._bars.__exit__()
        for file in (self._metrics, self._completions, self._validation, self._boards):
            if file is not None:
                with suppress(OSError):  # every line was flushed when it was written: what fails now failed then
                    file.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def last_step(path: Path) -> int:
    """The largest step of which there is a record; 0 where there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        return max((value["step"] for line in lines if (value := _parsed(line)) is not None), default=0)


def truncate(path: Path, step: int) -> dict[str, Any]:
    """Keep the lines of steps up to ``step``, drop the rest and a line cut short by a kill; returns the last kept.

    Other lines that are not records of a step are dropped too, with a note.
    """
    if not path.exists():
        return {}
    last: dict[str, Any] = {}
    damaged = 0

    def wanted(line: bytes) -> bool:
        nonlocal last, damaged
        value = _parsed(line)
        damaged += value is None
        if value is None or value["step"] > step:
            return False
        last = value
        return True

    keep_lines(path, wanted)
    if damaged:
        note(f"{path}: dropped {damaged} lines that are no records of a step")
    return last


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a step in a line; None where it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def _finite(value: float) -> float | None:
    """JSON has no NaN: what is not finite is null."""
    return value if math.isfinite(value) else None


def _json(value: Json) -> Json:
    """The value as JSON can hold it, numbers that are not finite as null."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _cell(value: object, cut: bool) -> str:
    """A cell of the table on the console."""
    if isinstance(value, list | tuple):  # options
        text = "\n".join(f"{chr(ord('A') + place)}. {item}" for place, item in enumerate(value))
    else:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    if cut and len(text) > _CELL:
        text = "".join(part if _ANSWER.fullmatch(part) else _shortened(part) for part in _ANSWER.split(text))
    return escape(text)


def _shortened(text: str) -> str:
    """Beginning and end of a long text."""
    half = _CELL // 2
    return f"{text[:half]} … {text[-half:]}" if len(text) > _CELL else text
