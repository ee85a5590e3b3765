"""One shape of `realvr.latent.recorded_span`: static tensors, and a graph of the span forward and one backward.

Weights whose gradients are deferred (`Deferred`) get none in the graph: the inputs and output gradients of all steps
are static tensors, which are handed on after the backward graph has run. Other parameters are leaves of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from realvr.backbone.attention import Columns
from realvr.backbone.backbone import Backbone
from realvr.backbone.noise import Noise
from realvr.backbone.span_attention import Trunk
from realvr.backbone.trunk_gradients import LaterGradients, Queries, multiplied
from realvr.latent import graphs
from realvr.latent.span import span_tokens, think
from realvr.latent.state import State
from realvr.latent.trial import SPOILED, Made, Trial, tolerance


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


def by_tensor(state: State) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of keys, then of values, of each layer."""
    for pieces in state.kv:
        yield from zip(*pieces, strict=True)


class Bytes(NamedTuple):
    """Of a recorded span."""

    static: int
    """Static tensors, outside the memory pool."""
    kept: int
    """Results of the backward graph, which every shape has for itself in the pool, where they are large."""
    working: int
    """The rest of the pool, which all shapes share."""


def recording_bytes(backbone: Backbone, like: State, columns: int, latents: int, split: bool = False) -> Bytes:
    """What the span behind a state takes once it is recorded, with a trunk of so many columns (`span_bytes`)."""
    column = sum(x[:, :, :1].numel() * x.element_size() for pieces in like.kv for x in pieces[0])
    unique = {id(x): x for _, _, x in _leaves(backbone)}.values()
    gradients = sum(x.numel() * x.element_size() for x in unique)
    return span_bytes(column, columns, latents, len(like.kv), split, gradients)


def span_bytes(column: int, columns: int, latents: int, layers: int, split: bool = False, gradients: int = 0) -> Bytes:
    """From the bytes of one column in all layers and rows, and those of the gradients of parameters that are not
    deferred. In the pool every pass keeps the joined keys and values, or those of the span alone (``split``), for the
    backward graph; beside them one layer's gradients of the trunk are added to those of the steps before. Joined, these
    are kept for all layers; split, the trunk's gradients are made outside. Activations are not counted: they are small
    against joined keys and values, and about a third of the trunk with ``split``."""
    passes, trunk = latents + 1, column * columns
    joined = 0 if split else passes
    working = joined * trunk + trunk // layers + column * passes * span_tokens(latents)
    return Bytes(trunk, gradients + (0 if split else trunk), working)


