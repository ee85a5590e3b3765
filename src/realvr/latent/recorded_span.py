"""The latent span with gradient as two CUDA graphs, one forward and one backward: the numbers of `think`.

K steps through all layers and back are tens of thousands of small kernels. Launching them takes several times as long
as running them. `RecordedSpan` belongs to one backbone and records `think` itself over static tensors, once for each
shape: rows, columns of the trunk (rounded up), K. An autograd function ties both graphs to the outer one. Where it does
not apply, the plain path runs, and each reason is printed once as a notice.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from realvr.backbone.attention import Columns, Segments, taken_apart
from realvr.backbone.backbone import Backbone
from realvr.errors import ran_out
from realvr.latent import graphs, room
from realvr.latent.modes import COLUMNS, bucket
from realvr.latent.span import Interventions, marker_embeds, span_tokens
from realvr.latent.span_recording import Recording, by_tensor, recording_bytes
from realvr.latent.state import State, join_columns

COUNTS = ("recorded", "replayed", "plain", "dropped")
"""What `RecordedSpan.counts` counts: shapes recorded, spans replayed and run in the plain way, shapes dropped."""
MOST_WAITS = 64
"""Spans after which a shape that ran out of memory is tried again, at the most."""


class RecordedSpan:
    """Spans of one backbone, recorded.

    Trunks are rounded up to ``columns``; ``shapes`` bounds what is kept, the least recently used goes first. All shapes
    share one memory pool, so that one span at a time may wait for its backward pass: another one in between goes the
    plain way. The pool stays as large as the largest span needs, which is many times the keys and values of its prompts
    (`recording_bytes`; a few times with ``split``), until ``release``.
    """

    def __init__(
        self, backbone: Backbone, *, columns: int = COLUMNS, shapes: int = 4, record: graphs.Record | None = None
    ) -> None:
        self.backbone, self.columns, self.shapes = backbone, columns, shapes
        self.counts: Counter[str] = Counter()
        """See `COUNTS`."""
        self._record, self._given = record, record is not None
        self._unable: str | None = None
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._dropped = False
        """Whether some are gone whose memory torch may still hold."""
        self._shortages: Counter[tuple[object, ...]] = Counter()
        """How often memory ran out while a shape was recorded."""
        self._waits: dict[tuple[object, ...], int] = {}
        """Spans of such a shape that go the plain way before it is tried again."""
        self._fingerprint: tuple[object, ...] = ()
        self._owner: weakref.ref[_Call] | None = None
        self._said: set[str] = set()

    def think(
        self,
        state: State,
        latents: int,
        *,
        whole: bool = True,
        split: bool = False,
        checkpointed: bool = False,
        interventions: Interventions | None = None,
    ) -> tuple[State, Tensor] | None:
        """`realvr.latent.span.think` with gradient; None where it has to be run in the plain way. Without ``whole`` the
        state after the span is outside the graph, and only z has a gradient. ``split``: no step joins keys and values,
        where `State.trunk` allows it."""
        if latents == 0 or not torch.is_grad_enabled():
            return None
        survey = graphs.Survey.of(self.backbone)
        reason = self._why_not(state, latents, checkpointed, interventions, survey)
        markers = marker_embeds(self.backbone, state)
        trunk = state.trunk(span_tokens(latents)) if split else None
        split = trunk is not None and trunk.takes(state.kv[0][0][0], None)
        recording = self._recording(state, markers, latents, whole, split, survey) if reason is None else None
        if recording is None:
            self.counts["plain"] += 1
            if reason is not None:
                self._say(reason)
            return None
        shared = [layer.shared() for layer in recording.layers]
        call = _Call(self, recording, [piece[0].shape[2] for piece in state.kv[0]], shared)
        self._owner = weakref.ref(call)
        recording.load(state, markers)
        pieces = [x for piece in zip(*state.kv, strict=True) for pair in piece for x in pair]
        weights = [each.weight for each in shared]
        z_BKD, last_BD, *own = _Replayed.apply(call, markers, *pieces, *recording.parameters, *weights)
        self.counts["replayed"] += 1
        return self._after(state, latents, last_BD, own), z_BKD

    def _after(self, state: State, latents: int, last_BD: Tensor, own: Sequence[Tensor]) -> State:
        new, first = span_tokens(latents), state.length + 1
        position = state.next_B[:, None] + torch.arange(new, device=state.next_B.device)
        fresh = Columns(new, window_position=position if self.backbone.windowed else None)
        kv: list[Segments] = [
            (*pieces, pair) for pieces, pair in zip(state.kv, zip(own[::2], own[1::2], strict=True), strict=True)
        ]
        return replace(
            state,
            kv=kv,
            columns=join_columns(state.columns, fresh, state.rows, state.next_B.device),
            next_B=state.next_B + new,
            last_BD=last_BD,
            image_BT=torch.nn.functional.pad(state.image_BT, (0, new)),
            span=(first, first + latents),
        )

    # ------------------------------------------------------------------ does it apply?

    def _why_not(
        self,
        state: State,
        latents: int,
        checkpointed: bool,
        interventions: Interventions | None,
        survey: graphs.Survey,
    ) -> str | None:
        backbone = self.backbone
        if checkpointed:
            return "the steps are recomputed in the backward pass"
        if interventions:
            return "latents are replaced by interventions"
        if len(survey.devices) > 1:
            return f"the model lies on {len(survey.devices)} devices"
        if state.columns.segment is not None:
            return "the state ends in branches"
        if backbone.decoder.training and getattr(backbone.text_config, "attention_dropout", 0):
            return "dropout is on"
        if survey.backward_hooks:
            return "a hook of the backward pass would not run in a CUDA graph"
        longest = bucket(state.length, self.columns) + span_tokens(latents)
        unable = (graphs.why_not_modules if self._given else graphs.why_not)(backbone, longest, survey)
        if unable is not None or self._unable is not None:
            return unable or self._unable
        owner = None if self._owner is None else self._owner()
        if owner is not None and not owner.done:
            return "another span waits for its backward pass"
        return None

    def _say(self, reason: str) -> None:
        kind = re.sub(r"\d+(\.\d+)?", "", reason)  # once, whatever its numbers
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"recorded span: {reason}; its steps run one kernel at a time", stacklevel=4)

    # ------------------------------------------------------------------ what was recorded

    def release(self) -> None:
        """Drop everything that was recorded, with its memory."""
        self._dropped |= bool(self._recordings)
        self._recordings, self._fingerprint = {}, ()

    @property
    def held_bytes(self) -> int:
        """Of static tensors, and of the memory pool that the graphs share (without CUDA: what it would need)."""
        held = [each.bytes for each in self._recordings.values()]
        pool = self._pool_bytes
        if pool is None:
            pool = sum(each.kept for each in held) + max((each.working for each in held), default=0)
        return sum(each.static for each in held) + pool

    @property
    def _pool_bytes(self) -> int | None:
        return self._record.held_bytes if isinstance(self._record, graphs.CudaGraphs) else None

    def _recording(
        self, state: State, markers_B2D: Tensor, latents: int, whole: bool, split: bool, survey: graphs.Survey
    ) -> Recording | None:
        now = (*survey.fingerprint, survey.trained)
        if now != self._fingerprint:
            self._dropped |= bool(self._recordings)
            self._recordings, self._fingerprint = {}, now
        columns = bucket(state.length, self.columns)
        asked = tuple(any(x.requires_grad for x in parts) for parts in by_tensor(state))
        how = (whole, split, markers_B2D.requires_grad, asked, state.kv[0][0][0].dtype)
        key = (state.rows, columns, latents, *how)
        found = self._recordings.pop(key, None)
        if found is None:
            if self._waits.get(key):
                self._waits[key] -= 1
                return None
            while len(self._recordings) >= self.shapes:
                self._drop()
            if (reason := self._no_room(state, columns, latents, split)) is not None:
                self._say(reason)
                return None
            found = self._recorded(state, markers_B2D, latents, columns, whole, split)
            if found is None and self._unable is None:  # a try costs time, and all that was recorded
                self._shortages[key] += 1
                self._waits[key] = min(2 ** (self._shortages[key] - 1), MOST_WAITS)
        if found is not None:
            self._recordings[key] = found  # the newest last
        return found

    def _drop(self) -> None:
        del self._recordings[next(iter(self._recordings))]
        self._dropped = True
        self.counts["dropped"] += 1

    def _no_room(self, state: State, columns: int, latents: int, split: bool) -> str | None:
        """Why this shape cannot be recorded; where memory is short, other shapes make room."""
        device, own = state.next_B.device, recording_bytes(self.backbone, state, columns, latents, split)

        def short() -> tuple[int, int] | None:
            kept = own.kept + sum(each.bytes.kept for each in self._recordings.values())
            needed = own.static + max(kept + own.working - (self._pool_bytes or 0), 0)
            free = room.free_bytes(device, needed)
            return None if free is None or needed <= free else (needed, free)

        if (found := short()) is not None and (self._recordings or self._dropped):
            while self._recordings:
                self._drop()
            room.give_back(device)
            self._dropped = False
            found = short()
        if found is None:
            return None
        needed, free = found
        return f"it would need {needed / 2**30:.1f} GiB, and {max(free, 0) / 2**30:.1f} GiB are free"

    def _recorded(
        self, state: State, markers_B2D: Tensor, latents: int, columns: int, whole: bool, split: bool
    ) -> Recording | None:
        recording: Recording | None = None
        try:
            self._record = self._record or graphs.CudaGraphs(self.backbone.device)
            recording = Recording(self.backbone, state, markers_B2D, latents, columns, whole, split)
            recording.record(self._record)
        except RuntimeError as error:  # a device or a kernel that cannot be recorded, or no memory for it
            lines = str(error).strip().splitlines()
            reason = f"a span could not be recorded ({lines[0] if lines else error})"
            short = ran_out(error)  # which may be another time
        else:
            self.counts["recorded"] += 1
            return recording
        self._say(reason)
        recording = None  # with its memory
        if short:
            self.counts["dropped"] += len(self._recordings)
            self.release()
            room.give_back(self.backbone.device)
        else:
            self._unable = reason
        return None


# ---------------------------------------------------------------------- in the outer graph


@dataclass(eq=False)
class _Call:
    """One span in the outer graph, which keeps it alive."""

    owner: RecordedSpan
    recording: Recording
    widths: list[int]
    """Columns of the pieces of the trunk."""
    shared: list[Any]
    done: bool = False
    """Whether its backward pass has been run."""

    def check(self) -> None:
        """Refuse to go back through what a later span has overwritten."""
        newest = self.owner._owner
        if newest is None or newest() is not self:
            raise RuntimeError("this recorded span was followed by another: it cannot be gone back through once more")


class _ReplayedNode(FunctionCtx):
    call: _Call


class _Replayed(torch.autograd.Function):
    """Inputs: markers, the pieces of the trunk, parameters, and the deferred weights as the outer graph reads them."""

    @staticmethod
    def forward(ctx: _ReplayedNode, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        values = call.recording.forward()
        ctx.mark_non_differentiable(*(x for i, x in enumerate(values) if i not in call.recording.grads_in))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ReplayedNode, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        call.check()
        recording = call.recording
        found = recording.backward(grads)
        call.done = True
        for shared, pair in zip(call.shared, recording.pairs, strict=True):
            shared.contributions.add(*pair)
        trunk = found[1 : 1 + len(recording.kv)]
        apart = [[None] * len(call.widths) if x is None else taken_apart(x, call.widths) for x in trunk]
        pieces = [grad for piece in zip(*apart, strict=True) for grad in piece]
        return None, found[0], *pieces, *found[1 + len(trunk) :], *(None for _ in call.shared)
