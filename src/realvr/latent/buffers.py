"""The static buffers that a run keeps, by shape: which are used again, which are dropped, and whether there is room."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from realvr.latent import room
from realvr.latent.modes import bucket, round_up
from realvr.latent.state import State
from realvr.latent.static import Branches, Trunk

_WASTE = 2
"""Times the rows and columns asked for that buffers of another shape may have."""
PATIENCE = 8
"""Shapes dropped before they were used again, less those that were, after which no others are made."""
KINDS = 4
"""Recorded steps of one shape, by what of the sampling is in them."""


class Shape(NamedTuple):
    """Rows and columns of a trunk, and what it holds."""

    rows: int
    columns: int
    kind: tuple[object, ...]

    @classmethod
    def of(cls, state: State, rows: int, columns: int) -> Shape:
        """For the keys and values of a state."""
        key, value = state.kv[0][0]
        return cls(rows, columns, (len(state.kv), key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device))

    def holds(self, other: Shape) -> bool:
        """Whether buffers of this shape may serve for another, without too much waste."""
        larger = self.kind == other.kind and self.rows >= other.rows and self.columns >= other.columns
        return larger and self.rows * self.columns <= _WASTE * other.rows * other.columns


class Buffers:
    """Trunks with the branches on them. At most ``shapes`` trunks are kept, the least recently used goes first.

    As long as there is a place, every shape gets buffers of its own: in 16 bits the last bits depend on their size, and
    a continued run should find the sizes that the killed one had. Once all places are taken, larger buffers serve too.
    ``columns`` and ``tokens`` are what lengths are rounded up to; ``counts`` are those of `FastDecode`.
    """

    def __init__(self, columns: int, tokens: int, shapes: int, counts: Counter[str]) -> None:
        self.columns, self.tokens, self.shapes, self.counts = columns, tokens, shapes, counts
        self.trunks: dict[Shape, Trunk] = {}
        self.branches: dict[int, Branches] = {}
        self._wasted = 0

    # ------------------------------------------------------------------ is there room?

    def why_not(self, state: State, new: int, group: int) -> str | None:
        """Why buffers should not be made for this state although there may be memory: they would not be used again."""
        shape = self._asked(state, new, group)
        if self._wasted < PATIENCE or self._find(shape) is not None or len(self.trunks) < self.shapes:
            return None
        return "shapes change too often: buffers and recorded steps were dropped before they could be used again"

    def no_room(self, state: State, new: int, group: int) -> str | None:
        """Why the buffers of this shape cannot be made; where memory is short, those of other shapes make room."""
        shape = self._asked(state, new, group)
        device = state.next_B.device
        needed = self._bytes(state, shape, new, group)
        free = room.free_bytes(device, needed)
        if free is not None and needed > free:
            kept = self._find(shape)
            for other in [each for each in self.trunks if each != kept and self._wasted < PATIENCE]:
                self.drop(other)
            room.give_back(device)
            free = room.free_bytes(device, needed)
        if free is not None and needed > free:
            return f"static buffers need {needed / 2**30:.1f} GiB, and {max(free, 0) / 2**30:.1f} GiB are free"
        return None

    def _asked(self, state: State, new: int, group: int) -> Shape:
        return Shape.of(state, state.rows, bucket(state.length + (0 if group else new), self.columns))

    def _bytes(self, state: State, shape: Shape, new: int, group: int) -> int:
        """What the buffers of this shape take, less those that are there already."""
        size = round_up(new, self.tokens)
        column = sum(x[0, :, 0].numel() * x.element_size() for pieces in state.kv for x in pieces[0])  # of one row
        found = self._find(shape)
        if found is None:
            return column * shape.rows * (shape.columns + group * size)
        own = self.branches.get(id(self.trunks[found]))
        if not group or (own is not None and _suits(own, group, size)):
            return 0
        return column * found.rows * group * size - (0 if own is None else own.bytes)

    # ------------------------------------------------------------------ get and drop

    def trunk(self, state: State, length: int) -> Trunk:
        """For ``length`` columns of a state."""
        return self._trunk(state, Shape.of(state, state.rows, bucket(length, self.columns)))

    def smaller(self, state: State, rows: int, trunk: Trunk) -> Trunk:
        """With fewer rows than ``trunk``, and as many columns."""
        return self._trunk(state, Shape.of(state, rows, trunk.columns), exact=True)

    def _trunk(self, state: State, shape: Shape, exact: bool = False) -> Trunk:
        found = shape if exact and shape in self.trunks else None if exact else self._find(shape)
        if found is None:
            while len(self.trunks) >= self.shapes:
                self.drop(next(iter(self.trunks)))
            found, trunk = shape, Trunk(state, shape.rows, shape.columns)
        else:
            trunk = self.trunks.pop(found)
        self.trunks[found] = trunk  # the newest last
        return trunk

    def _find(self, asked: Shape) -> Shape | None:
        """Of a trunk that serves for this shape."""
        if asked in self.trunks or len(self.trunks) < self.shapes:
            return asked if asked in self.trunks else None
        fitting = [shape for shape in self.trunks if shape.holds(asked)]
        return min(fitting, key=lambda shape: shape.rows * shape.columns, default=None)

    def used(self, trunk: Trunk) -> None:
        """Texts are decoded behind it."""
        trunk.uses += 1
        if trunk.uses > 1:
            self._wasted = max(self._wasted - 1, 0)

    def drop(self, shape: Shape) -> None:
        """The buffers of a shape, and what was recorded with them."""
        trunk = self.trunks.pop(shape)
        self.branches.pop(id(trunk), None)
        self.counts["dropped"] += 1
        self._wasted += trunk.uses < 2

    def own(self, trunk: Trunk, group: int, size: int) -> Branches:
        """The branches of a trunk, of at least ``size`` tokens; it has those of one shape at a time."""
        kept = self.branches.get(id(trunk))
        if kept is None or not _suits(kept, group, size):
            if kept is not None:
                self.counts["dropped"] += 1
            kept = None
            self.branches.pop(id(trunk), None)  # before there are others
            self.branches[id(trunk)] = kept = Branches(trunk, group, size)
        return kept

    def kept_kind(self, branches: Branches, kind: tuple[float, float, int]) -> None:
        """A step was recorded for another kind of sampling: the oldest goes where there are too many."""
        branches.replays[kind] = branches.replays.pop(kind)
        while len(branches.replays) > KINDS:
            del branches.replays[next(iter(branches.replays))]
            self.counts["dropped"] += 1

    def forget(self, latents: bool = True) -> None:
        """All recorded steps, or those of decoding only."""
        for trunk in self.trunks.values() if latents else ():
            trunk.replay = None
        for branches in self.branches.values():
            branches.replays.clear()

    def release(self) -> None:
        """Drop everything."""
        self.trunks.clear()
        self.branches.clear()

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return sum(t.bytes for t in self.trunks.values()) + sum(b.bytes for b in self.branches.values())


def _suits(branches: Branches, group: int, size: int) -> bool:
    return branches.group == group and size <= branches.size <= _WASTE * size
