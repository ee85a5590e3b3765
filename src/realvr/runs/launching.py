"""Several processes of one command on this machine: started together, ended together.

Each process finds its number in ``RANK``, as under torchrun. The first one talks to the user.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NoReturn

from realvr.errors import UserError
from realvr.runs.guard import guarded

ENDING = 10.0
"""Seconds after which all processes have ended, once one has failed."""

INTERRUPTED = 130
"""Exit code of what was interrupted and can be continued."""
LOST = 75
"""Exit code of a process that lost the others: one of them has failed first, and is named instead."""
HUNG = 76
"""Exit code of a process that waited for another one for too long: the others are asked for their stacks."""

_STOPPED = (0, INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGABRT)
"""How a process ends that was told to stop; gloo sometimes aborts one that leaves early."""
_LAUNCHER = "REALVR_LAUNCHER"
"""Process id of the one that started this one."""


class ProcessFailed(UserError):
    """One of several processes has failed, and the reason has been printed. ``code`` is its exit code."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"process {rank} ended with exit code {code}; its message is above")
        self.code = code


def launch(
    arguments: Sequence[str],
    processes: int,
    *,
    forward: bool = False,
    go_on: Callable[[], str] = lambda: "the same command goes on",
) -> int:
    """Run ``python ARGUMENTS`` in ``processes`` processes; raises `ProcessFailed` for the first that failed.

    What processes other than the first print is shown only where one of them fails. Ctrl-C ends them all; with
    ``forward`` it reaches each of them as a wish to stop, as does SIGTERM, and once they have ended the result is 130.
    ``go_on`` tells what to do after one was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [open(os.path.join(folder, str(rank)), "w+b") for rank in range(1, processes)]  # noqa: SIM115
        try:
            with held_port() as port:
                running = _start(arguments, processes, files, forward, port)
                with _forwarding(running) if forward else _ending(running) as signals:
                    code, failed = _wait(running, forward)
            if signals and (code in _STOPPED or len(signals) > 1):
                return INTERRUPTED
            if code:
                _explain(running, files, code, failed, go_on)
                raise ProcessFailed(failed, code if code > 0 else 1)
        finally:
            for file in files:
                file.close()
    return 0


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that nobody else is given meanwhile, however long the processes take to get there.

    It is bound here and nobody listens: a process that is told its number can, as torch does, bind it a second time
    (SO_REUSEADDR) and listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _start(
    arguments: Sequence[str], processes: int, files: Sequence[IO[bytes]], apart: bool, port: int
) -> list[subprocess.Popen[bytes]]:
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}  # unless the user sets it
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared = threads | os.environ | meeting | {"LOCAL_WORLD_SIZE": str(processes), _LAUNCHER: str(os.getpid())}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
    if apart:  # a terminal sends Ctrl-C to its whole group: these get it from here, once
        options["process_group"] = 0
    running = []
    for rank in range(processes):
        streams: dict[str, Any] = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": files[rank - 1]}
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.append(subprocess.Popen([sys.executable, *arguments], env=environment, **streams, **options))
    return running


@contextmanager
def _ending(running: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Ctrl-C ends all processes."""
    try:
        yield []
    except KeyboardInterrupt:
        _end(running)
        raise


