"""The latent span with gradient as two CUDA graphs, one forward and one backward: the numbers of `think`.

K steps through all layers and back are tens of thousands of small kernels, and launching them takes several times as
long as they do. `RecordedSpan` belongs to one backbone and records `think` itself over static tensors, once for each
shape: rows, columns of the trunk (rounded up), K. An autograd function ties both graphs to the outer one. Where it does
not apply, the plain path runs, and a notice says why, once for each reason.

Weights whose gradients are deferred (`Deferred`) have none in the graph: the inputs and output gradients of all steps
are static tensors, which are handed on after the backward graph. Other parameters are leaves of the graph.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from realvr.backbone.attention import Columns, Segments
from realvr.backbone.backbone import Backbone
from realvr.latent import graphs
from realvr.latent.modes import COLUMNS, round_up
from realvr.latent.span import Interventions, marker_embeds, span_tokens, think
from realvr.latent.state import State, join_columns


@runtime_checkable
class Deferred(Protocol):
    """A layer that hands on its gradients, as `realvr.training.gradients.DeferredLinear`: ``shared`` is what passes of
    the outer graph have in common, and where they report; passes inside ``apart`` are collected as ``pairs``."""

    def shared(self) -> Any:  # noqa: ANN401
        """Of the graph that is being made."""
        ...

    def apart(self) -> AbstractContextManager[Any]:
        """For passes that are recorded."""
        ...


class RecordedSpan:
    """Spans of one backbone, recorded.

    Trunks are rounded up to ``columns``; ``shapes`` bounds what is kept, the least recently used goes first. All shapes
    share one memory pool, so that one span at a time may wait for its backward pass: another one in between goes the
    plain way.
    """

    def __init__(
        self, backbone: Backbone, *, columns: int = COLUMNS, shapes: int = 4, record: graphs.Record | None = None
    ) -> None:
        self.backbone, self.columns, self.shapes = backbone, columns, shapes
        self.counts: Counter[str] = Counter()
        """Spans recorded, replayed, and run in the plain way."""
        self._record, self._given = record, record is not None
        self._unable: str | None = None
        self._recordings: dict[tuple[object, ...], _Recording] = {}
        self._fingerprint: tuple[object, ...] = ()
        self._owner: weakref.ref[_Call] | None = None
        self._said: set[str] = set()

    def think(
        self,
        state: State,
        latents: int,
        *,
        whole: bool = True,
        checkpointed: bool = False,
        interventions: Interventions | None = None,
    ) -> tuple[State, Tensor] | None:
        """`realvr.latent.span.think` with gradient; None where it has to be run in the plain way. Without ``whole`` the
        state after the span is outside the graph, and only z has a gradient."""
        if latents == 0 or not torch.is_grad_enabled():
            return None
        reason = self._why_not(state, latents, checkpointed, interventions)
        markers = marker_embeds(self.backbone, state)
        recording = self._recording(state, markers, latents, whole) if reason is None else None
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
        self, state: State, latents: int, checkpointed: bool, interventions: Interventions | None
    ) -> str | None:
        backbone = self.backbone
        if checkpointed:
            return "the steps are recomputed in the backward pass"
        if interventions:
            return "latents are replaced by interventions"
        if len(backbone.devices) > 1:
            return f"the model lies on {len(backbone.devices)} devices"
        if state.columns.segment is not None:
            return "the state ends in branches"
        if backbone.decoder.training and getattr(backbone.text_config, "attention_dropout", 0):
            return "dropout is on"
        if any(module._backward_hooks or module._backward_pre_hooks for module in graphs.modules(backbone)):
            return "a hook of the backward pass would not run in a CUDA graph"
        longest = round_up(state.length, self.columns) + span_tokens(latents)
        unable = (graphs.why_not_modules if self._given else graphs.why_not)(backbone, longest)
        if unable is not None or self._unable is not None:
            return unable or self._unable
        owner = None if self._owner is None else self._owner()
        if owner is not None and not owner.done:
            return "another span waits for its backward pass"
        return None

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"recorded span: {reason}; its steps run one kernel at a time", stacklevel=4)

    # ------------------------------------------------------------------ what was recorded

    def _recording(self, state: State, markers_B2D: Tensor, latents: int, whole: bool) -> _Recording | None:
        trained = tuple(parameter.requires_grad for parameter in self.backbone.decoder.parameters())
        now = (*graphs.fingerprint(self.backbone), trained)
        if now != self._fingerprint:
            self._recordings, self._fingerprint = {}, now
        columns = round_up(state.length, self.columns)
        asked = tuple(any(x.requires_grad for x in parts) for parts in _by_tensor(state))
        key = (state.rows, columns, latents, whole, markers_B2D.requires_grad, asked, state.kv[0][0][0].dtype)
        found = self._recordings.pop(key, None)
        if found is None:
            found = self._recorded(_Recording(self.backbone, state, markers_B2D, latents, columns, whole))
        if found is not None:
            self._recordings[key] = found  # the newest last
            while len(self._recordings) > self.shapes:
                del self._recordings[next(iter(self._recordings))]
        return found

    def _recorded(self, recording: _Recording) -> _Recording | None:
        try:
            self._record = self._record or graphs.CudaGraphs()
            recording.record(self._record)
        except RuntimeError as error:  # a device or a kernel that cannot be recorded, or no memory for it
            reason = str(error).strip().splitlines()
            self._unable = f"a span could not be recorded ({reason[0] if reason else error})"
            self._say(self._unable)
            return None
        self.counts["recorded"] += 1
        return recording


def _by_tensor(state: State) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of keys, then of values, of each layer."""
    for pieces in state.kv:
        yield from zip(*pieces, strict=True)


