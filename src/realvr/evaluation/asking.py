"""Putting batches of questions to a responder: images ahead of time, smaller batches when memory runs out."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from realvr.answers import JUDGE, equal
from realvr.backbone.samples import conversation
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.benchmark import benchmark_of
from realvr.evaluation.records import Condition, Prediction
from realvr.evaluation.responder import Plan, Reply, Request, Responder
from realvr.imaging.ahead import Ahead, threads_for
from realvr.imaging.processing import picture_hash
from realvr.imaging.types import ImageInput

KEPT_IMAGES = 2
"""Prepared images that are remembered: questions in a row often share theirs."""


@dataclass(frozen=True)
class Asked:
    """A question with its images ready, or the reason why they are not."""

    sample: Sample
    images: list[Any]
    error: str | None = None
    pictures: tuple[str, ...] = ()
    """Hashes of the decoded images."""


class ImageLoader:
    """Opens and prepares the images of samples, and remembers the last few. Used by one thread; `make` by several."""

    def __init__(self, prepare: Callable[[Any], Any] | None, keep: int = KEPT_IMAGES) -> None:
        self._prepare = prepare
        self._keep = keep
        self._ready: OrderedDict[ImageRef, tuple[Any, str]] = OrderedDict()

    def known(self, image: ImageRef) -> tuple[Any, str] | None:
        """What `make` has given for the image, where that is remembered."""
        return self._ready.get(image)

    def load(self, samples: Iterable[Sample], get: Callable[[ImageRef], tuple[Any, str]] | None = None) -> list[Asked]:
        """Each sample with its images. An image that cannot be used is an error of its question alone. ``get`` gives
        an image as `make` does."""
        found = []
        for sample in samples:
            try:
                ready = [self._image(image, get or self.make) for image in sample.images]
                found.append(Asked(sample, [one for one, _ in ready], None, tuple(picture for _, picture in ready)))
            except (UserError, OSError) as error:
                found.append(Asked(sample, [], str(error) or type(error).__name__))
        return found

    def make(self, image: ImageRef) -> tuple[Any, str]:
        """The image as the responder takes it, and the hash of what it shows."""
        opened = image.open()
        ready = self._prepare(opened) if self._prepare is not None else opened
        return ready, ready.picture if isinstance(ready, ImageInput) else picture_hash(opened)

    def _image(self, image: ImageRef, get: Callable[[ImageRef], tuple[Any, str]]) -> tuple[Any, str]:
        ready = self._ready.pop(image, None) or get(image)
        self._ready[image] = ready
        while len(self._ready) > self._keep:
            self._ready.popitem(last=False)
        return ready


@dataclass
class Waiting:
    """How long the asking of questions took in this process, and how much of that it waited for images."""

    seconds: float = 0.0
    waited: float = 0.0

    @property
    def share(self) -> float:
        """Part of the time in which the model waited for images."""
        return self.waited / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, float]:
        """For ``timing.json``."""
        return {"seconds": self.seconds, "waited": self.waited, "gpu_wait": self.share}


def prefetch(
    batches: Sequence[Sequence[Sample]], loader: ImageLoader, waiting: Waiting | None = None, processes: int = 1
) -> Generator[list[Asked]]:
    """The batches with their images; while the model answers one, threads make as many images as a batch has for those
    that follow. Close it (`contextlib.closing`) where not all batches may be taken."""
    if not batches:
        return
    order = (image for batch in batches for sample in batch for image in sample.images)
    room = max(len({image for sample in batch for image in sample.images}) for batch in batches)
    threads, begun = threads_for(processes), time.perf_counter()
    with Ahead(loader.make, order, max(room, threads), threads, loader.known) as ahead:
        try:
            for batch in batches:
                loaded = []
                for sample in batch:
                    loaded += loader.load([sample], ahead.get)
                    ahead.discard(sample.images)  # also those behind one that cannot be used
                yield loaded
        finally:
            if waiting is not None:
                waiting.seconds += time.perf_counter() - begun
                waiting.waited += ahead.waited


def request_seed(seed: int, bench: str, question: str) -> int:
    """A seed for sampling one question: the same in whatever batch, order or process it is asked."""
    text = f"{seed}/{bench}/{question}".encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class Asker:
    """Asks in batches of at most ``size``, halved when the GPU's memory does not suffice."""

    def __init__(self, responder: Responder, size: int) -> None:
        self.responder = responder
        self.size = size

    def ask(self, bench: str, asked: Sequence[Asked], plans: Sequence[Plan], seed: int) -> list[list[Reply]]:
        """Replies per plan, per question. A question whose images failed gets its error without being asked."""
        replies: list[list[Reply]] = [
            [Reply("", finish="error", error=item.error) for item in asked] for _ in range(len(plans))
        ]
        ready = [number for number, item in enumerate(asked) if item.error is None]
        requests = [
            Request(
                item.sample,
                conversation(item.sample, item.images, benchmark_of(bench).prompt(item.sample)),
                request_seed(seed, bench, item.sample.id),
            )
            for item in (asked[number] for number in ready)
        ]
        for row, found in zip(replies, self.put(bench, requests, [_rows(plan, ready) for plan in plans]), strict=True):
            for number, reply in zip(ready, found, strict=True):
                row[number] = reply
        return replies

    def put(self, bench: str, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        """Replies per plan, per request, however they are worded; ``bench`` is what an error calls the set."""
        replies: list[list[Reply]] = [[] for _ in plans]
        start = 0
        while start < len(requests):
            part = range(start, min(start + self.size, len(requests)))
            answered = self._reply(bench, [requests[r] for r in part], [_rows(plan, part) for plan in plans])
            if answered is None:
                continue
            for row, found in zip(replies, answered, strict=True):
                row += found
            start += len(part)
        return replies

    def _reply(self, bench: str, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]] | None:
        """Replies, or None where the batch was too large and has been halved."""
        try:
            return self.responder.reply(requests, plans)
        except torch.cuda.OutOfMemoryError:
            pass  # handled outside: the traceback would keep the tensors of the failed pass alive
        if len(requests) == 1:
            raise UserError(
                f"{bench}, question {requests[0].sample.id}: the GPU's memory does not suffice for one question; give "
                "fewer visual tokens per image (--max-tokens), or a smaller --dtype"
            )
        torch.cuda.empty_cache()
        self.size = (len(requests) + 1) // 2
        print(f"realvr: note: out of GPU memory, going on with batches of {self.size}", file=sys.stderr)
        return None


