"""Pictures prepared ahead by threads, while a model is at work on earlier ones. No torch.

Decoding, hashing and resizing let other threads run, so a few threads are enough to keep a GPU busy with pictures of
tens of megapixels. How many results may wait is bounded, and so is what is decoded at once: one picture a thread.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MOST_THREADS = 4
"""An 8K picture takes 100 MB while it is decoded, and as much again while it is resized."""


def threads_for(processes: int = 1) -> int:
    """Threads that prepare pictures in one of so many processes of this machine: half of the cores they may use,
    shared; 1 to 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // (2 * processes)))


class Ahead(Generic[K, T]):
    """``make(key)`` of the keys in ``order``, made ahead. Used by one thread, which must leave it (``with``) or close
    it.

    At most ``room`` results exist or are being made; `discard` makes room for the next. A key that comes several times
    in ``order`` is discarded as often: its result stays until the last one that could be seen. `get` gives any key, and
    makes what is not there; what ``make`` raises, it raises. ``known`` gives what need not be made. Nothing is made
    before the first `get`: who never asks costs nothing.
    """

    def __init__(
        self,
        make: Callable[[K], T],
        order: Iterable[K],
        room: int,
        threads: int | None = None,
        known: Callable[[K], T | None] = lambda key: None,
    ) -> None:
        self._make, self._order, self._room, self._known = make, iter(order), max(room, 1), known
        self._made: dict[K, Future[T]] = {}
        self._uses: Counter[K] = Counter()  # of what is in _made, as far as the order has been read
        self._pool = ThreadPoolExecutor(threads or threads_for(), thread_name_prefix="pictures")
        self._asked = False
        self.waited = 0.0
        """Seconds that `get` has taken, in which its caller could do nothing else."""

    def _fill(self) -> None:
        while len(self._made) < self._room:
            try:
                key = next(self._order)
            except StopIteration:
                return
            self._uses[key] += 1
            if key not in self._made:
                self._made[key] = self._begin(key)

    def _begin(self, key: K) -> Future[T]:
        if (known := self._known(key)) is None:
            return self._pool.submit(self._make, key)
        there: Future[T] = Future()
        there.set_result(known)
        return there

    def get(self, key: K) -> T:
        """The result for a key, which stays until it is discarded."""
        begun = time.perf_counter()
        if not self._asked:
            self._asked = True
            self._fill()
        try:
            found = self._made.get(key)
            return self._make(key) if found is None else found.result()
        finally:
            self.waited += time.perf_counter() - begun

    def discard(self, keys: Iterable[K]) -> None:
        """These were used, whether they were asked for or not: one use of each."""
        for key in keys:
            self._uses[key] -= 1
            if self._uses[key] <= 0:
                del self._uses[key]
                if (found := self._made.pop(key, None)) is not None:
                    found.cancel()
        if self._asked:
            self._fill()

    def close(self) -> None:
        """End the threads; each ends with the picture it is at."""
        self._made.clear()
        self._uses.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Ahead[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