class _Recording:
    """The static tensors of one shape, and the two graphs."""

    def __init__(
        self, backbone: Backbone, like: State, markers_B2D: Tensor, latents: int, columns: int, whole: bool
    ) -> None:
        rows, device = like.rows, like.next_B.device
        self.backbone, self.latents, self.whole = backbone, latents, whole
        # Leaves. What is loaded later takes their place, so that everything here is as if it had been recorded with it.
        self.kv = [
            parts[0]
            .new_zeros(rows, parts[0].shape[1], columns, parts[0].shape[3])
            .requires_grad_(any(x.requires_grad for x in parts))
            for parts in _by_tensor(like)
        ]
        self.markers_B2D = torch.zeros_like(markers_B2D).requires_grad_(markers_B2D.requires_grad)
        self.visible_BT = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.place_BT = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.load(like, markers_B2D)
        self.parameters: list[Tensor] = []
        """Those with a gradient from the graph."""
        self.layers: list[Deferred] = []
        """Those that hand on theirs, each with its rows of inputs and output gradients in ``pairs``."""
        self.pairs: list[tuple[Tensor, ...]] = []
        self.values: list[Tensor] = []
        """z, the last hidden state, keys and values of the span's columns."""
        self.grads_in: dict[int, Tensor] = {}
        """Gradients of those values that have one."""
        self.grads_out: list[Tensor | None] = []
        """Gradients of markers, trunk and parameters."""

    @torch.no_grad()
    def load(self, state: State, markers_B2D: Tensor) -> None:
        """Take over a state. Columns behind it are cleared: a stale infinity times a weight of 0 is NaN."""
        start, length, columns = 0, state.length, state.columns
        for piece in zip(*state.kv, strict=True):
            end = start + piece[0][0].shape[2]
            torch._foreach_copy_([x[:, :, start:end] for x in self.kv], [x for pair in piece for x in pair])
            start = end
        if length < self.visible_BT.shape[1]:
            torch._foreach_zero_([x[:, :, length:] for x in self.kv])
        self.visible_BT.zero_()
        self.visible_BT[:, :length] = True if columns.real is None else columns.real
        if columns.window_position is not None:
            self.place_BT[:, :length] = columns.window_position
        self.position_B.copy_(state.next_B)
        self.markers_B2D.copy_(markers_B2D)

    def record(self, record: graphs.Record) -> None:
        """Record both graphs over what is loaded."""
        made: list[Tensor] = []
        found: Sequence[Tensor | None] = []
        kept: list[tuple[Tensor, ...]] = []

        def forward() -> None:
            nonlocal made
            made = []  # with the graph of the run before: nodes of leaves belong to the stream they were made on
            made = self._span()
            self.values = [x.detach().contiguous() for x in made]

        def backward() -> None:
            nonlocal found
            for _, apart in aparts:
                apart.pairs.clear()
            outputs = [made[i] for i in self.grads_in]
            # Retained: warm-ups run before it is recorded.
            found = torch.autograd.grad(
                outputs, leaves, list(self.grads_in.values()), retain_graph=True, allow_unused=True
            )
            with torch.no_grad():  # inputs are in the graph, which must not outlive the recording
                kept[:] = [tuple(map(torch.cat, zip(*apart.pairs, strict=True))) for _, apart in aparts]

        with ExitStack() as stack:
            stack.enter_context(graphs.still_frequencies(self.backbone))
            aparts = [
                (layer, stack.enter_context(layer.apart()))
                for layer in self.backbone.decoder.modules()
                if isinstance(layer, Deferred)
            ]
            aliases = stack.enter_context(_aliased(self.backbone))
            self._forward = graphs.record_step(record, forward, [])
            with torch.no_grad():
                self._forward()  # a recording does not compute
            wanted = len(made) if self.whole else 1
            self.grads_in = {i: torch.zeros_like(self.values[i]) for i in range(wanted) if made[i].requires_grad}
            inputs = [x for x in (self.markers_B2D, *self.kv) if x.requires_grad]
            leaves = [*inputs, *(alias for _, alias in aliases), *(apart.weight for _, apart in aparts)]
            self._backward = graphs.record_step(record, backward, [])
        by_input = {id(x): grad for x, grad in zip(inputs, found, strict=False)}
        of_aliases = found[len(inputs) : len(inputs) + len(aliases)]
        used = [(p, grad) for (p, _), grad in zip(aliases, of_aliases, strict=True) if grad is not None]
        self.parameters = [p for p, _ in used]
        self.grads_out = [*(by_input.get(id(x)) for x in (self.markers_B2D, *self.kv)), *(grad for _, grad in used)]
        self.layers = [layer for (layer, _), pair in zip(aparts, kept, strict=True) if pair]
        self.pairs = [pair for pair in kept if pair]

    def _span(self) -> list[Tensor]:
        windowed = self.backbone.windowed
        columns = self.visible_BT.shape[1]
        state = State(
            kv=[(pair,) for pair in zip(self.kv[::2], self.kv[1::2], strict=True)],
            columns=Columns(columns, self.visible_BT, window_position=self.place_BT if windowed else None),
            next_B=self.position_B,
            last_BD=self.markers_B2D[:, 0],
            image_BT=self.visible_BT,
        )
        with torch.enable_grad():
            after, z_BKD = think(self.backbone, state, self.latents, markers_B2D=self.markers_B2D)
            own = [x[:, :, columns:] for pieces in after.kv for x in pieces[0]]
        return [z_BKD, after.last_BD, *own]

    def forward(self) -> list[Tensor]:
        """Replay; the values in tensors of their own."""
        self._forward()
        return _copies(self.values)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay; the gradients of markers, trunk and parameters in tensors of their own. ``pairs`` are then valid."""
        for i, room in self.grads_in.items():
            grad = grads[i]
            room.zero_() if grad is None else room.copy_(grad)
        self._backward()
        copies = iter(_copies([x for x in self.grads_out if x is not None]))
        return [None if x is None else next(copies) for x in self.grads_out]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(found, tensors)
    return found


@contextmanager
def _aliased(backbone: Backbone) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Every trained parameter of the decoder that is not deferred, with the leaf that stands for it inside.

    The parameters themselves have nodes in the outer graph, on its stream; a recorded backward pass must not meet
    them. Embeddings are made outside.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    outside = backbone.core.get_input_embeddings()
    try:
        for module in backbone.decoder.modules():
            if module is outside or isinstance(module, Deferred):
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, parameter.detach().requires_grad_()
                before.append((module, name, parameter))
        for module, name, parameter in before:
            module._parameters[name] = made[id(parameter)][1]  # type: ignore[assignment]
        yield list(made.values())
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


# ---------------------------------------------------------------------- in the outer graph


@dataclass(eq=False)
class _Call:
    """One span in the outer graph, which keeps it alive."""

    owner: RecordedSpan
    recording: _Recording
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
        trunk, pieces, start = found[1 : 1 + len(recording.kv)], [], 0
        for width in call.widths:
            pieces += [None if x is None else x[:, :, start : start + width] for x in trunk]
            start += width
        return None, found[0], *pieces, *found[1 + len(trunk) :], *(None for _ in call.shared)
