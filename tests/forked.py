"""Real processes of the command line that need not import torch again: forks of the test's own process."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realvr.cli import main

CRASHED = 70
"""Exit code where an exception left ``main``."""


class Forked:
    """``realvr ARGS`` in a process of its own. ``before`` runs in it first: limits, a working directory."""

    def __init__(self, args: list[Any], folder: Path, before: Callable[[], object] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.out")))
        self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.code: int | None = None
        if not self.pid:
            self._child([str(arg) for arg in args], before)

    def _child(self, args: list[str], before: Callable[[], object] | None) -> None:
        code = CRASHED
        try:
            os.setsid()
            for number, path in ((1, self.out), (2, self.err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")  # as Python opens it
            if before is not None:
                before()
            code = main(args)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    if stream is not None:
                        stream.flush()
                except OSError:
                    pass
            os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 240) -> int:
        """The exit code; negative for a signal."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {seconds} s: {self.said}")
            else:
                time.sleep(0.01)
        return self.code

    def kill(self) -> None:
        """Kill -9, the processes that it started included."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def until(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something that this process is to do."""
        end = time.monotonic() + seconds
        while not ready():
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            assert not pid, f"ended with {os.waitstatus_to_exitcode(status)}: {self.said}"
            assert time.monotonic() < end, f"did not get going: {self.said}"
            time.sleep(0.002)

    @property
    def said(self) -> str:
        """Standard error so far."""
        return self.err.read_text() if self.err.exists() else ""


def forked(args: list[Any], folder: Path, before: Callable[[], object] | None = None) -> Forked:
    """The same, run to its end."""
    process = Forked(args, folder, before)
    process.wait()
    return process


def assert_one_line(process: Forked, *parts: str) -> str:
    """Exit code 2 and one line of error, with these parts in it; the line."""
    assert process.code == 2, f"exit code {process.code}: {process.said}"
    errors = [line for line in process.said.splitlines() if line.startswith("realvr: error: ")]
    assert len(errors) == 1 and "Traceback" not in process.said, process.said
    for part in parts:
        assert part in errors[0], errors[0]
    return errors[0]
