"""One lock for every verb that writes a run folder: two processes in one folder would write every record twice.

``FOLDER/.lock`` names the owner (verb, process, host); its modification time is the owner's last sign of life. On one
machine the owner is known to live by its process id and the time that process started, so that a process id that was
given to another program does not keep a folder locked. Anywhere else only the sign of life tells. A lock whose owner
has ended, or has given no sign of life for `STALE` seconds, is taken over with a note. Several ranks of one run are one
owner: rank 0 holds the lock. No torch.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import platform
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from realvr.errors import UserError

NAME = ".lock"
BEAT = 15.0
"""Seconds between signs of life."""
STALE = 300.0
"""Seconds without one after which an owner elsewhere counts as gone; network file systems show it up to a minute late,
and writing a large checkpoint may hold it up for longer."""
PATIENCE = 3.0
"""Seconds in which the processes of a run that was just killed notice it and end."""
_CONFIRM = 0.3  # seconds after which, of two that take over at once, both know who did


@dataclass(frozen=True)
class Owner:
    """The process that writes a folder. ``machine`` is one boot and one space of process ids, ``host`` its name."""

    verb: str
    pid: int
    started: str
    host: str
    machine: str
    token: str

    @classmethod
    def this_process(cls, verb: str) -> Owner:
        """Of the process that asks, told apart from a later one with the same number."""
        pid = os.getpid()
        return cls(verb, pid, _start_of(pid) or "", platform.node(), _machine(), secrets.token_hex(8))

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Who holds the lock; None where the file does not say."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(1 << 16))
            values: dict[str, Any] = {field.name: found[field.name] for field in fields(cls)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = all(isinstance(value, str) for name, value in values.items() if name != "pid")
        return cls(**values) if texts and type(values["pid"]) is int and values["pid"] > 0 else None

    @property
    def here(self) -> bool:
        """Whether its process id means something to this process."""
        return self.machine == _machine()

    @property
    def alive(self) -> bool:
        """For an owner that is ``here``: whether the same process still runs."""
        return _start_of(self.pid) == self.started

    def __str__(self) -> str:
        place = "on this machine" if self.here else f"on {self.host}"
        return f"realvr {self.verb} (process {self.pid} {place})"


def _machine() -> str:
    """One boot of one machine, and in it one space of process ids: containers may share everything but that."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return platform.node()


def _start_of(pid: int) -> str | None:
    """When a process was started, in whatever unit the system counts; None where there is no such process."""
    if not os.path.exists("/proc/self/stat"):  # no procfs: known to run, since when is not known
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


class RunLock:
    """The lock of one folder, held by this process until ``release``."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.folder, self.path, self.owner = folder, folder / NAME, owner
        self._made = _make(folder)
        self._acquired = False
        self._ended = threading.Event()

    def acquire(self, take_over: bool) -> None:
        """Take the lock, or raise `UserError` with the owner's name."""
        temporary = self.folder / f"{NAME}.{self.owner.token}.tmp"
        temporary.write_text(json.dumps(asdict(self.owner)) + "\n", encoding="utf-8")
        try:
            deadline = time.monotonic() + PATIENCE
            while not self._create(temporary):
                if self._try_to_take_over(temporary, take_over, last=time.monotonic() > deadline):
                    break
                time.sleep(0.05)
        finally:
            temporary.unlink(missing_ok=True)
        self._acquired = True
        _thread.start_new_thread(self._beat, ())  # threading would wait for ever for one that finds no memory

    def _create(self, temporary: Path) -> bool:
        """Make the lock where there is none: whole or not at all, by one process of many."""
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with self.path.open("xb") as file:
                    try:
                        file.write(temporary.read_bytes())
                        file.flush()
                    except OSError:
                        self.path.unlink()
                        raise
            except FileExistsError:
                return False
        return True

    def _try_to_take_over(self, temporary: Path, take_over: bool, last: bool) -> bool:
        """Replace the lock of an owner that is gone; raise where it is not and this was the last attempt."""
        try:
            if not stat.S_ISREG(self.path.lstat().st_mode):  # a link that leads nowhere, a pipe: never released
                raise UserError(f"{self.path}: not a file, so not a lock of ours; remove it, or choose another folder")
            owner = Owner.read(self.path)
            os.utime(temporary)
            # Both times are those of the file system: the clocks of two machines may differ.
            silent = temporary.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        name = str(owner) if owner else "a process that left no name"
        if owner is not None and owner.here:
            why = None if owner.alive else "which has ended"
        elif silent > STALE:
            why = f"which gave no sign of life for {silent / 60:.0f} minutes"
        else:
            why = "as --take-over says" if take_over else None
        if why is None:
            if last:
                raise UserError(_refusal(self.folder, name, owner, silent))
            return False
        os.replace(temporary, self.path)
        time.sleep(_CONFIRM)
        if Owner.read(self.path) != self.owner:
            raise UserError(f"{self.folder}: another process took over from {name} at the same moment")
        print(f"realvr: note: {self.folder}: took over from {name}, {why}", file=sys.stderr)
        return True

    def _beat(self) -> None:
        """Give a sign of life again and again; end the process where the folder has been taken from it."""
        while not self._ended.wait(BEAT):
            try:
                mine = Owner.read(self.path) == self.owner
                if mine:
                    os.utime(self.path)
            except OSError:  # the folder is gone or cannot be reached: whoever writes there will say so
                continue
            if not mine and not self._ended.is_set():
                # Not an exception: the main thread may be anywhere, and must not write another line. Every file here
                # survives a kill.
                line = f"realvr: error: {self.folder} was taken over by {Owner.read(self.path)}: this process ends\n"
                os.write(2, line.encode())
                os._exit(2)

    def release(self) -> None:
        """Let others in; folders that were made for the lock and stayed empty go."""
        self._ended.set()
        if self.owner.pid != os.getpid():  # a forked child
            return
        with contextlib.suppress(OSError):
            if self._acquired and Owner.read(self.path) == self.owner:
                self.path.unlink()
            for folder in self._made:
                folder.rmdir()


def _refusal(folder: Path, name: str, owner: Owner | None, silent: float) -> str:
    if owner is not None and owner.here:
        return f"{folder}: {name} is writing there: wait for it or end it, or choose another folder"
    return (
        f"{folder}: {name} is writing there, last sign of life {max(silent, 0):.0f} s ago: wait for it, choose another "
        f"folder, or, if it is gone for certain, add --take-over (after {STALE / 60:.0f} minutes it is not needed)"
    )


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns what was missing, innermost first."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a character that no path can have
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder}: cannot be made or written ({reason}); choose another folder") from None
    return missing


_held: dict[Path, RunLock] = {}


@contextmanager
def hold(folder: str | Path, verb: str, take_over: bool = False) -> Iterator[None]:
    """Keep a run folder for this process; it is made where it is missing. A verb inside a verb may hold it again.

    ``take_over`` is the user's word that an owner on another machine is gone.
    """
    path = Path(folder)
    try:
        key = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: not a folder that can be made ({error})") from None
    before = _held.get(key)
    if before is not None and before.owner.pid == os.getpid():
        yield
        return
    lock = RunLock(path, Owner.this_process(verb))
    try:
        try:
            lock.acquire(take_over)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from None
        _held[key] = lock
        yield
    finally:
        _held.pop(key, None)
        lock.release()
