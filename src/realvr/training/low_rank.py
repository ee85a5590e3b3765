"""An adapted layer as one node of the graph, in two ways.

Adapters of a 16-bit model have 32 bits. peft's graph keeps a 32-bit copy of the input of every adapted layer.
`low_rank` is ``result + scaling * up(down(x))``. It keeps the 16-bit input itself, which layers that read the same
input share, and makes the copy again in the backward pass: peft's numbers, on a CPU bit for bit.

`adapted` also computes the product of the layer itself, ``base(x) + scaling * up(down(x))``, with our own kernels
(`realvr.training.adapter_kernels`), which make no copy at all. Sums are added up in 32 bits in another order than
peft's, and the sum of the two parts of the input's gradient is rounded once, instead of each part.

Letters: N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from realvr.training import adapter_kernels


def low_rank(result: Tensor, x: Tensor, down_RI: Tensor, up_OR: Tensor, scaling: float) -> Tensor:
    """The sum in the type of ``result``, rounded once. x and result have the same leading dimensions."""
    found: Tensor = _LowRank.apply(result, x, down_RI, up_OR, scaling)
    return found


def adapted(x: Tensor, base: nn.Linear, down_RI: Tensor, up_OR: Tensor, scaling: float) -> Tensor:
    """Output of the frozen layer ``base`` with its adapter, for layers that `frozen` allows; x in bfloat16."""
    if not torch.is_grad_enabled():
        return _forward(x, base.weight, base.bias, down_RI, up_OR, scaling)[0]
    found: Tensor = _Adapted.apply(x, base.weight, base.bias, down_RI, up_OR, scaling)
    return found


def scaled(x: Tensor, scaling: float) -> tuple[Tensor, float]:
    """The product and 1, or both as they are where the scaling is a power of two: multiplying by it is exact, now or
    later. With another one, a single operation would round once where two round twice."""
    return (x, scaling) if math.frexp(scaling)[0] == 0.5 else (x * scaling, 1.0)


def called_directly(layer: nn.Module, bias: bool = False) -> bool:
    """Whether a layer is a plain product that no hook surrounds. An engine may gather its weight in hooks."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is nn.Linear and (bias or layer.bias is None) and not any(hooks)


def in_place(layer: nn.Module, bias: bool = False) -> bool:
    """The same, with a weight that is there."""
    return called_directly(layer, bias) and type(layer.weight) in (Tensor, nn.Parameter)


def frozen(layer: nn.Module) -> bool:
    """Whether a layer is a plain product with a weight that is there, that no hook surrounds and nobody trains."""
    plain = in_place(layer, bias=True)
    return plain and not any(parameter.requires_grad for parameter in layer.parameters())


class _Node(FunctionCtx):
    scaling: float
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Node, result: Tensor, x: Tensor, down_RI: Tensor, up_OR: Tensor, scaling: float) -> Tensor:
        ctx.scaling = scaling
        inner = F.linear(x.to(down_RI.dtype), down_RI)
        update, scaling = scaled(F.linear(inner, up_OR), scaling)
        found = torch.add(result, update, alpha=scaling, out=torch.empty_like(result))
        ctx.save_for_backward(x, inner, down_RI, up_OR)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: _Node, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, down_RI, up_OR = ctx.saved_tensors
        of_result, of_x, of_down, of_up, *_ = ctx.needs_input_grad
        inner_NR, x_NI = _rows(inner), _rows(x)
        wide_NO, scaling = scaled(_rows(grad).to(up_OR.dtype), ctx.scaling)
        grad_NR = wide_NO @ up_OR * scaling
        grad_up = wide_NO.t() @ inner_NR * scaling if of_up else None
        del wide_NO  # one wide tensor at a time
        grad_down = grad_NR.t() @ x_NI.to(down_RI.dtype) if of_down else None
        grad_x = (grad_NR @ down_RI).to(x.dtype).view(x.shape) if of_x else None
        return grad if of_result else None, grad_x, grad_down, grad_up, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------------- with the layer, by kernels of our own


def _forward(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    down_RI: Tensor,
    up_OR: Tensor,
    scaling: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output, and with ``keep`` what is between the two layers of the adapter."""
    x_NI = _contiguous_rows(x)
    inner_PNR = adapter_kernels.narrow(x_NI, down_RI.t())
    out_NO = F.linear(x_NI, weight_OI, bias_O)
    out_NO, inner_NR = adapter_kernels.widen(inner_PNR, up_OR.t(), scaling, out_NO, keep)
    # No view: what a node returns as one must not be changed in place.
    return torch.ops.aten._unsafe_view.default(out_NO, (*x.shape[:-1], len(weight_OI))), inner_NR


def _contiguous_rows(x: Tensor) -> Tensor:
    rows = _rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _AdaptedNode(FunctionCtx):
    scaling: float
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _AdaptedNode,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        down_RI: Tensor,
        up_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        out, inner_NR = _forward(x, weight_OI, bias_O, down_RI, up_OR, scaling, keep=True)
        assert inner_NR is not None
        ctx.scaling = scaling
        ctx.save_for_backward(x, inner_NR, weight_OI, down_RI, up_OR)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _AdaptedNode, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_NR, weight_OI, down_RI, up_OR = ctx.saved_tensors
        of_x, _, _, of_down, of_up, _ = ctx.needs_input_grad
        grad_NO, x_NI = _contiguous_rows(grad), _contiguous_rows(x)
        grad_x = grad_down = grad_up = None
        if of_up:
            grad_up = adapter_kernels.summed(inner_NR, grad_NO, ctx.scaling, turned=True)
        if of_x or of_down:
            grad_PNR = adapter_kernels.narrow(grad_NO, up_OR, ctx.scaling)
            if of_x:
                grad_x, grad_NR = adapter_kernels.widen(grad_PNR, down_RI, 1.0, grad_NO @ weight_OI, keep=of_down)
                grad_x = grad_x.view(x.shape)
            else:
                grad_NR = grad_PNR.sum(0)
            if of_down:
                assert grad_NR is not None
                grad_down = adapter_kernels.summed(grad_NR, x_NI)
        return grad_x, None, None, grad_down, grad_up, None
