"""Real processes of the command line that need not import torch again, from `fork_server.py`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

SERVER = Path(__file__).with_name("fork_server.py")
AT_FIRST = dict(os.environ)
"""Environment before a test has changed it."""


class Server:
    """The process that forks, one for each process that runs tests."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        self.codes: dict[int, int] = {}
        self._read = b""
        hidden = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno())],
            env=AT_FIRST | hidden,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._answer()

    def fork(self, request: dict[str, Any]) -> int:
        """The id of a new process."""
        self.link.sendall(json.dumps(request).encode() + b"\n")
        return self._answer()

    def _answer(self) -> int:
        """The id of the next process that has begun."""
        while True:
            message = self._next(None)
            assert message is not None
            if "code" not in message:
                self.codes.pop(message["pid"], None)  # of one that had the same id
                return message["pid"]
            self.codes[message["pid"]] = message["code"]

    def code(self, pid: int, seconds: float) -> int | None:
        """Its exit code; None while it runs, after a wait of so many seconds at most."""
        end = time.monotonic() + seconds
        while pid not in self.codes:
            message = self._next(max(0.0, end - time.monotonic()))
            if message is None:
                return None
            self.codes[message["pid"]] = message["code"]
        return self.codes[pid]

    def _next(self, seconds: float | None) -> dict[str, int] | None:
        while b"\n" not in self._read:
            if not select.select([self.link], [], [], seconds)[0]:
                return None
            some = self.link.recv(65536)
            assert some, f"the process that forks has ended with {self.process.wait()}"
            self._read += some
        line, self._read = self._read.split(b"\n", 1)
        return json.loads(line)


@cache
def server(process: int) -> Server:
    """That of a process: a fork of one that runs tests has none of its own yet."""
    return Server()


class Forked:
    """``realvr ARGS`` in a process of its own, or a Python script, or any other program; it prints to ``folder``.

    ``constants`` of modules by their full name. ``file_bytes``: how large a file may become; ``more_memory``: bytes
    that may come to those that the process has.
    """

    def __init__(
        self,
        args: list[Any],
        folder: Path | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
        out: str | None = None,
        what: Literal["realvr", "script", "program"] = "realvr",
        constants: Mapping[str, float] | None = None,
        file_bytes: int | None = None,
        more_memory: int | None = None,
    ) -> None:
        if folder is None:
            self._own = tempfile.TemporaryDirectory()  # as long as this object
            folder = Path(self._own.name)
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.out")))
        self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
        for path in (self.out, self.err):
            path.write_text("")
        self.server = server(os.getpid())
        self.pid = self.server.fork(
            {
                "args": [str(arg) for arg in args],
                "environment": {**(os.environ if environment is None else environment), "PYTHONFAULTHANDLER": "1"},
                "home": str((home or Path()).absolute()),
                "out": out or str(self.out.absolute()),
                "err": str(self.err.absolute()),
                "what": what,
                "constants": dict(constants or {}),
                "file_bytes": file_bytes,
                "more_memory": more_memory,
            }
        )

    @classmethod
    def of(cls, command: list[str], **options: Any) -> Forked:
        """A command line; without the time for imports where it is ``python -m realvr`` or ``python FILE.py``."""
        python = command[0] == sys.executable
        if python and command[1:3] == ["-m", "realvr"]:
            return cls(command[3:], **options)
        if python and command[1].endswith(".py"):
            return cls(command[1:], what="script", **options)
        return cls(command, what="program", **options)

    @property
    def code(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self.server.code(self.pid, 0)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stops it and waits until every thread of it stands still: a signal is sent long before it is obeyed."""
        self.signal(signal.SIGSTOP)
        self.until(lambda: all(state == "T" for state in self._states()))

    def _states(self) -> list[str]:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{self.pid}/task").iterdir()]
        return [stat.rpartition(")")[2].split()[0] for stat in stats]

    def wait(self, seconds: float = 240) -> int:
        """The exit code. One that hangs fails, with the stacks of all its processes."""
        code = self.server.code(self.pid, seconds)
        if code is None:
            stacks = self._stacks()
            raise AssertionError(f"still running after {seconds} s: {self.said}{stacks}")
        return code

    def _stacks(self) -> str:
        """Let it and the processes that it has started print their stacks and end; what they print elsewhere."""
        pids = family(self.pid)
        files = dict.fromkeys(os.readlink(f"/proc/{pid}/fd/2") for pid in pids)  # a launcher keeps some in files
        texts = [open(file, errors="replace") for file in files if os.path.isfile(file)]  # noqa: SIM115
        for number, seconds in ((signal.SIGABRT, 2), (signal.SIGKILL, 0)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(seconds)
        return "".join(text.read() for text in texts if text.name != str(self.err.absolute()))

    def kill(self) -> None:
        """Kill -9, the processes that it started included."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            assert self.server.code(self.pid, 60) is not None, "a process that cannot be killed"

    def until(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something that this process is to do."""
        end = time.monotonic() + seconds
        while not _seen(ready):
            assert self.code is None, f"ended with {self.code}: {self.said}"
            assert time.monotonic() < end, f"did not get going: {self.said}"
            time.sleep(0.002)

    @property
    def said(self) -> str:
        """Standard error so far."""
        return self.err.read_text()


def family(pid: int) -> list[int]:
    """A process and all that it and they have started, on Linux."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _seen(ready: Callable[[], bool]) -> bool:
    """A file that is gone between two looks, because a run has just joined or replaced it, is one not yet seen."""
    try:
        return ready()
    except FileNotFoundError:
        return False


def forked(args: list[Any], folder: Path, **options: Any) -> Forked:
    """The same, run to its end."""
    process = Forked(args, folder, **options)
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
