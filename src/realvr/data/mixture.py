"""Weighted mixtures of sources in a fixed order, shared out over ranks and loader workers, resumable at any point.

The order is one global sequence that depends on the seed alone. Rank r of R takes positions r, r+R, r+2R, ... and its
loader workers deal those out in turn, so shards never overlap, lose nothing, and advance in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from realvr.errors import UserError

T = TypeVar("T")


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to ``weights`` that add up to ``total`` (largest remainders, ties to the first)."""
    shares = [weight / sum(weights) * total for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_rest = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


class Mixture(Generic[T]):
    """Endless (or ``epochs`` long) sequence of items drawn from several sources.

    ``weights`` are shares of the draws. Without them every item is drawn exactly once per epoch. With them an epoch has
    ``epoch_size`` draws (default: as many as there are items); each source is walked in shuffled passes that run on
    from epoch to epoch, so that an item comes again only when all items of its source have come equally often.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[T]],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        epoch_size: int | None = None,
        epochs: int | None = None,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        workers: int = 1,
        accept_other_data: bool = False,
    ) -> None:
        if not (0 <= rank < world and 0 <= worker < workers):
            raise UserError(f"no shard: rank {rank} of {world}, worker {worker} of {workers}")
        self.names = [name for name in sources if weights is None or weights.get(name, 0) != 0]
        self.sources = [sources[name] for name in self.names]
        self.seed, self.epochs = seed, epochs
        self.rank, self.world, self.worker, self.workers = rank, world, worker, workers
        self.accept_other_data = accept_other_data
        """Whether a state of other sizes is continued, at the same number of draws."""
        self.draws = self._draws(sources, weights, epoch_size)
        self.epoch_size = sum(self.draws)
        self.position = rank + world * worker
        """Next global position of this shard."""
        self._passes: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._epoch: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def _draws(
        self, sources: Mapping[str, Sequence[T]], weights: Mapping[str, float] | None, epoch_size: int | None
    ) -> list[int]:
        """Draws per epoch from each source, checked."""
        if unknown := sorted(set(weights or ()) - set(sources)):
            raise UserError(f"weights name unknown sources: {', '.join(unknown)}; there are {', '.join(sources)}")
        if missing := [name for name in sources if weights is not None and name not in weights]:
            raise UserError(f"no weight for {', '.join(missing)}; give every source one (0 leaves it out)")
        if not self.names:
            raise UserError("the mixture has no source with a weight")
        for name, source in zip(self.names, self.sources, strict=True):
            if len(source) == 0:
                raise UserError(f"source {name!r} holds no sample; run `realvr data check` on its files")
        sizes = [len(source) for source in self.sources]
        if weights is None:
            if epoch_size not in (None, sum(sizes)):
                raise UserError("an epoch without weights is every item once; give weights to choose its size")
            return sizes
        shares = [float(weights[name]) for name in self.names]
        if not all(math.isfinite(share) and share > 0 for share in shares):
            raise UserError(f"weights must be positive numbers (0 leaves a source out): {dict(weights)}")
        draws = apportion(shares, epoch_size or sum(sizes))
        if 0 in draws:
            lost = ", ".join(name for name, count in zip(self.names, draws, strict=True) if not count)
            raise UserError(f"weights leave no draw per epoch for {lost}; raise the weight or the epoch size")
        return draws

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed % 2**63, *key])))

    def _epoch_order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For every place of an epoch: which source, and how many draws from it came before in this epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            which = np.repeat(np.arange(len(self.draws)), self.draws)
            self._rng(0, epoch).shuffle(which)
            earlier = np.empty_like(which)
            for source, count in enumerate(self.draws):
                earlier[which == source] = np.arange(count)
            self._epoch = (epoch, which, earlier)
        return self._epoch[1], self._epoch[2]

    def _pass_order(self, source: int, number: int) -> NDArray[np.int64]:
        """Shuffled order of one pass over a source; the last few are kept."""
        key = (source, number)
        if key not in self._passes:
            if len(self._passes) > 2 * len(self.sources):
                self._passes.clear()
            self._passes[key] = self._rng(1, source, number).permutation(len(self.sources[source]))
        return self._passes[key]

    def locate(self, position: int) -> tuple[str, int]:
        """(source name, index in it) of a global position. Depends on seed, sizes and weights only."""
        epoch, place = divmod(position, self.epoch_size)
        which, earlier = self._epoch_order(epoch)
        source = int(which[place])
        drawn = epoch * self.draws[source] + int(earlier[place])
        number, offset = divmod(drawn, len(self.sources[source]))
        return self.names[source], int(self._pass_order(source, number)[offset])

    def places(self) -> Iterator[tuple[str, int]]:
        """(source name, index in it) of the items, in their order; shares its progress with iterating over items."""
        while self.epochs is None or self.position < self.epochs * self.epoch_size:
            place = self.locate(self.position)
            # Moved on before the item is handed over: a state taken by its receiver starts at the next item.
            self.position += self.world * self.workers
            yield place

    def at(self, place: tuple[str, int]) -> T:
        """The item at a place."""
        return self.sources[self.names.index(place[0])][place[1]]

    def __iter__(self) -> Iterator[T]:
        for place in self.places():
            yield self.at(place)

    def upcoming(self, count: int) -> list[T]:
        """The next items, at most so many, without moving on."""
        stride = self.world * self.workers
        last = math.inf if self.epochs is None else self.epochs * self.epoch_size
        positions = range(self.position, self.position + count * stride, stride)
        return [self.at(self.locate(position)) for position in positions if position < last]

    def _identity(self) -> dict[str, Any]:
        sizes = [len(source) for source in self.sources]
        return {"seed": self.seed, "names": self.names, "sizes": sizes, "draws": self.draws}

    def state_dict(self) -> dict[str, Any]:
        """Where this shard stands, and what the order depends on."""
        shard = [self.rank, self.world, self.worker, self.workers]
        return {"position": self.position, "shard": shard, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the last item. Another number of ranks or workers may continue from a state that was
        taken while all shards had taken equally many items."""
        for name, value in self._identity().items():
            if state.get(name) != value and not (self.accept_other_data and name in ("sizes", "draws")):
                raise UserError(f"cannot resume: {name} was {state.get(name)!r} in the saved state, now {value!r}")
        rank, world, worker, workers = state["shard"]
        if [rank, world, worker, workers] == [self.rank, self.world, self.worker, self.workers]:
            self.position = int(state["position"])
            return
        finished = int(state["position"]) // (world * workers) * (world * workers)
        self.position = self._first_from(finished)

    def _first_from(self, start: int) -> int:
        """First position of this shard that is not before ``start``."""
        stride = self.world * self.workers
        first = self.rank + self.world * self.worker
        return first + max(0, math.ceil((start - first) / stride)) * stride
