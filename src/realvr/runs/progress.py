"""How far a long verb is, on standard error: a bar on a terminal, elsewhere a line about every 30 seconds. No torch."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS = "REALVR_PROGRESS_SECONDS"
"""Environment variable: seconds between lines where nobody watches; 0 switches them off."""


def interval() -> float:
    """Seconds between lines where nobody watches."""
    try:
        return max(0.0, float(os.environ.get(SECONDS, "30")))
    except ValueError:
        return 30.0


def watched() -> bool:
    """Whether standard error is a terminal."""
    return Console(stderr=True).is_terminal


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=max(0, round(seconds))))


_active: list[Ticker] = []
"""Those that run, the innermost last: it alone prints."""


class Ticker:
    """Prints ``say()`` whenever `interval` seconds have passed without a line.

    From a thread, because one batch, or the reading of a model, may take longer than that.
    """

    def __init__(self, say: Callable[[], str], active: bool = True) -> None:
        self._say, self._every = say, interval()
        self._active = active and self._every > 0
        self._ended = threading.Event()
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a line."""
        innermost = bool(_active) and _active[-1] is self
        return innermost and time.monotonic() - self._last >= self._every

    def said(self) -> None:
        """A line has just been printed by somebody else."""
        self._last = time.monotonic()

    def __enter__(self) -> Ticker:
        # One inside another goes on with its silence: many short ones must not keep both from printing.
        self._last = _active[-1]._last if _active else time.monotonic()
        if self._active:
            _active.append(self)
            _thread.start_new_thread(self._run, ())  # threading would wait for ever for one that finds no memory
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self in _active:
            _active.remove(self)
            for outer in _active[-1:]:
                outer._last = self._last

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._every / 2)):
            if self.due:
                self.said()
                print(self._say(), file=sys.stderr, flush=True)


@contextmanager
def busy(what: str, show: bool = True) -> Iterator[None]:
    """Around work that has no count, such as the reading of a model."""
    begun = time.monotonic()
    with Ticker(lambda: f"{what}: {duration(time.monotonic() - begun)} so far", show and not watched()):
        yield


_COLUMNS: dict[str, type[ProgressColumn]] = {
    "count": MofNCompleteColumn,
    "share": TaskProgressColumn,
    "elapsed": TimeElapsedColumn,
    "left": TimeRemainingColumn,
}


class Bars:
    """Bars on a terminal, one below the other, each with a title and a note; elsewhere nothing.

    ``columns`` between bar and note: count, share, elapsed, left. With ``stay`` the last state stays on the screen.
    """

    def __init__(self, console: Console, *columns: str, show: bool = True, stay: bool = False) -> None:
        chosen = [_COLUMNS[name]() for name in columns]
        shape = (TextColumn("{task.description}"), BarColumn(bar_width=24), *chosen, TextColumn("{task.fields[note]}"))
        hidden = not (show and console.is_terminal)
        self._bars = Progress(*shape, console=console, transient=not stay, disable=hidden)

    def add(self, title: str, total: float | None, done: float = 0) -> int:
        """One more bar; the number by which it is set."""
        bar = self._bars.add_task(title, total=total, note="")
        self._bars.update(bar, completed=done)
        return bar

    def set(self, bar: int, done: float, title: str | None = None, note: str = "") -> None:
        """So many are done in all."""
        self._bars.update(TaskID(bar), completed=done, description=title, note=note)

    def remove(self, bar: int) -> None:
        """It is complete, or no longer wanted."""
        self._bars.remove_task(TaskID(bar))

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class Bar:
    """Progress over ``total`` things. ``share`` counts a fraction of the whole instead."""

    def __init__(self, title: str, total: float | None, show: bool = True, share: bool = False) -> None:
        self.title, self.total, self.note = title, total, ""
        self.done = 0.0
        self._share = share
        self._begun = time.monotonic()
        console = Console(stderr=True)
        self._bars = Bars(console, "share" if share else "count", "left", show=show)
        self._bar = self._bars.add(title, total)
        self._ticker = Ticker(self.line, show and not console.is_terminal)

    def advance(self, count: float = 1) -> None:
        """So many more are done."""
        self.set(self.done + count)

    def set(self, done: float, title: str | None = None, note: str | None = None) -> None:
        """So many are done in all."""
        self.done = done
        self.title = self.title if title is None else title
        self.note = self.note if note is None else note
        self._bars.set(self._bar, done, self.title, self.note)

    def line(self) -> str:
        """Where it stands, in one line."""
        seconds = time.monotonic() - self._begun
        parts = [f"{self.title}: {self._count()}", f"{duration(seconds)} so far"]
        if self.total and 0 < self.done < self.total:
            parts.append(f"{duration(seconds / self.done * (self.total - self.done))} left")
        return ", ".join([*parts, self.note] if self.note else parts)

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done:,.0f}"
        percent = f"{self.done / self.total:.0%}" if self.total else "100%"
        return percent if self._share else f"{self.done:,.0f} of {self.total:,.0f} ({percent})"

    def __enter__(self) -> Bar:
        self._begun = time.monotonic()
        self._bars.__enter__()
        self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.__exit__(kind, error, trace)
        self._bars.__exit__()
