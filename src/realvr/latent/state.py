"""The decoding state: keys and values, what each column is, and the hidden state that comes next.

A state is never changed in place: every operation returns a new one that shares tensors with the old. A fork is
therefore free, and a branch cannot disturb its trunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realvr.backbone.attention import Columns, Segments, joined
from realvr.backbone.span_attention import Trunk

# real, segment (the trunk), block (no image), window_position (both sides give it), image_visibility (sees, is seen)
_NEUTRAL: tuple[bool | int, ...] = (True, -1, -1, 0, 0)


@dataclass(frozen=True)
class State:
    """B rows that have read T columns."""

    kv: list[Segments]
    columns: Columns
    next_B: Tensor
    """Position of the next token."""
    last_BD: Tensor
    """Hidden state after the final norm at the last real column: the next latent, or what the LM head reads."""
    image_BT: Tensor
    """Columns that hold visual tokens."""
    span: tuple[int, int] | None = None
    """First and one-past-last column of the newest latent slots."""
    left_padded: bool = False
    """Padding, where a row has any, comes before its first real column and nowhere else."""

    @property
    def length(self) -> int:
        """T."""
        return self.columns.length

    @property
    def rows(self) -> int:
        """B."""
        return int(self.next_B.shape[0])

    @property
    def slots(self) -> slice:
        """Columns of the newest latent slots, as a probe wants them."""
        if self.span is None:
            raise ValueError("this state has no latent span")
        return slice(*self.span)

    @property
    def one_trunk(self) -> bool:
        """Whether all columns but leading padding are visible to whatever comes next."""
        return self.columns.segment is None and (self.columns.real is None or self.left_padded)

    def trunk(self, span: int) -> Trunk | None:
        """This state, as what the steps of a span of so many columns stand behind; None where padding lies between real
        columns."""
        return Trunk(self.length, span, self.columns.real) if self.one_trunk else None

    def in_one_piece(self) -> State:
        """With the keys and values of each layer in one piece."""
        return replace(self, kv=[(joined(pieces),) for pieces in self.kv])

    def fork(self) -> State:
        """A second state over the same past."""
        return replace(self)

    def repeat(self, times: int) -> State:
        """Each row ``times`` times, copies adjacent: (B,) → (B * times,)."""
        return self._rows(lambda x: x.repeat_interleave(times, dim=0))

    def select(self, index: Tensor) -> State:
        """The rows ``index`` (n,), in that order."""
        return self._rows(lambda x: x[index.to(x.device)])

    def detach(self) -> State:
        """The same values outside the graph."""
        return self._rows(lambda x: x.detach())

    def _rows(self, change: Callable[[Tensor], Tensor]) -> State:
        columns = self.columns
        return replace(
            self,
            kv=[tuple((change(k), change(v)) for k, v in pieces) for pieces in self.kv],
            columns=Columns(columns.length, *(None if x is None else change(x) for x in columns.facts())),
            next_B=change(self.next_B),
            last_BD=change(self.last_BD),
            image_BT=change(self.image_BT),
        )


def join_columns(old: Columns | None, new: Columns, rows: int, device: torch.device) -> Columns:
    """Columns of a longer state; a fact that only one side carries gets its neutral value on the other."""
    if old is None:
        return new

    def join(a: Tensor | None, b: Tensor | None, neutral: bool | int) -> Tensor | None:
        if a is None and b is None:
            return None
        dtype = torch.bool if isinstance(neutral, bool) else torch.long
        if a is None:
            a = torch.full((rows, old.length), neutral, dtype=dtype, device=device)
        if b is None:
            b = torch.full((rows, new.length), neutral, dtype=dtype, device=device)
        return torch.cat([a, b], dim=1)

    joined = (join(a, b, neutral) for a, b, neutral in zip(old.facts(), new.facts(), _NEUTRAL, strict=True))
    return Columns(old.length + new.length, *joined)
