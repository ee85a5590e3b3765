"""Work that worker processes do ahead of the loop: decoding pictures, encoding text, laying out batches."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

AHEAD = 2  # steps per worker


class _Made(Dataset[Any]):
    """An order is its own index: the loader hands it to a worker, which makes it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __getitem__(self, order: Any) -> Any:
        return self.make(order)


def _leave_interrupts_to_the_loop(worker: int) -> None:
    """A forked worker has the loop's handler for Ctrl-C, and would announce a checkpoint of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ahead(
    make: Callable[[Any], Any], orders: Iterator[tuple[Any, Any]], workers: int = 0
) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """((note, order), make(order)) for each (note, order), in order; made by forked processes where ``workers`` > 0.

    Results do not depend on the number of workers. What ``make`` returns must not lie on a GPU.
    """
    if workers == 0:
        for note, order in orders:
            yield (note, order), make(order)
        return
    given: deque[tuple[Any, Any]] = deque()

    def hand_out() -> Iterator[Any]:
        for pair in orders:
            given.append(pair)
            yield pair[1]

    loader = DataLoader(_Made(make), batch_size=None, sampler=hand_out(), num_workers=workers, prefetch_factor=AHEAD)  # type: ignore[call-overload]
    for made in loader:
        yield given.popleft(), made
