"""Work that worker processes do ahead of the loop: decoding pictures, encoding text, laying out batches."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from realvr.errors import UserError

AHEAD = 2  # steps per worker


class _Made(Dataset[Any]):
    """An order is its own index: the loader hands it to a worker, which makes it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __getitem__(self, order: object) -> object:
        return self.make(order)


def _leave_interrupts_to_the_loop(worker: int) -> None:
    """A forked worker has the loop's handler for Ctrl-C, and would announce a checkpoint of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def prefetch(
    make: Callable[[Any], Any], orders: Iterator[tuple[Any, Any]], workers: int = 0
) -> Generator[tuple[tuple[Any, Any], Any]]:
    """((note, order), make(order)) for each (note, order), in order; made by forked processes where ``workers`` > 0.

    Results do not depend on the number of workers. What ``make`` returns must not lie on a GPU. Closing the generator
    ends the processes.
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

    loader = DataLoader(
        _Made(make),
        batch_size=None,
        sampler=hand_out(),  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=AHEAD,
        worker_init_fn=_leave_interrupts_to_the_loop,
    )
    for made in loader:
        yield given.popleft(), made


class _Plain(pickle.Pickler):
    """Tensors as arrays: torch's own way through a pipe opens a file for each."""

    def reducer_override(self, value: object) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _send(pipe: Connection, value: object) -> None:
    buffer = io.BytesIO()
    _Plain(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    pipe.send_bytes(buffer.getbuffer())


def parallel_map(make: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Iterator[Any]:
    """``make(item)`` of every item, in order, by forked processes. Tensors in the results must not lie on a GPU."""
    context = multiprocessing.get_context("fork")

    def work(number: int, pipe: Connection, theirs: list[Connection]) -> None:
        for end in theirs:  # the loop's: open here, a write would outwait a loop that was killed
            end.close()
        _leave_interrupts_to_the_loop(number)
        torch.set_num_threads(1)
        try:
            for item in items[number::workers]:
                _send(pipe, (make(item), None))
        except (BrokenPipeError, ConnectionResetError):  # the loop gave up
            pass
        except UserError as error:
            _send(pipe, (None, error))
        except Exception:  # whatever it is, the loop has to hear of it
            _send(pipe, (None, RuntimeError(f"a process that encodes examples failed:\n{traceback.format_exc()}")))
        pipe.close()
        os._exit(0)  # objects of the loop that were forked with us must not be torn down here

    with ExitStack() as stack:
        pipes: list[Connection] = []
        for number in range(min(workers, len(items))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(number, sender, [*pipes, receiver]), daemon=True)
            process.start()
            sender.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            stack.callback(receiver.close)
            pipes.append(receiver)
        for place in range(len(items)):
            try:
                value, error = pickle.loads(pipes[place % workers].recv_bytes())
            except EOFError:
                raise RuntimeError("a process that encodes examples ended without a word; was it killed?") from None
            if error is not None:
                raise error
            yield value
