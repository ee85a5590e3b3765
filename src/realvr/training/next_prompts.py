"""Prompts of the next step, encoded by threads while the model works on this one."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from realvr.backbone.types import Prompt
from realvr.data.sample import Sample
from realvr.training.examples import Encoder


class NextPrompts:
    """Prompts of samples that will probably be drawn next. Used by one thread.

    A guess: whoever draws another sample, or one whose prompt could not be made, encodes it as if there were no
    threads, and there meets the error or counts the reason. So nothing here is part of a run's state. The threads talk
    to no other rank, and leave the GPU alone, on which a graph may be in the middle of being recorded.

    Held are the prompts of the last `prepare`, until the next one or `forget`, beside the pictures that threads are at.
    """

    def __init__(self, encoder: Encoder, threads: int) -> None:
        self._encoder = encoder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self._made: dict[int, tuple[Sample, Future[Prompt | None]]] = {}  # a sample that is held keeps its id

    def prepare(self, samples: Iterable[Sample]) -> None:
        """Begin with these, in their order, and forget those of before."""
        self.forget()
        for sample in samples:
            if id(sample) not in self._made and not self._encoder.holds(sample):
                self._made[id(sample)] = sample, self._pool.submit(self._encoder.prompt_aside, sample)

    def get(self, sample: Sample) -> Prompt | None:
        """The prompt of this very sample, waited for; None where there is none."""
        _, made = self._made.get(id(sample), (None, None))
        return None if made is None or made.exception() is not None else made.result()

    def forget(self) -> None:
        """Drop what was prepared, and do not begin with what was not begun."""
        for _, made in self._made.values():
            made.cancel()
        self._made = {}

    def close(self) -> None:
        """End the threads, without waiting for the picture that each is at."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._made = {}