class Recording:
    """The static tensors of one shape, and the two graphs."""

    def __init__(
        self,
        backbone: Backbone,
        like: State,
        markers_B2D: Tensor,
        latents: int,
        columns: int,
        whole: bool,
        split: bool = False,
    ) -> None:
        rows, device = like.rows, like.next_B.device
        self.bytes = recording_bytes(backbone, like, columns, latents, split)
        self.backbone, self.latents, self.whole, self.split = backbone, latents, whole, split
        # Leaves. What is loaded later takes their place, so that everything here is as if it had been recorded with it.
        self.kv = [
            _static(parts[0], columns, split).requires_grad_(any(x.requires_grad for x in parts))
            for parts in by_tensor(like)
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
        self.queries: list[Queries | None] = []
        """Of each layer, what gradients of its trunk are still to be made of."""
        self._later = LaterGradients()

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
            no_gradients()
            outputs = [made[i] for i in self.grads_in]
            # Retained: warm-ups run before it is recorded.
            found = torch.autograd.grad(
                outputs, leaves, list(self.grads_in.values()), retain_graph=True, allow_unused=True
            )
            with torch.no_grad():  # inputs are in the graph, which must not outlive the recording
                kept[:] = [tuple(map(torch.cat, zip(*apart.pairs, strict=True))) for _, apart in aparts]
                self.queries = [self._later.of(key) for key in self.kv[::2]]
                self._later.clear()

        def no_graph() -> None:
            nonlocal made
            made, self.values = [], []

        def no_gradients() -> None:
            nonlocal found
            found, self.queries = [], []
            kept.clear()
            self._later.clear()
            for _, apart in aparts:
                apart.pairs.clear()

        def gradients() -> Made:
            """Of inputs, of parameters, and what those of weights and of the trunk are made of."""
            own = [found[: len(inputs)], found[len(inputs) :]]
            later = zip(*(each.tensors for each in self.queries if each is not None), strict=True)
            kinds = (*own, *zip(*filter(None, kept), strict=True), *later)
            return Made([[x for x in kind if x is not None] for kind in kinds])

        with ExitStack() as stack:
            stack.enter_context(graphs.still_frequencies(self.backbone))
            aparts = [
                (layer, stack.enter_context(layer.apart()))
                for layer in self.backbone.decoder.modules()
                if isinstance(layer, Deferred)
            ]
            aliases = stack.enter_context(_aliased(self.backbone))
            dtype = self.backbone.dtype
            tried = Trial(lambda: _by_kind(self.values), lambda: _spoil(self.values), tolerance(dtype))
            self._forward = graphs.record_step(record, forward, tried=tried, forget=no_graph)
            noise, wanted = Noise(self.position_B.device), len(made) if self.whole else 1
            self.grads_in = {i: noise.like(self.values[i]) for i in range(wanted) if made[i].requires_grad}
            inputs = [x for x in (self.markers_B2D, *self.kv) if x.requires_grad]
            leaves = [*inputs, *(alias for _, alias in aliases), *(apart.weight for _, apart in aparts)]
            tried = Trial(gradients, lambda: _spoil(chain(*gradients().numbers)), tolerance(dtype, backward=True))
            self._backward = graphs.record_step(record, backward, tried=tried, forget=no_gradients)
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
            # Made here: what it finds out of the visible columns is recorded too.
            span = span_tokens(self.latents)
            later = self._later if any(x.requires_grad for x in self.kv) else None
            trunk = Trunk(columns, span, self.visible_BT, later) if self.split else None
            after, z_BKD = think(self.backbone, state, self.latents, markers_B2D=self.markers_B2D, trunk=trunk)
            own = [x if len(pieces) > 1 else x[:, :, columns:] for pieces in after.kv for x in pieces[-1]]
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
        found = [None if x is None else next(copies) for x in self.grads_out]
        for layer, queries in enumerate(self.queries):
            if queries is not None:
                pair = slice(1 + 2 * layer, 3 + 2 * layer)  # behind the markers
                found[pair] = self._with_trunk(queries, self.kv[2 * layer : 2 * layer + 2], found[pair])
        return found

    def _with_trunk(
        self, queries: Queries, pair: Sequence[Tensor], joined: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """Gradients of a layer's keys and values, with those of passes that have ``joined`` them."""
        for x, other, grad in zip(pair, joined, multiplied(queries, *pair), strict=True):
            yield None if not x.requires_grad else grad if other is None else grad + other


def _static(like: Tensor, columns: int, split: bool) -> Tensor:
    """For keys or values (B, H, columns, d). Kernels for sequences of their own lengths, which the split may use, take
    columns before heads without a copy."""
    rows, heads, _, width = like.shape
    if split:
        return like.new_zeros(rows, columns, heads, width).transpose(1, 2)
    return like.new_zeros(rows, heads, columns, width)


def _by_kind(values: Sequence[Tensor]) -> Made:
    """Latents, the last hidden state, keys, values."""
    z_BKD, last_BD, *own = values
    return Made([[z_BKD], [last_BD], own[::2], own[1::2]])


def _spoil(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        x.data.fill_(SPOILED)  # unnoticed by autograd, which may have saved it


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(x) for x in tensors]
    if found:  # torch refuses none
        torch._foreach_copy_(found, tensors)
    return found


def _leaves(backbone: Backbone) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Where the trained parameters of the decoder are that are not deferred. Embeddings are made outside."""
    outside = backbone.core.get_input_embeddings()
    for module in backbone.decoder.modules():
        if module is outside or isinstance(module, Deferred):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                yield module, name, parameter


@contextmanager
def _aliased(backbone: Backbone) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """All of them, each with the leaf that stands for it inside.

    The parameters themselves have nodes in the outer graph, on its stream; a recorded backward pass must not meet
    them.
    """
    before = list(_leaves(backbone))
    made = {id(parameter): (parameter, parameter.detach().requires_grad_()) for _, _, parameter in before}
    try:
        for module, name, parameter in before:
            module._parameters[name] = made[id(parameter)][1]  # type: ignore[assignment]
        yield list(made.values())
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
