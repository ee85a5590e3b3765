"""Several processes on one evaluation, each with its share of the questions: started here or by torchrun/accelerate."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from realvr.errors import UserError
from realvr.runs.guard import guarded

PATIENCE = timedelta(days=7)
"""How long processes wait for one another: shares of a benchmark may differ by hours."""


@dataclass(frozen=True)
class Ranks:
    """This process among all. ``local`` numbers the processes of this machine: it picks the GPU."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE and LOCAL_RANK, as torchrun and accelerate set them."""
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return cls(rank, world, int(os.environ.get("LOCAL_RANK", rank)))

    def start(self) -> None:
        """Meet the other processes."""
        if self.world > 1:
            if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
                raise UserError(
                    f"WORLD_SIZE is {self.world}, but MASTER_ADDR or MASTER_PORT is not set: start with torchrun or "
                    "--processes, or unset WORLD_SIZE"
                )
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=PATIENCE)

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def stop(self) -> None:
        """Part from the others."""
        if self.world > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def device(self, asked: str | None) -> str | None:
        """The device of this process: with several, process r takes GPU r, unless a single device was named."""
        if self.world == 1 or asked not in (None, "cuda"):
            return asked
        import torch

        return f"cuda:{self.local % torch.cuda.device_count()}" if torch.cuda.is_available() else asked


class ProcessFailed(UserError):
    """One of several processes has failed, and the reason has been printed. ``code`` is its exit code."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"process {rank} ended with exit code {code}; its message is above")
        self.code = code


def launch(settings: str, processes: int, module: str = "realvr.evaluation.worker") -> None:
    """Run a module in ``processes`` processes, with settings as JSON; raises `ProcessFailed` for the first that failed.

    The module calls `serve`. The first process prints notes; what the others say is shown only where one of them fails
    alone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, settings]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}  # unless the user sets it
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared = threads | os.environ | meeting
    with tempfile.TemporaryFile() as said:
        running = []
        for rank in range(processes):
            streams: dict[str, Any] = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": said}
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(subprocess.Popen(command, env=environment, **streams))
        code, failed = _wait(running)
        if failed and running[0].returncode <= 0:  # the first process has nothing to say about it
            said.seek(0)
            sys.stderr.write(said.read().decode(errors="replace"))
        if code < 0:
            name = signal.Signals(-code).name
            print(f"realvr: error: process {failed} was ended by {name}; the same command goes on", file=sys.stderr)
        if code:
            raise ProcessFailed(failed, code if code > 0 else 1)


def serve(share: Callable[[str], Any], settings: str) -> NoReturn:
    """Do one share, in a process that `launch` started, and end it."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def work() -> int:
        try:
            share(settings)
            return 0
        except KeyboardInterrupt:
            return 130  # the process that started this one says it

    code = guarded(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a process group that waits for a failed process must not hold this one up


def _end_with(parent: int) -> None:
    """End when the starting process has died, even by a kill: nobody else would stop this one."""
    while os.getppid() == parent:
        time.sleep(0.02)
    os._exit(1)


def _wait(running: list[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """(exit code, rank) of the first process that failed, after all have ended; (0, 0) where none did."""
    failed: tuple[int, int] | None = None
    try:
        while any(process.poll() is None for process in running):
            codes = {rank: process.poll() for rank, process in enumerate(running)}
            failed = failed or next(((code, rank) for rank, code in codes.items() if code), None)
            if failed:  # the others would wait for it for ever
                _end(running)
            time.sleep(0.1)
    except KeyboardInterrupt:
        _end(running)
        raise
    codes = {rank: process.wait() for rank, process in enumerate(running)}
    return failed or next(((code, rank) for rank, code in codes.items() if code), (0, 0))


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Stop what still runs: politely, then not."""
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_count(processes: int) -> None:
    """Refuse a number of processes that makes no sense."""
    if processes < 1:
        raise UserError(f"--processes is {processes}: at least one is needed")
    if processes > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--processes cannot be given under torchrun or accelerate launch, which start their own")