@contextmanager
def _forwarding(running: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Hand SIGINT and SIGTERM to all processes; the signals that came."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(running: Sequence[subprocess.Popen[bytes]], stoppable: bool) -> tuple[int, int]:
    """(exit code, rank) of the first process that failed, after all have ended; (0, 0) where none did. ``stoppable``
    processes take SIGTERM as a wish to go on to a good place, which they cannot reach without the one that failed."""
    failed: tuple[int, int] | None = None
    while failed is None and _alive(running):
        failed = _failure(running)
        deadline = time.monotonic() + ENDING / 2
        while failed and failed[0] == LOST and _alive(running) and time.monotonic() < deadline:
            time.sleep(0.1)  # it felt the end of another one, which is still on its way out
            failed = _failure(running)
        time.sleep(0.1)
    failed = failed or _failure(running)
    if stoppable:
        _until(running, ENDING / 2)  # they feel it themselves
        _end(running, signal.SIGABRT if failed is not None and failed[0] == HUNG else signal.SIGKILL)
    else:
        _end(running)
    return failed or (0, 0)


def _failure(running: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """(exit code, rank) of a process that has failed by now: rather one that was killed than one that lost it."""
    codes = [(process.poll(), rank) for rank, process in enumerate(running)]
    found = [(code, rank) for code, rank in codes if code]
    return min(found, key=lambda each: (each[0] == LOST, each[0] > 0, each[1]), default=None)


def _end(running: Sequence[subprocess.Popen[bytes]], number: signal.Signals = signal.SIGTERM) -> None:
    """Stop what still runs: with this signal (after SIGABRT, faulthandler prints the stacks), then by force."""
    for process in running:
        if process.poll() is None:
            process.send_signal(number)
    _until(running, ENDING if number == signal.SIGTERM else ENDING / 2)
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


def _alive(running: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is None for process in running)


def _until(running: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, but not longer."""
    deadline = time.monotonic() + seconds
    while _alive(running) and time.monotonic() < deadline:
        time.sleep(0.05)


def _explain(
    running: Sequence[subprocess.Popen[bytes]],
    files: Sequence[IO[bytes]],
    code: int,
    failed: int,
    go_on: Callable[[], str],
) -> None:
    """Say which process failed, and what it has said itself."""
    silent = running[0].returncode <= 0 or running[0].returncode == LOST  # the first one has nothing to say
    for rank, file in enumerate(files, 1):
        file.seek(0)
        if code == HUNG or (silent and rank == failed):
            sys.stderr.write(file.read().decode(errors="replace"))
    sys.stderr.flush()
    which = f"rank {failed} of {len(running)}"
    if code < 0:
        _say(f"{which} was ended by {signal.Signals(-code).name}; {go_on()}")
    elif code == LOST:
        _say(f"{which} lost the connection to the others; {go_on()}")
    elif failed and code not in (2, HUNG):
        _say(f"{which} ended with exit code {code}, see above; {go_on()}")


def _say(text: str) -> None:
    print(f"realvr: error: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- in a process that was started


def launched() -> bool:
    """Whether `launch` has started this process."""
    return os.environ.get(_LAUNCHER) == str(os.getppid())


def end_with_launcher() -> None:
    """From now on this process ends when the one that started it has died, even by a kill: nobody else would stop
    it."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.02)
    os._exit(1)


def serve(share: Callable[[str], Any], settings: str) -> NoReturn:
    """Do one share, in a process that `launch` started, and end it."""
    end_with_launcher()

    def work() -> int:
        try:
            share(settings)
            return 0
        except KeyboardInterrupt:
            return INTERRUPTED  # the process that started this one says it

    code = guarded(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a process group that waits for a failed process must not hold this one up


def processes_here(world: int) -> int:
    """Processes of this machine among ``world``, which share its cores; all of them where the launcher does not say
    it."""
    return max(1, min(world, int(os.environ.get("LOCAL_WORLD_SIZE") or world)))


def check_count(processes: int) -> None:
    """Refuse a number of processes that makes no sense."""
    if processes < 1:
        raise UserError(f"--processes is {processes}: at least one is needed")
    if processes > 1 and (int(os.environ.get("WORLD_SIZE", 1)) > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        raise UserError("--processes cannot be given under torchrun or accelerate launch, which start their own")


def check_sharded(sharded: bool, processes: int, device: str | None) -> None:
    """Refuse a model over all GPUs together with what would use the GPUs otherwise."""
    if not sharded:
        return
    if processes > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--sharded is one process with all GPUs of the machine: leave out --processes or torchrun")
    if device is not None:
        raise UserError(
            "--sharded uses all GPUs of the machine: leave out --device, or choose with CUDA_VISIBLE_DEVICES"
        )