def _rows(plan: Plan, rows: Sequence[int]) -> Plan:
    """The plan for some of the requests."""
    return plan if plan.given is None else replace(plan, given=[plan.given[row] for row in rows])


def prediction(
    bench: str, asked: Asked, condition: Condition, latents: int, seed: int, reply: Reply, policy: str
) -> Prediction:
    """The record of one reply, read under ``policy``."""
    sample = asked.sample
    parser = benchmark_of(bench).parser(policy)
    extracted = None if reply.error is not None else parser.read(reply.text, sample.choices)
    return Prediction(
        bench=bench,
        question=sample.id,
        condition=condition,
        latents=latents,
        seed=seed,
        answer=sample.answer,
        question_text=sample.question,
        text=reply.text,
        extracted=extracted,
        policy=policy,
        parser=str(parser),
        judge=JUDGE,
        correct=bool(equal(extracted, sample.answer, sample.choices)),
        choices=list(sample.choices),
        task=sample.task,
        category=sample.category,
        pair=sample.pair,
        cycle=sample.cycle,
        tags=dict(sample.tags),
        prompt=reply.prompt,
        images=[image.id for image in sample.images],
        pictures=list(asked.pictures),
        finish="error" if reply.error is not None else reply.finish,
        new_tokens=reply.new_tokens,
        seconds=round(reply.seconds, 4),
        error=reply.error,
    )
