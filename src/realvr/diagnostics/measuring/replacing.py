"""Vectors that latents are replaced by, for the samples of one run.

* ``position-mean``: the mean of z_t over the samples of the run, position by position. At most ``most`` of them are
  read for it, spread evenly over the run, and added up in float64 in the order of the data; the sample's own latent is
  among them (nothing is left out for the sample that is measured).
* ``another``: z_t of another sample at the same t. The donor is the one that ``realvr eval`` takes in its condition
  "other": other pictures, not of the same pair or cycle, chosen by the seed and the ids alone. It is not chosen by its
  answer: a donor may have the same right answer by chance, as in `realvr eval`; records should name the donor.
* ``noise``: a Gaussian direction with the norm of z_t, from the seed and the sample's id.

Nothing is kept between batches but the mean: donors are read again with the batch that needs them. None of it depends
on batches or processes; each process computes the mean for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import hashed
from realvr.diagnostics.replacements import REPLACEMENTS, Replacement
from realvr.evaluation.ablation import donors, matched_noise, mean_latents
from realvr.evaluation.processes import Ranks
from realvr.runs.progress import Bar

MEAN_OF = 256


class Replacing:
    """Replacements for the latents of any sample of ``samples``, which are all samples of the run."""

    def __init__(
        self,
        model: Model,
        samples: Sequence[Sample],
        kinds: Collection[Replacement] = tuple(REPLACEMENTS),
        seed: int = 0,
        most: int = MEAN_OF,
        batch: int = 8,
    ) -> None:
        self.model, self.seed, self.batch = model, seed, batch
        self.mean_KD: Tensor | None = None
        """(K, D) float32; None where it is not asked for, or no sample can be read."""
        self.donors: dict[str, str] = {}
        """Sample id to the id of the sample that gives ``another``; a sample that has none is missing."""
        self._samples = {sample.id: sample for sample in samples}
        if "position-mean" in kinds:
            self.mean_KD = self._mean(_spread(samples, most))
        if "another" in kinds:
            self.donors = donors(samples, seed)

    def same_answer(self, name: str) -> bool | None:
        """Whether the donor of a sample has the same right answer, in words; None without a donor."""
        if name not in self.donors:
            return None
        donor, own = self._samples[self.donors[name]], self._samples[name]
        return donor.answer_text == own.answer_text

    def _mean(self, samples: Sequence[Sample]) -> Tensor | None:
        spans = self._spans(samples)
        first = next(spans, None)
        return None if first is None else mean_latents(chain([first], spans))

    def _spans(self, samples: Sequence[Sample]) -> Iterator[Tensor]:
        show = Ranks.from_environment().rank == 0
        with Bar("mean latents, samples", len(samples), show=show) as bar:
            for start in range(0, len(samples), self.batch):
                part = samples[start : start + self.batch]
                yield from (latents_KD.cpu() for _, latents_KD in self.model.read(part).spans())
                bar.advance(len(part))

    def given(self, kind: Replacement, reading: Reading) -> list[Tensor | None]:
        """For each sample that was read, the vectors (K, D) that its latents are replaced by, as they are typed and
        placed; None where there are none (no sample to take them from, or it cannot be read)."""
        if reading.latents_RKD is None:
            return []
        own_RKD, found = reading.latents_RKD, self._given(kind, reading)
        return [None if one is None else one.to(own_RKD) for one in found]

    def _given(self, kind: Replacement, reading: Reading) -> Sequence[Tensor | None]:
        if kind == "position-mean":
            return [self.mean_KD] * len(reading.samples)
        if kind == "noise":
            return [matched_noise(own_KD.cpu(), self.seed, sample.id) for sample, own_KD in reading.spans()]
        wanted = [self.donors.get(sample.id) for sample in reading.samples]
        known = dict.fromkeys(name for name in wanted if name is not None)  # once each, in order
        read = self.model.read([self._samples[name] for name in known]) if known else Reading()
        spans = {sample.id: latents_KD for sample, latents_KD in read.spans()}
        return [None if name is None else spans.get(name) for name in wanted]


def replaced(own_KD: Tensor, given_KD: Tensor, positions: Sequence[int]) -> Tensor:
    """The span (K, D) with the given latents at these positions, counted from 0; all others stay as they are."""
    mixed_KD = own_KD.clone()
    if positions:
        mixed_KD[list(positions)] = given_KD[list(positions)].to(own_KD)
    return mixed_KD


def shuffled(count: int, seed: int, name: str) -> list[int]:
    """Slots, counted from 0, in an order fixed by the seed and a name alone."""
    order: list[int] = np.random.default_rng([seed, hashed(name)]).permutation(count).tolist()
    return order


def _spread(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples, evenly over the list, in its order."""
    count = min(most, len(samples))
    return [samples[place * len(samples) // count] for place in range(count)]
