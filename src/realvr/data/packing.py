"""Packing several examples into rows of at most ``budget`` tokens, each keeping its own segment and positions.

Best fit decreasing within a window of consecutive examples. Windows are independent, so the same input always gives the
same rows, and a run resumes from the start of a window plus the number of rows already taken from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from realvr.errors import UserError

EXAMPLE_TOO_LONG = "example_too_long"
EXAMPLE_EMPTY = "example_empty"
HOPELESS = 10_000
"""An endless source none of whose examples fits must not spin for ever."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Pack(Generic[T]):
    """One row: whole examples side by side. Token ``t`` may only attend within its own segment."""

    items: tuple[T, ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Offset of each example in the row."""
        return tuple(int(value) for value in np.cumsum((0, *self.lengths[:-1])))

    def segment_ids(self, width: int | None = None) -> NDArray[np.int64]:
        """(T,) 0, 1, ... for the examples in order, and -1 on padding up to ``width``."""
        return _padded(np.repeat(np.arange(len(self.lengths)), self.lengths), width, -1)

    def positions(self, width: int | None = None) -> NDArray[np.int64]:
        """(T,) position of each token within its own example, from 0; 0 on padding."""
        return _padded(np.concatenate([np.arange(length) for length in self.lengths]), width, 0)

    def attention(self, width: int | None = None) -> NDArray[np.bool_]:
        """(T, T) True where a query (row) may see a key (column): same example, not later."""
        segments = self.segment_ids(width)
        same = (segments[:, None] == segments[None, :]) & (segments >= 0)[:, None]
        return np.asarray(np.tril(same), dtype=np.bool_)


def _padded(values: NDArray[Any], width: int | None, fill: int) -> NDArray[np.int64]:
    if width is None:
        return values.astype(np.int64)
    if width < len(values):
        raise ValueError(f"a row of {len(values)} tokens does not fit a width of {width}")
    return np.concatenate([values, np.full(width - len(values), fill)]).astype(np.int64)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of indices by best fit decreasing. Every length must be in [1, budget].

    Ties are broken by position, rows are ordered by their earliest example, and examples within a row by position, so
    that the plan depends on nothing but its input.
    """
    if any(not 1 <= length <= budget for length in lengths):
        raise ValueError(f"lengths must be between 1 and {budget}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [(room[row], row) for row in range(len(rows)) if room[row] >= lengths[index]]
        if fits:
            row = min(fits)[1]
        else:
            row = len(rows)
            rows.append([])
            room.append(budget)
        rows[row].append(index)
        room[row] -= lengths[index]
    return sorted(sorted(row) for row in rows)


class ResumableSource(Protocol[T_co]):
    """What a packed stream reads from, such as `realvr.data.mixture.Mixture`."""

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration goes on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another process stopped."""
        ...


class PackedStream(Generic[T]):
    """Rows packed from a resumable source of examples.

    ``length`` gives an example's tokens, image and response included. An example over the budget is rejected whole,
    never cut, and counted in ``rejected``; ``on_reject(example, reason)`` hears of each.
    """

    def __init__(
        self,
        source: ResumableSource[T],
        length: Callable[[T], int],
        budget: int = 4096,
        window: int = 256,
        on_reject: Callable[[T, str], None] | None = None,
    ) -> None:
        if budget < 1 or window < 1:
            raise UserError(f"packing needs a token budget and a window of at least 1, not {budget} and {window}")
        self.source = source
        self.length = length
        self.budget = budget
        self.window = window
        self.on_reject = on_reject
        self.rejected: Counter[str] = Counter()
        self._start = source.state_dict()  # source state at the start of the current window
        self._taken = 0  # rows of that window already yielded

    def __iter__(self) -> Iterator[Pack[T]]:
        examples = iter(self.source)
        while True:
            before, counts = self._start, Counter(self.rejected)
            taken = self._taken
            chosen = self._fill(examples)
            if taken:
                self.rejected = counts  # this window was counted before the interruption
            lengths = [self.length(example) for example in chosen]
            after = self.source.state_dict()
            for number, row in enumerate(plan(lengths, self.budget)):
                if number < taken:
                    continue
                self._start, self._taken = before, number + 1
                yield Pack(tuple(chosen[i] for i in row), tuple(lengths[i] for i in row))
            self._start, self._taken = after, 0
            if not chosen:
                return

    def _fill(self, examples: Iterator[T]) -> list[T]:
        """The next window of examples that fit."""
        chosen: list[T] = []
        in_a_row = 0
        for example in examples:
            tokens = self.length(example)
            if 1 <= tokens <= self.budget:
                chosen.append(example)
                in_a_row = 0
                if len(chosen) == self.window:
                    break
                continue
            reason = EXAMPLE_TOO_LONG if tokens > self.budget else EXAMPLE_EMPTY
            self.rejected[reason] += 1
            in_a_row += 1
            if self.on_reject is not None:
                self.on_reject(example, reason)
            if in_a_row == HOPELESS:
                raise UserError(f"{HOPELESS:,} examples in a row do not fit {self.budget} tokens; raise the budget")
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Enough to continue with the row after the last one yielded."""
        return {"source": self._start, "taken": self._taken, "rejected": dict(self.rejected)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; call before iterating."""
        self.source.load_state_dict(state["source"])
        # The source's own word for where it stands: it may have accepted a state of other data.
        self._start, self._taken = self.source.state_dict(), int(state["taken"])
        self.rejected = Counter(state["rejected"])


def pack_all(
    examples: Iterable[T], length: Callable[[T], int], budget: int
) -> tuple[list[Pack[T]], list[tuple[T, str]]]:
    """Pack a finite list at once: (rows, [(rejected example, reason)])."""
    kept: list[T] = []
    rejected: list[tuple[T, str]] = []
    for example in examples:
        tokens = length(example)
        if 1 <= tokens <= budget:
            kept.append(example)
        else:
            rejected.append((example, EXAMPLE_TOO_LONG if tokens > budget else EXAMPLE_EMPTY))
    lengths = [length(example) for example in kept]
    rows = plan(lengths, budget)
    return [Pack(tuple(kept[i] for i in row), tuple(lengths[i] for i in row)) for row in rows], rejected
