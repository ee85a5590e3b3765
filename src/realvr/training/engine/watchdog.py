"""Ends a run whose ranks wait for each other in vain, and prints where each of them was.

A rank may compute for as long as it likes; the clock runs only while it waits for the others. Three things end a wait:

- the process group's own timeout (``engine.timeout``), which sees every collective, also those inside a forward pass;
- the clock here, where a backend does not raise: around the collectives that an engine names (`Watchdog.waiting`);
- word from another rank, which goes through the store where the ranks met: a rank that hangs outside a collective
  prints its stacks too, and all nodes end together.

Work that rank 0 does alone, such as writing the model, may take longer than the timeout: the others follow its
heartbeat instead (`Watchdog.follow_main`).
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from realvr.runs.launching import HUNG, LOST, launched

if TYPE_CHECKING:
    from torch.distributed import Store

POLL = 1.0
"""Seconds between two looks at the clock and at the store."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_CUT_OFF = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|connection (was )?(closed|refused|reset)|broken pipe|TCPStore|socket",
    re.IGNORECASE,
)


class Watchdog:
    """Watches the waits of one rank. Idle until `start`, and for ever with one process."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.place = "before the first step"
        self.go_on: Callable[[], str] = lambda: "the same command goes on"
        self._wait: tuple[float, str] | None = None
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        self._store: Store | None = None
        self._meetings = 0

    # ------------------------------------------------------------------ life

    def start(self, gather: Callable[[bool], list[bool]]) -> None:
        """From now on a wait that is too long ends the process. ``gather`` is the engine's, every rank calls this."""
        if self.world == 1:
            return
        faulthandler.enable()  # NCCL aborts the process: SIGABRT then prints the stacks
        store = self._meet()
        self._store = store if all(gather(store is not None)) else None  # all of them, or none
        threading.Thread(target=self._watch_clock, daemon=True).start()
        if self._store is not None:
            threading.Thread(target=self._watch_store, args=(self._store,), daemon=True).start()

    def stop(self) -> None:
        """Before the ranks part: who leaves first is not lost."""
        self._stopped.set()

    def _meet(self) -> Store | None:
        """A connection of our own to the store where the ranks met; None where the launcher has none."""
        from torch.distributed import PrefixStore, TCPStore

        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            return None
        attempt = "/".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        try:
            return PrefixStore(f"realvr/{attempt}", TCPStore(host, int(port), timeout=timedelta(seconds=30)))
        except (RuntimeError, ValueError):  # the others are then watched by the process group alone
            return None

    # ------------------------------------------------------------------ what a rank does

    def at(self, place: str) -> None:
        """Where the run stands, for messages."""
        self.place = place

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a collective."""
        if self.world == 1 or self._wait is not None:  # the outer one counts
            yield
            return
        self._wait = time.monotonic(), what
        try:
            yield
        finally:
            self._wait = None

    def follow_main(self) -> None:
        """Wait for rank 0, which may work alone for as long as it likes while its process lives."""
        if self.world == 1 or self._store is None:
            return
        self._meetings += 1
        key, beat, since = f"met-{self._meetings}", b"", time.monotonic()
        if self.rank == 0:
            self._store.set(key, "1")
            return
        while not self._store.check([key]):
            seen = self._store.get("beat") if self._store.check(["beat"]) else b""
            if seen != beat:
                beat, since = seen, time.monotonic()
            if time.monotonic() - since > self.timeout:
                self._hung("rank 0")
            time.sleep(0.05)

    # ------------------------------------------------------------------ what ends a wait

    def _watch_clock(self) -> None:
        while not self._stopped.wait(min(POLL, self.timeout / 4)):
            wait = self._wait
            if wait is not None and time.monotonic() - wait[0] > self.timeout + 2 * POLL:  # the group raises first
                self._hung(wait[1])

    def _watch_store(self, store: Store) -> None:
        """Rank 0 gives signs of life; every rank hears of one that hangs."""
        beat = 0
        try:
            while not self._stopped.wait(POLL):
                beat += 1
                if self.rank == 0:
                    store.set("beat", str(beat))
                if store.check(["hung"]):
                    self._report()
                    self._leave(HUNG)
        except RuntimeError:  # the store is gone, and with it rank 0 or its launcher: the next collective raises
            return

    def failed(self, error: BaseException) -> None:
        """End the process where an error is the trouble of the other ranks; returns where it is not."""
        from torch.distributed import DistError

        text = " ".join(str(error).split())
        cut_off = isinstance(error, DistError) or (isinstance(error, RuntimeError) and _CUT_OFF.search(text))
        if self.world == 1 or not cut_off:
            return
        if _TIMED_OUT.search(text):
            self._hung("another rank", error)
        if not launched():  # our launcher names the one that ended
            print(
                f"realvr: error: rank {self.rank} of {self.world} lost another rank, {self.place} ({text[:160]}); "
                f"{self.go_on()}",
                file=sys.stderr,
                flush=True,
            )
        self._leave(LOST)

    def _hung(self, waited_for: str, error: BaseException | None = None) -> NoReturn:
        """Tell the others, print the stacks and the reason, and end the process."""
        self._report(error)
        first = self._tell()
        if first:
            print(
                f"realvr: error: rank {self.rank} of {self.world} waited {self.timeout:g} s for {waited_for}, "
                f"{self.place}: a rank hangs, see the stacks above (timeout in the engine file says how long ranks "
                f"wait); {self.go_on()}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(2 * POLL)  # the others print theirs before a launcher ends them
        self._leave(HUNG)

    def _tell(self) -> bool:
        """Let the other ranks know; whether this one is the first to say it."""
        answers: list[int] = []

        if (store := self._store) is not None:
            telling = threading.Thread(target=lambda: answers.append(store.add("hung", 1)), daemon=True)
            telling.start()
            telling.join(2.0)  # rank 0 may be the one that does not answer
        return answers in ([], [1])

    def _report(self, error: BaseException | None = None) -> None:
        self._ending.acquire()  # never released: one report, and then the end
        print(f"rank {self.rank} of {self.world}, {self.place}: stacks of all threads", file=sys.stderr, flush=True)
        if error is not None:
            traceback.print_exception(error)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()

    def _leave(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
