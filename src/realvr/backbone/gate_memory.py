"""A gated MLP that keeps x and y for its backward pass, and not ``act(x) * y`` as well.

Stock code keeps three tensors as wide as the MLP, most of what a decoder layer keeps: the two inputs of the gate, and
their product, which the next layer needs for the gradient of its weight. Here the product is computed again from the
two inputs, bit for bit, when that gradient is computed. The layer itself is called unchanged, whether it is plain,
deferred, adapted or sharded.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from realvr.backbone import small_kernels
from realvr.backbone.small_kernels import Activation


def made_again(
    gated: Tensor, x: Tensor, y: Tensor, act: Activation, compiled: bool | None = None
) -> AbstractContextManager[object]:
    """Inside, whoever keeps ``gated``, which is ``small_kernels.gate(x, y, act, compiled)``, for a backward pass keeps
    x and y instead; views of it too. A copy in another type is kept as it is."""
    if not _pays(gated, x):
        return nullcontext()
    whole = weakref.ref(gated)  # the graph keeps ``pack``
    version = gated._version
    compiled = small_kernels.compiles_gate(x, y, act, compiled)  # decided here: backward runs in another thread
    x, y = x.detach(), y.detach()

    def pack(kept: Tensor) -> _Kept | _Product:
        product = whole()
        if product is not None and product._version == version and _inside(kept, product):
            place = int(kept.storage_offset() - product.storage_offset())
            return _Product(_Kept.of(x), _Kept.of(y), act, compiled, (kept.size(), kept.stride(), place))
        # A leaf as it is: an engine may exchange what is in it. Without a graph others: one may be the output of the
        # node that keeps it.
        return _Kept.of(kept if kept.is_leaf else kept.detach())

    return saved_tensors_hooks(pack, _unpacked)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor, which must not have changed when it is needed: where there are hooks, autograd does not check that."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> _Kept:
        return _Kept(tensor, tensor._version)

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            shape = tuple(self.tensor.shape)
            raise RuntimeError(
                f"a tensor {shape} that an MLP needs for its backward pass was modified by an inplace operation"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Product:
    """In place of a gate's output, or a view of it."""

    x: _Kept
    y: _Kept
    act: Activation
    compiled: bool
    layout: tuple[torch.Size, tuple[int, ...], int]
    """Size, strides and place in the whole."""

    def make(self) -> Tensor:
        """Compute it again."""
        with torch.no_grad():
            made = small_kernels.gate(self.x.get(), self.y.get(), self.act, compiled=self.compiled)
        return made.as_strided(*self.layout)


def _unpacked(kept: _Kept | _Product) -> Tensor:
    return kept.make() if isinstance(kept, _Product) else kept.get()


def _inside(kept: Tensor, product: Tensor) -> bool:
    """Whether it is the product, or a view of it."""
    return kept.dtype == product.dtype and kept.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()


def _pays(gated: Tensor, x: Tensor) -> bool:
    """Where the gate keeps its inputs, of a tensor that matters: with few numbers calls from Python take longer than
    the bytes are worth, as with what is compiled. Not where others see to what is kept: a checkpointed layer keeps
    nothing at all, and would miss what it made again; nor in a recording, whose memory stays."""
    return (
        gated.numel() >= small_kernels.FEW
        and torch.is_grad_enabled()
        and x.requires_grad
        and type(gated) is Tensor
        and gated.is_contiguous()
        and not small_kernels.in_recorded()
        and not (gated.is_cuda and torch.cuda.is_current_stream_capturing())
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )
