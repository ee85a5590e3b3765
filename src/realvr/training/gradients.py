"""Weight gradients of linear layers that one step passes through many times.

In Stage 2 the prompt, the replay and K latent steps share every weight. Autograd computes one product per pass (for a
latent step: one row a prompt, a product as large as the weight) and keeps the sum beside ``.grad`` until the last pass
is done: K products and sums per weight, and a second copy of all gradients. Here a pass hands on its input and the
gradient of its output. Those of few rows are kept and multiplied together, once; those of many rows are multiplied
immediately and added in place.

All passes of a graph read a weight through one node (`_Collect`). Autograd runs it after the last of those that take
part in a backward pass; there what was kept becomes the weight's gradient. This also holds for checkpointed layers,
``torch.autograd.grad`` and retained graphs. `Deferral.into_grad` adds straight to ``.grad`` instead, so that
microbatches need no second copy: for a loop that has plain parameters and calls ``loss.backward()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import override

LEAST = 2**19
"""Numbers of a weight from which this pays; below, calls from Python take longer than the products they save."""
FEW_ROWS = 64
"""Passes of at most so many rows are kept; a product of more is worth its own launch."""
MOST_ROWS = 512
"""Rows that are kept of one weight before they are multiplied all the same."""


class Deferral:
    """How the layers of one model hand on their gradients."""

    def __init__(self) -> None:
        self.straight = False

    @contextmanager
    def into_grad(self) -> Iterator[None]:
        """Inside, ``loss.backward()`` adds to ``.grad`` in place."""
        self.straight = True
        try:
            yield
        finally:
            self.straight = False


class _Sum:
    """Of one backward pass."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.rows = 0
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None


class _Contributions:
    """What the passes of a graph give to the gradient of one weight and its bias. Inputs are kept without their place
    in the graph, which refers to this: a reference cycle through it would never be freed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> None:
        self.weight, self.bias, self.deferral = weight, bias, deferral
        self.open = True
        """Whether further passes may join: until the first backward pass is through."""
        # By backward pass: one that leaves the weight out (``inputs=``) or fails never comes to `finish`.
        self._sums: dict[int, _Sum] = {}

    def add(self, x_ND: Tensor, grad_NE: Tensor) -> None:
        """One pass through the layer."""
        found = self._sums.setdefault(torch._C._current_graph_task_id(), _Sum())
        if len(x_ND) > FEW_ROWS:
            self._multiply(found, x_ND, grad_NE)
            return
        found.kept.append((_own(x_ND.detach()), _own(grad_NE.detach())))
        found.rows += len(x_ND)
        if found.rows > MOST_ROWS:
            self._multiply_kept(found)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of this backward pass, as far as they are not in ``.grad``."""
        self.open = False
        found = self._sums.pop(torch._C._current_graph_task_id(), None)
        if found is None:
            return None, None
        self._multiply_kept(found)
        return found.weight, found.bias

    def _multiply_kept(self, found: _Sum) -> None:
        if found.kept:
            inputs, gradients = zip(*found.kept, strict=True)
            found.kept, found.rows = [], 0
            self._multiply(found, torch.cat(inputs), torch.cat(gradients))

    def _multiply(self, found: _Sum, x_ND: Tensor, grad_NE: Tensor) -> None:
        if self.deferral.straight and not _hooked(self.weight):
            self.weight.grad = _plus_product(self.weight.grad, grad_NE, x_ND)
        else:
            found.weight = _plus_product(found.weight, grad_NE, x_ND)
        if self.bias is not None and self.bias.requires_grad:
            total = grad_NE.sum(0)
            straight = self.deferral.straight and not _hooked(self.bias)
            before = self.bias.grad if straight else found.bias
            total = total if before is None else before.add_(total)
            if straight:
                self.bias.grad = total
            else:
                found.bias = total


def _plus_product(total: Tensor | None, grad_NE: Tensor, x_ND: Tensor) -> Tensor:
    """In place where there is something: a 16-bit sum is rounded once, not the product before it."""
    return grad_NE.t() @ x_ND if total is None else total.addmm_(grad_NE.t(), x_ND)


def _own(rows: Tensor) -> Tensor:
    """The rows without the rest of what they are cut from: a row of keys and values may be a view of all of them."""
    return rows if rows.untyped_storage().nbytes() <= 2 * rows.nbytes else rows.clone()


