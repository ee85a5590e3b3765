"""Static buffers, and the two steps that run over them: one latent step of B prompts, one token of B x G completions.

Both steps read and write only tensors of fixed shape and address, including their counters. So a recorded step that is
replayed continues where the last one ended (`realvr.latent.graphs`). Run eagerly, they are the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realvr.backbone.attention import Columns, Segments
from realvr.backbone.backbone import Backbone
from realvr.backbone.static import KeysValues, StaticPass
from realvr.latent.sampling import Sampling, choose
from realvr.latent.span import log_softmax_rows
from realvr.latent.state import State, join_columns
from realvr.latent.trial import SPOILED, Made

Replay = Callable[[], None]


class Trunk:
    """Keys and values of B prompts with room for ``columns`` columns, and where the next one is written. Rows behind
    those of a state are fillers: they see nothing but what they write themselves."""

    def __init__(self, like: State, rows: int, columns: int) -> None:
        device = like.next_B.device
        self.rows, self.columns = rows, columns

        def room(x: Tensor) -> Tensor:
            return x.new_zeros(rows, x.shape[1], columns, x.shape[3])

        self.kv = [(room(pieces[0][0]), room(pieces[0][1])) for pieces in like.kv]
        self.visible_BT = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.place_BT = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.input_BD = like.last_BD.new_zeros(rows, like.last_BD.shape[1])
        self.last_BD = torch.zeros_like(self.input_BD)
        self.replay: Replay | None = None
        """The recorded latent step."""
        self.uses = 0
        """Batches of texts that were decoded behind it."""

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return _size(self.kv)

    def load(self, state: State) -> None:
        """Take over a state. What was in the buffers before is cleared: a stale infinity times a weight of 0 is NaN."""
        _clear(self.kv)
        start, rows = 0, state.rows
        for piece in zip(*state.kv, strict=True):
            end = start + piece[0][0].shape[2]
            room = [x[:rows, :, start:end] for pair in self.kv for x in pair]
            torch._foreach_copy_(room, [x for pair in piece for x in pair])
            start = end
        length, columns = state.length, state.columns
        self.visible_BT.zero_()
        self.visible_BT[:rows, :length] = True if columns.real is None else columns.real
        if columns.window_position is not None:
            self.place_BT[:rows, :length] = columns.window_position
        self.column.fill_(length)
        self.position_B[rows:].zero_()
        self.position_B[:rows].copy_(state.next_B)
        self.last_BD[rows:].zero_()
        self.last_BD[:rows].copy_(state.last_BD)

    def take(self, other: Trunk, index_B: Tensor) -> None:
        """Take over the rows ``index_B`` of a trunk with as many columns."""
        for (keys, values), (old_keys, old_values) in zip(self.kv, other.kv, strict=True):
            keys.copy_(old_keys[index_B])
            values.copy_(old_values[index_B])
        self.visible_BT.copy_(other.visible_BT[index_B])
        self.place_BT.copy_(other.place_BT[index_B])
        self.position_B.copy_(other.position_B[index_B])
        self.column.copy_(other.column)

    @property
    def changed(self) -> list[Tensor]:
        """What a latent step changes beside the keys and values of its own column."""
        return [self.visible_BT, self.place_BT, self.column, self.position_B, self.last_BD]

    def made(self) -> Made:
        """By the newest latent step: its state, the keys and values of its column, and where the next one goes."""
        newest = (self.column - 1).clamp(0, self.columns - 1)  # a replay may count otherwise
        columns = _columns(self.kv, 2, newest)
        marks = [x.index_select(1, newest) for x in (self.visible_BT, self.place_BT)]
        return Made([[self.last_BD], columns[::2], columns[1::2]], [self.column, self.position_B, *marks])

    def spoil(self) -> None:
        """Overwrite what the coming step makes."""
        self.last_BD.fill_(SPOILED)
        for x in (x for pair in self.kv for x in pair):
            x.index_fill_(2, self.column, SPOILED)

    def longer(self, before: State, new: int, windowed: bool) -> State:
        """The state after ``new`` more columns, in tensors of its own."""
        length, rows = before.length + new, before.rows
        position = before.next_B[:, None] + torch.arange(new, device=before.next_B.device)
        fresh = Columns(new, window_position=position if windowed else None)
        kv: list[Segments] = [((k[:rows, :, :length].clone(), v[:rows, :, :length].clone()),) for k, v in self.kv]
        return replace(
            before,
            kv=kv,
            columns=join_columns(before.columns, fresh, rows, before.next_B.device),
            next_B=self.position_B[:rows].clone(),
            last_BD=self.last_BD[:rows].clone(),
            image_BT=torch.nn.functional.pad(before.image_BT, (0, new)),
        )


class Branches:
    """The columns of B x G completions behind a trunk, at most ``size`` tokens each, and what was chosen."""

    def __init__(self, trunk: Trunk, group: int, size: int) -> None:
        self.trunk, self.group, self.size = trunk, group, size
        rows, device = trunk.rows, trunk.column.device

        def room(x: Tensor) -> Tensor:
            return x.new_zeros(rows, x.shape[1], group, size, x.shape[3])

        self.kv = [(room(keys), room(values)) for keys, values in trunk.kv]
        wide = torch.promote_types(trunk.last_BD.dtype, torch.float32)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        """Tokens fed so far, hence the index of the next one."""
        self.token_BG = torch.zeros(rows, group, dtype=torch.long, device=device)
        self.uniform_BGS = torch.zeros(rows, group, size, dtype=torch.float64, device=device)
        self.ids_BGS = torch.zeros(rows, group, size, dtype=torch.long, device=device)
        self.logp_BGS = torch.zeros(rows, group, size, dtype=wide, device=device)
        self.last_B = torch.zeros(rows, dtype=torch.long, device=device)
        """Position of the last token that a row may be fed."""
        self.hidden_BGD: Tensor | None = None
        """Last hidden states of the newest step: its own tensor, which a replay fills while the step is on trial."""
        self.replays: dict[tuple[float, float, int], Replay | None] = {}
        """The recorded step, by what of the sampling is in it."""

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return _size(self.kv)

    def begin(self, uniform_BGS: Tensor, limits: Sequence[int]) -> None:
        """Empty branches on the loaded trunk, with the random numbers of all their tokens."""
        _clear(self.kv)
        self.step.zero_()
        device, (rows, _, size) = self.step.device, uniform_BGS.shape
        self.uniform_BGS[:rows, :, :size].copy_(_sent(uniform_BGS, device))
        padded = torch.tensor([*limits, *[1] * (self.trunk.rows - rows)])
        self.last_B.copy_(self.trunk.position_B + _sent(padded, device) - 1)

    def take(self, other: Branches, index_B: Tensor) -> None:
        """Take over the rows ``index_B`` of branches of the same size."""
        for (keys, values), (old_keys, old_values) in zip(self.kv, other.kv, strict=True):
            keys.copy_(old_keys[index_B])
            values.copy_(old_values[index_B])
        self.step.copy_(other.step)
        for name in ("token_BG", "uniform_BGS", "ids_BGS", "logp_BGS", "last_B"):
            getattr(self, name).copy_(getattr(other, name)[index_B])

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes beside the keys and values of its own column."""
        return [self.step, self.token_BG, self.ids_BGS, self.logp_BGS]

    def made(self) -> Made:
        """By the newest step: the keys and values of its column, its last hidden states, and what was chosen."""
        fed, newest = (
            step.clamp(0, self.size - 1) for step in (self.step - 1, self.step)
        )  # a replay may count otherwise
        columns = _columns(self.kv, 3, fed)
        hidden = [] if self.hidden_BGD is None else [self.hidden_BGD]
        ids_BG, logp_BG = (x.index_select(2, newest)[..., 0] for x in (self.ids_BGS, self.logp_BGS))
        written = ids_BG == self.token_BG  # the token that is fed next
        return Made([columns[::2], columns[1::2], hidden], [self.step, written], (ids_BG, logp_BG))

    def spoil(self) -> None:
        """Overwrite what the coming step makes."""
        self.ids_BGS.index_fill_(2, self.step + 1, -1)
        self.logp_BGS.index_fill_(2, self.step + 1, SPOILED)
        for x in (x for pair in self.kv for x in pair):
            x.index_fill_(3, self.step, SPOILED)


