"""The one exception a user is meant to see, and what else is turned into it. No torch."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something the user supplied is wrong: the message is one line that names it and says what to do.

    The command line prints it without a traceback and exits with code 2. It lives outside every subpackage so that
    modules that need no tensor can raise it without importing torch.
    """


def require(packages: Iterable[str], extra: str, who: str) -> None:
    """Refuse early, with the extra that installs them, where packages are missing that ``who`` needs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{who} needs {' and '.join(missing)}: pip install 'realvr[{extra}]'")


_FULL = "free some space or choose another place; what was written before is kept"
_PLACE = "choose a place that can be written, or change its permissions"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose another file system",
    errno.EROFS: _PLACE,
    errno.EACCES: _PLACE,
    errno.EPERM: _PLACE,
    errno.ENOTDIR: "a file is where a folder should be; choose another place, or move it away",
    errno.EISDIR: "a folder is where a file should be; choose another place, or move it away",
    errno.EEXIST: "something else has this name; choose another place, or move it away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "the links lead in a circle; choose another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EIO: "the disk or the network failed; the same command goes on where it can",
    errno.ESTALE: "the disk or the network failed; the same command goes on where it can",
    errno.ENXIO: "choose an ordinary file",
}
"""What the operating system may refuse whatever the program does. A file that is missing is not among it: that is as
likely to be a mistake of ours."""

_NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc|bad allocation"
    r"|can't start new thread|DefaultCPUAllocator|could not create a primitive|_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust report it


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a GPU: Python, torch and the loader of libraries say it each in
    their own way."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and _NO_MEMORY.search(str(error)) is not None


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, here or in an error that this one has followed: a recording that ends early has one."""
    while error is not None:
        if out_of_memory(error):
            return True
        error = error.__context__
    return False


def explained(error: BaseException) -> UserError | None:
    """What the machine refused (space, permission, memory) as one line; None for anything else, which is a bug."""
    if isinstance(error, UserError):
        return error
    if out_of_memory(error):
        detail = " ".join(str(error).split())
        more = f" ({detail[:160]})" if detail else ""
        return UserError(f"not enough memory{more}: use smaller batches, fewer visual tokens or a smaller model")
    number = error.errno if isinstance(error, OSError) else None
    path = getattr(error, "filename", None)
    if number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    if number not in _ADVICE:
        return explained(error.__cause__) if error.__cause__ is not None else None
    # Our own writers name their file.
    place = os.fsdecode(path) if isinstance(path, str | bytes) else "standard output, or a file of a library"
    return UserError(f"{place}: {os.strerror(number)}: {_ADVICE[number]}")