def _hooked(parameter: Tensor) -> bool:
    """Whether somebody wants to see the gradient before it is added."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class _CollectNode(FunctionCtx):
    contributions: _Contributions


class _Collect(torch.autograd.Function):
    """Weight and bias as all passes of a graph read them. They pass no gradient through this node: `_Product` tells
    ``contributions``, and autograd comes here after the last of them."""

    @staticmethod
    def forward(
        ctx: _CollectNode, contributions: _Contributions, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.contributions = contributions
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CollectNode, *_: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        return None, *ctx.contributions.finish()


class _Shared:
    """The two, and where passes report. Every pass keeps it alive; the layer itself does not: it ends with the graph.
    `_Contributions` must not refer to it, nor to the tensors: such a reference cycle would never be freed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> None:
        self.contributions = _Contributions(weight, bias, deferral)
        self.weight, self.bias = _Collect.apply(self.contributions, weight, bias)

    def of(self, weight: Tensor) -> bool:
        """Whether another pass may use it."""
        return self.contributions.open and self.contributions.weight is weight


class _Apart:
    """In place of `_Shared` for passes that are recorded: their inputs and gradients are collected, and what they give
    is left to whoever replays them. The weight is a leaf of its own, to which nothing is added."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.detach().requires_grad_()
        self.bias = None if bias is None else bias.detach()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def contributions(self) -> _Apart:
        """Itself. An attribute would be a reference cycle, which holds memory of a recording until it is collected."""
        return self

    def add(self, x_ND: Tensor, grad_NE: Tensor) -> None:
        """One pass through the layer; without its place in the graph, as in `_Contributions`."""
        self.pairs.append((x_ND.detach(), grad_NE.detach()))


class _ProductNode(FunctionCtx):
    shared: _Shared | _Apart
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias``, whose backward hands the gradient of its input on and keeps that of the weight."""

    @staticmethod
    def forward(ctx: _ProductNode, shared: _Shared | _Apart, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ProductNode, grad: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        grad_NE = grad.reshape(-1, grad.shape[-1])
        grad_x = (grad_NE @ weight).view_as(x) if ctx.needs_input_grad[1] else None
        ctx.shared.contributions.add(x.reshape(-1, x.shape[-1]), grad_NE)
        return None, grad_x, None, None


class DeferredLinear(nn.Linear):
    """A linear layer over the parameters of another. Names, files and results are the same."""

    def __init__(self, layer: nn.Linear, deferral: Deferral) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self.deferral = deferral
        self._shared: weakref.ref[_Shared] | None = None
        self._apart: _Apart | None = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if not (torch.is_grad_enabled() and weight.requires_grad) or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        shared = self._apart or self.shared()
        found: Tensor = _Product.apply(shared, input, shared.weight, shared.bias)
        return found

    def shared(self) -> _Shared:
        """What the passes of the graph that is being made have in common."""
        shared = self._shared() if self._shared is not None else None
        if shared is None or not shared.of(self.weight):
            shared = _Shared(self.weight, self.bias, self.deferral)
            self._shared = weakref.ref(shared)
        return shared

    @contextmanager
    def apart(self) -> Iterator[_Apart]:
        """Passes inside belong to a graph of their own, which is recorded (`realvr.latent.recorded_span`)."""
        self._apart = apart = _Apart(self.weight, self.bias)
        try:
            yield apart
        finally:
            self._apart = None
            apart.pairs.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what belongs to a graph stays with it."""
        return {**super().__getstate__(), "_shared": None, "_apart": None}


def defer_gradients(module: nn.Module) -> Deferral | None:
    """Replace the trained linear layers of the decoder and its output layer, in place. None where there are none.

    The embedding, norms, experts (one tensor for all of them), small matrices and adapters keep autograd's sums.
    """
    from realvr.training.estimate.shape import part_of  # whose neighbours import this file

    deferral, count = Deferral(), 0
    for path, inner in list(module.named_modules()):
        plain = type(inner) is nn.Linear and not (inner._forward_hooks or inner._forward_pre_hooks)
        decoder = (part_of(path) == "layer" and ".lora_" not in path) or path.split(".")[-1] == "lm_head"
        if plain and decoder and inner.weight.requires_grad and inner.weight.numel() >= LEAST:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, DeferredLinear(inner, deferral))
            count += 1
    return deferral if count else None
