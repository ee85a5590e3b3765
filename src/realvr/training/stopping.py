"""Ctrl-C and SIGTERM: a request to stop after the current step."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """While active, the first signal sets ``wanted``; a second Ctrl-C ends the process at once.

    Only the main thread may handle signals; elsewhere this does nothing.
    """

    def __init__(self, main: bool = True) -> None:
        self.wanted = False
        self._interrupts = 0
        self._main = main
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self._main and not self.wanted:
            print("stopping after this step, with a checkpoint (Ctrl-C again: at once)", file=sys.stderr, flush=True)
        self.wanted = True
