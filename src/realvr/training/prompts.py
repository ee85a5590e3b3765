"""Stage-2 prompts: one global order that every rank walks, so that any split over ranks is the same step."""

from __future__ import annotations

from dataclasses import dataclass

from realvr import answers
from realvr.backbone.samples import answer_tokens
from realvr.backbone.types import Prompt
from realvr.data.mixture import Mixture
from realvr.data.sample import Sample
from realvr.imaging.types import ImageInput
from realvr.training.dropping import EMPTY_ANSWER, ENOUGH, of_all_ranks, over, too_many
from realvr.training.examples import Encoder, all_of
from realvr.training.next_prompts import NextPrompts
from realvr.training.settings import TrainSettings
from realvr.training.task import Ranks


@dataclass(frozen=True)
class PromptBatch:
    """One microbatch of prompts."""

    samples: list[Sample]
    prompts: list[Prompt]
    place: int
    """Of the first prompt in the global batch."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def images(self) -> list[ImageInput]:
        """Pictures of all prompts, in order."""
        return [image for prompt in self.prompts for image in prompt.images]


class PromptStream:
    """Global batches of ``optim.batch`` prompts; each rank takes its share, cut into microbatches.

    With ``threads`` that many encode this rank's share of the next batch after `prepare`, while this one is in use; no
    more than that is held ahead. What is drawn, and counted, does not depend on them. `close` ends them.
    """

    def __init__(
        self, samples: Mixture[Sample], encoder: Encoder, settings: TrainSettings, ranks: Ranks, threads: int = 0
    ) -> None:
        self.samples, self.encoder, self.settings, self.ranks = samples, encoder, settings, ranks
        self._next = NextPrompts(encoder, threads) if threads else None

    def take(self) -> list[PromptBatch]:
        """This rank's microbatches of the next global batch."""
        pairs, size = self._share(), self.settings.optim.microbatch
        if self._next is not None:
            self._next.forget()
        first = self.ranks.rank * len(pairs)
        return [
            PromptBatch([s for s, _ in pairs[i : i + size]], [p for _, p in pairs[i : i + size]], first + i)
            for i in range(0, len(pairs), size)
        ]

    def prepare(self) -> None:
        """Have the threads begin with the next global batch."""
        if self._next is not None:
            block = self.samples.upcoming(self.settings.optim.batch)
            self._next.prepare(block[i] for i in self._part(len(block)))

    def close(self) -> None:
        """End the threads."""
        if self._next is not None:
            self._next.close()
            self._next = None

    def _part(self, count: int) -> range:
        """Which of so many drawn samples this rank encodes."""
        size = -(-count // self.ranks.world)
        return range(self.ranks.rank * size, min((self.ranks.rank + 1) * size, count))

    def _share(self) -> list[tuple[Sample, Prompt]]:
        """Every rank walks the same order, encodes a part of it and hears from the others which samples cannot be used,
        so that the global batch is the same whatever the number of ranks."""
        data, wanted = self.settings.data, self.settings.optim.batch
        rank, world, draws = self.ranks.rank, self.ranks.world, self.encoder.draws
        if data.workers and not self.encoder.kept:
            self.encoder.encode_all(all_of(self.samples), data.workers, sequences=False)
        accepted: list[tuple[Sample, Prompt | None]] = []
        fruitless = 0
        stream = iter(self.samples)
        while len(accepted) < wanted:
            block = [next(stream) for _ in range(wanted - len(accepted))]
            part = self._part(len(block))
            draws.drawn += len(part)
            mine = {i: self._encode(block[i]) for i in part}
            usable = {i for each in self.ranks.gather_objects([i for i in mine if mine[i] is not None]) for i in each}
            accepted += [(sample, mine.get(i)) for i, sample in enumerate(block) if i in usable]
            fruitless = 0 if usable else fruitless + len(block)
            self._refuse_fruitless(fruitless)
        share = wanted // world
        own = accepted[rank * share : (rank + 1) * share]
        # After a rejection a share may hold samples that another rank has encoded.
        pairs = [(sample, prompt or self._encode(sample)) for sample, prompt in own]
        return [(sample, prompt) for sample, prompt in pairs if prompt is not None]

    def _refuse_fruitless(self, fruitless: int) -> None:
        if fruitless < min(ENOUGH, self.samples.epoch_size + 1):
            return
        draws = of_all_ranks(self.ranks, self.encoder.draws)
        if fruitless > self.samples.epoch_size or over(draws, self.settings.data.max_dropped):
            raise too_many(draws, self.settings, f"after {fruitless:,} rows without a usable one")

    def _encode(self, sample: Sample) -> Prompt | None:
        truth = answers.canonical_answer(sample.answer, sample.choices)
        if truth is None or not any(answer_tokens(self.encoder.backbone, truth, sample.choices)[1]):
            detail = f"{sample.source or sample.id}: answer {sample.answer!r:.60}"
            self.encoder.draws.reject(EMPTY_ANSWER, detail)
            return None
        return self.encoder.prompt(sample, self._next.get(sample) if self._next is not None else None)
