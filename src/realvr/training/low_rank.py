"""``result + scaling * up(down(x))`` of an adapted layer as one node of the graph.

Adapters of a 16-bit model have 32 bits. peft's graph keeps a 32-bit copy of the input of every adapted layer. This node
keeps the 16-bit input itself, which layers that read the same input share, and makes the copy again in the backward
pass: peft's numbers, on a CPU bit for bit.

With ``split`` a GPU makes no copy at all. A 32-bit factor is the sum of two bfloat16 ones, to 16 bits of its mantissa.
Products of these run on a GPU's matrix units, which add up in 32 bits. What is computed in 32 bits then has a relative
error of about 1e-5. Outputs are rounded to 16 bits as before, a hundred times coarser. Most of the bytes that an
adapter reads and writes are saved.

Letters: N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

SPLIT_FROM = 2**26
"""Numbers of a layer's input and output from which its products are split: with fewer, launching the small operations
takes longer than what they save. Computed for a 7B layer, not measured."""
TOLERANCE = 1e-4
"""Largest relative error of split products before they are rounded to 16 bits; it should be about 1e-5."""


def low_rank(result: Tensor, x: Tensor, down_RI: Tensor, up_OR: Tensor, scaling: float, split: bool = False) -> Tensor:
    """The sum in the type of ``result``, rounded once. x and result have the same leading dimensions. ``split`` is for
    bfloat16 ones with a 32-bit adapter."""
    found: Tensor = _LowRank.apply(result, x, down_RI, up_OR, scaling, split)
    return found


def scaled(x: Tensor, scaling: float) -> tuple[Tensor, float]:
    """The product and 1, or both as they are where the scaling is a power of two: multiplying by it is exact, now or
    later. With another one, a single operation would round once where two round twice."""
    return (x, scaling) if math.frexp(scaling)[0] == 0.5 else (x * scaling, 1.0)


def called_directly(layer: nn.Module) -> bool:
    """Whether a layer is a plain product that no hook surrounds. An engine may gather its weight in hooks."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is nn.Linear and layer.bias is None and not any(hooks)


def in_place(layer: nn.Module) -> bool:
    """The same, with a weight that is there."""
    return called_directly(layer) and type(layer.weight) in (Tensor, nn.Parameter)


class _Node(FunctionCtx):
    scaling: float
    split: bool
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Node, result: Tensor, x: Tensor, down_RI: Tensor, up_OR: Tensor, scaling: float, split: bool
    ) -> Tensor:
        ctx.scaling, ctx.split = scaling, split
        if split:
            inner = _wide(_rows(x), down_RI)
            found = torch.empty_like(result, memory_format=torch.contiguous_format)  # a view may not be changed later
            _plus(_rows(result), inner, scaling * up_OR.t(), out=_rows(found))
        else:
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
        grad_x = grad_down = grad_up = None
        grad_NO, inner_NR, x_NI = _rows(grad), _rows(inner), _rows(x)
        if ctx.split:
            grad_NR = _wide(grad_NO, ctx.scaling * up_OR.t())
            grad_up = _summed(ctx.scaling * inner_NR, grad_NO).t() if of_up else None
            grad_down = _summed(grad_NR, x_NI) if of_down else None
            grad_x = _plus(None, grad_NR, down_RI) if of_x else None
        else:
            wide_NO, scaling = scaled(grad_NO.to(up_OR.dtype), ctx.scaling)
            grad_NR = wide_NO @ up_OR * scaling
            grad_up = wide_NO.t() @ inner_NR * scaling if of_up else None
            del wide_NO  # one wide tensor at a time
            grad_down = grad_NR.t() @ x_NI.to(down_RI.dtype) if of_down else None
            grad_x = (grad_NR @ down_RI).to(x.dtype) if of_x else None
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad if of_result else None, grad_x, grad_down, grad_up, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------------- products of bfloat16 halves


def _into_halves(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Two bfloat16 tensors whose sum is the 32-bit one, to 2^-17 of it."""
    high.copy_(x)
    torch.sub(x, high, out=low)


def _halves(x: Tensor, dim: int) -> Tensor:
    """Both, one behind the other."""
    both = x.new_empty([size * (1 + (d == dim)) for d, size in enumerate(x.shape)], dtype=torch.bfloat16)
    _into_halves(x, *both.chunk(2, dim))
    return both


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of bfloat16 matrices, in 32 bits. Only CUDA has it without copies."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _wide(narrow_NI: Tensor, wide_RI: Tensor) -> Tensor:
    """``narrow @ wide.T`` (N, R), 32 bits."""
    high, low = _product(narrow_NI, _halves(wide_RI, 0).t()).chunk(2, dim=1)
    return high + low


def _summed(wide_NR: Tensor, narrow_NI: Tensor) -> Tensor:
    """``wide.T @ narrow`` (R, I), 32 bits: a sum over rows."""
    high, low = _product(_halves(wide_NR, 1).t(), narrow_NI).chunk(2)
    return high + low


def _plus(narrow_NO: Tensor | None, wide_NR: Tensor, wide_RO: Tensor, out: Tensor | None = None) -> Tensor:
    """``narrow + wide @ wide``, rounded to bfloat16 once. The product of the two low halves is left out."""
    rows, rank = wide_NR.shape
    left = wide_NR.new_empty(rows, 3 * rank, dtype=torch.bfloat16)
    right = wide_RO.new_empty(3 * rank, wide_RO.shape[1], dtype=torch.bfloat16)
    high_NR, low_NR, again_NR = left.chunk(3, dim=1)
    high_RO, again_RO, low_RO = right.chunk(3)
    _into_halves(wide_NR, high_NR, low_NR)
    _into_halves(wide_RO, high_RO, low_RO)
    again_NR.copy_(high_NR)
    again_RO.copy_(high_RO)
    return left @ right if narrow_NO is None else torch.addmm(narrow_NO, left, right, out=out)


@torch.no_grad()
def split_gap(device: torch.device, rank: int, inputs: int, outputs: int, rows: int = 1024) -> float:
    """How far split products are from float64 on a device, for random numbers: the largest relative error of what stays
    in 32 bits. Of what is rounded to 16 bits, what is beyond that rounding counts. Infinite where it is no number."""
    numbers = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=numbers).to(device)

    x, result = noise(rows, inputs).bfloat16(), noise(rows, outputs).bfloat16()
    down, up, wide = noise(rank, inputs), noise(outputs, rank), noise(rows, rank)
    gaps = [
        _gap(_wide(x, down), x.double() @ down.double().t()),
        _gap(_summed(wide, x), wide.double().t() @ x.double()),
    ]
    for base in (None, result):
        right = wide.double() @ up.double().t() + (0 if base is None else base.double())
        found = _plus(base, wide, up.t()).double()
        beyond = ((found - right).abs() - 2**-8 * right.abs()).clamp(min=0)  # a rounding to 8 bits is off by no more
        gaps.append(float(beyond.max() / right.abs().mean()))
    worst = max(gaps, key=lambda gap: gap if math.isfinite(gap) else math.inf)
    return worst if math.isfinite(worst) else math.inf


def _gap(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())