def _columns(kv: list[KeysValues], dim: int, column: Tensor) -> list[Tensor]:
    """One column of keys and values, layer by layer."""
    return [x.index_select(dim, column) for pair in kv for x in pair]


def _size(kv: list[KeysValues]) -> int:
    return sum(x.numel() * x.element_size() for pair in kv for x in pair)


def _clear(kv: list[KeysValues]) -> None:
    torch._foreach_zero_([x for pair in kv for x in pair])


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without the host's waiting for what that still has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@dataclass(frozen=True)
class Chunk:
    """Tokens on their way to the host, in the order of the buffers' rows when they left."""

    ids_BGS: Tensor
    logp_BGS: Tensor
    sent: torch.cuda.Event | None

    @classmethod
    def send(cls, branches: Branches, first: int, end: int) -> Chunk:
        """Copy tokens ``first`` to ``end`` behind the steps that choose them. The device does not wait for the
        host."""
        sources = (x[..., first:end] for x in (branches.ids_BGS, branches.logp_BGS))
        ids, logp = (x.to("cpu", non_blocking=True) for x in sources)  # into pinned memory
        sent = None
        if branches.step.is_cuda:
            sent = torch.cuda.Event()
            sent.record(torch.cuda.current_stream(branches.step.device))
        return cls(ids, logp, sent)

    def read(self) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """Ids and log-probabilities by row, branch and token. The host waits for them."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.ids_BGS.tolist(), self.logp_BGS.tolist()


def latent_step(backbone: Backbone, trunk: Trunk) -> None:
    """Feed ``input_BD`` as the next column of the trunk; ``last_BD`` is then its hidden state."""
    trunk.visible_BT.index_fill_(1, trunk.column, True)
    if backbone.windowed:
        trunk.place_BT.index_copy_(1, trunk.column, trunk.position_B[:, None])
    carried = StaticPass(trunk.kv, trunk.visible_BT, trunk.column, place_BT=trunk.place_BT, place_B=trunk.position_B)
    hidden = backbone.decode(trunk.input_BD[:, None], trunk.position_B[:, None], carried)
    trunk.last_BD.copy_(hidden[:, 0])
    trunk.column.add_(1)
    trunk.position_B.add_(1)


def decode_step(backbone: Backbone, branches: Branches, sampling: Sampling, forbidden: Tensor) -> None:
    """Feed the newest token of every branch and choose the next one.

    A branch that has ended is fed on, and what comes out is ignored. Its position stands still at the row's limit, so
    that it asks for no position that the row could not have had.
    """
    trunk = branches.trunk
    position_B = torch.minimum(trunk.position_B + branches.step, branches.last_B)
    carried = StaticPass(
        trunk.kv, trunk.visible_BT, branches.step, branches.kv, place_BT=trunk.place_BT, place_B=position_B
    )
    embeds = backbone.embed(branches.token_BG)
    hidden = backbone.decode(embeds, position_B[:, None].expand(-1, branches.group), carried)
    branches.step.add_(1)
    branches.hidden_BGD = hidden
    choose_next(backbone, branches, hidden.flatten(0, 1), sampling, forbidden)


def choose_next(
    backbone: Backbone, branches: Branches, hidden_ND: Tensor, sampling: Sampling, forbidden: Tensor
) -> None:
    """Choose the token of index ``step`` of every branch from its hidden state (B x G, D), or that of its prompt
    (B, D)."""
    logp = log_softmax_rows(backbone, hidden_ND, sampling.policy_temperature, forbidden)
    if len(logp) < branches.token_BG.numel():
        logp = logp.repeat_interleave(branches.group, dim=0)
    uniform = branches.uniform_BGS.index_select(2, branches.step).flatten()
    token = choose(logp, uniform, sampling)
    shape = (*branches.token_BG.shape, 1)
    branches.ids_BGS.index_copy_(2, branches.step, token.view(shape))
    branches.logp_BGS.index_copy_(2, branches.step, logp.gather(-1, token[:, None]).view(shape))
    branches.token_BG.copy_(token.view(shape[:2]))
