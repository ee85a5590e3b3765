"""Pictures prepared ahead by threads, while a model is at work on earlier ones. No torch.

Decoding, hashing and resizing let other threads run, so a few threads are enough to keep a GPU busy with pictures of
tens of megapixels. How many results may wait is bounded, and so is what is decoded at once: one picture a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MOST_THREADS = 4
"""An 8K picture takes 100 MB while it is decoded, and as much again while it is resized."""


def threads_for(processes: int = 1) -> int:
    """Threads that prepare pictures in one of so many processes: half of the cores it may use, 1 to 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // (2 * processes)))


class Ahead(Generic[K, T]):
    """``make(key)`` of the keys in ``order``, made ahead. Used by one thread, which must leave it (``with``) or close
    it.

    At most ``room`` results exist or are being made; `discard` makes room for the next. `get` gives any key, and makes
    what is not there; what ``make`` raises, it raises. ``have`` says which keys need not be made. Nothing is made
    before the first `get`: who never asks costs nothing.
    """

    def __init__(
        self,
        make: Callable[[K], T],
        order: Iterable[K],
        room: int,
        threads: int | None = None,
        have: Callable[[K], bool] = lambda key: False,
    ) -> None:
        self._make, self._order, self._room, self._have = make, iter(order), max(room, 1), have
        self._made: dict[K, Future[T]] = {}
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
            if key not in self._made and not self._have(key):
                self._made[key] = self._pool.submit(self._make, key)

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
        """These are needed no longer, whether they were asked for or not."""
        for key in keys:
            if (found := self._made.pop(key, None)) is not None:
                found.cancel()
        if self._asked:
            self._fill()

    def close(self) -> None:
        """End the threads; each ends with the picture it is at."""
        self._made.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Ahead[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
