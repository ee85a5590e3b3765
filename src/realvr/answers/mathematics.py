"""math-verify in a process of its own: whether two expressions are equal, within limits of time and memory.

A computer algebra system can take forever on a short text ("9^{9^{9}}"), and math-verify's own time limits are signals:
they work in the main thread only and do not interrupt arithmetic on long integers. The helper process has a limit of
processor time, so that a verdict does not depend on how busy the machine is, one of memory, and one of wall time for
the worst case. It starts with the first pair, serves all threads of its process, and ends with it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import warnings

from realvr.errors import UserError

CPU_SECONDS = 2
WALL_SECONDS = 60.0
START_SECONDS = 300.0
MEMORY_BYTES = 4 << 30
_READY = "ready"
_RUN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from realvr.answers.mathematics import serve; serve()"


class Helper:
    """The process that calls math-verify, as its users see it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start without a process: after a fork, that of the parent is not ours to talk to."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, one: str, other: str) -> bool | None:
        """Whether two LaTeX expressions are equal; None where the limits were reached."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            reply = _exchange(self._process, json.dumps([one, other]), WALL_SECONDS)
            if reply:
                return bool(json.loads(reply))
            self.close()
            return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def expressions_equal(one: str, other: str) -> bool | None:
    """Whether math-verify finds two LaTeX expressions equal, in either direction; None where it took too long."""
    return _helper.ask(one, other)


def _start() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    greeting = _exchange(process, "", START_SECONDS)
    if greeting.strip() != _READY:
        process.kill()
        process.communicate()
        raise UserError(
            f"math-verify cannot be used ({greeting.strip() or 'no reply'}): pip install 'math-verify>=0.9'"
        )
    return process


def _exchange(process: subprocess.Popen[str], line: str, seconds: float) -> str:
    """The line that answers ``line`` ('' is sent as nothing); '' where the process has ended or is out of time."""
    assert process.stdin is not None and process.stdout is not None
    alarm = threading.Timer(seconds, process.kill)
    alarm.daemon = True
    alarm.start()
    try:
        if line:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return process.stdout.readline()
    except OSError:  # it ended while we wrote
        return ""
    finally:
        alarm.cancel()


_helper = Helper()
atexit.register(_helper.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helper.forget)


# ---------------------------------------------------------------------- in the helper


def serve() -> None:
    """Answer pairs, a JSON list a line, until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - nothing a library prints may pass for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    try:
        import math_verify  # noqa: F401
    except Exception as error:  # whatever is wrong with the installation
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300], file=replies, flush=True)
        return
    warnings.simplefilter("ignore")
    print(_READY, file=replies, flush=True)
    for line in sys.stdin:
        _limit()
        one, other = json.loads(line)
        print(json.dumps(_verified(one, other)), file=replies, flush=True)


def _limit() -> None:
    """Limits for the next pair, where the system has them. At its end of processor time the process is killed."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    for what, most in ((resource.RLIMIT_CPU, int(spent) + 1 + CPU_SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _verified(one: str, other: str) -> bool:
    """What math-verify says; its check is not symmetric, so both directions are asked. What it cannot read differs."""
    from math_verify import parse, verify

    try:
        first, second = (parse(f"${text}$", parsing_timeout=0, raise_on_error=False) for text in (one, other))
        if not first or not second:
            return False
        return any(
            verify(gold, target, timeout_seconds=0, raise_on_error=False)
            for gold, target in ((first, second), (second, first))
        )
    except Exception:  # a library's failure on odd input is no equality
        return False
