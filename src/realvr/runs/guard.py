"""How a process that talks to a user ends: notes, one line for an error, exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from realvr.errors import explained
from realvr.runs.files import naming


def guarded(action: Callable[[], int]) -> int:
    """Do something for a user: warnings become notes, and what the user or the machine is to blame for one line.

    Anything else is a bug and keeps its traceback. Every process that talks to a user goes through here.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _notice  # type: ignore[assignment]
            code = action()
            if sys.stdout is not None:
                with naming("standard output"):
                    sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return _end("realvr: interrupted", 130)
    except BrokenPipeError:
        # The reader went away (`realvr … | head`): not an error. Keep the interpreter from flushing into the closed
        # pipe.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except Exception as error:
        found = explained(error)
        if found is None:
            raise
        return _end(f"realvr: error: {found}", 2)


def _end(line: str, code: int) -> int:
    """Say the last line, where there is still a place for it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None  # type: ignore[assignment]  # or the interpreter tries again and says so
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # type: ignore[assignment]
    return code


def _notice(message: Warning | str, *where: object) -> None:
    """A warning as a user should meet it: one line, without the source that raised it."""
    note(" ".join(str(message).split()))


def note(text: str) -> None:
    """Print a notice on standard error."""
    print(f"realvr: note: {text}", file=sys.stderr)
