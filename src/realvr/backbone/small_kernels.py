"""Rotary embedding and MLP gate in few kernels: a decoder layer otherwise launches more for them than for products.

Each function has two implementations. On a GPU it is compiled (`torch.compile`): one kernel per output or pair of
outputs, also in the backward pass. Elsewhere, and where compilation fails because Triton or a C compiler is missing, it
runs as a few operations of torch. So it does for few numbers, where calling the compiled code costs the host more than
the operations would, unless the step is `recorded`. ``compiled`` forces one or the other. Compiled code rounds 16-bit
numbers once at the end; stock code rounds after each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from realvr.backbone.notices import notice_once
from realvr.errors import out_of_memory

Function = Callable[..., tuple[Tensor, ...]]
Activation = Callable[[Tensor], Tensor]


class _Compiled:
    """A function of tensors through `torch.compile`, from its first call on. The leading size of each tensor may
    change without compiling again."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._made: dict[tuple[object, ...], Function] = {}
        self._broken = False

    @property
    def usable(self) -> bool:
        """Not where it could not be compiled, nor under a mode that wants to see every operation, such as a counter of
        them."""
        return not (self._broken or is_in_torch_dispatch_mode(include_infra_modes=False))

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...] | None:
        """The function's result, without a graph; None where it is not `usable`, with a notice at the first time that
        it cannot be compiled here."""
        if not self.usable:
            return None
        args = tuple(x.data for x in args)  # no views: torch.compile would look at what they are views of
        try:
            made = self._version(args)
            with torch.no_grad():
                if not (args[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                    return made(*args)
                with torch.compiler.set_stance("eager_on_recompile"):  # no compiler runs while a graph is recorded
                    return made(*args)
        except Exception as error:  # compilers fail in many ways, and none is a reason to stop
            if out_of_memory(error) or (args[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                raise  # no fault of the compiler
            self._broken = True
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            notice_once(f"fused layers: not compiled on this machine, in more kernels instead ({text})")
            return None

    def _version(self, args: tuple[Tensor, ...]) -> Function:
        """For tensors of these types and widths. torch compiles one piece of code so often and no more, hence a copy
        of the code for each."""
        key = (args[0].dtype, args[0].device.type, *(x.shape[1:] for x in args))
        made = self._made.get(key)
        if made is None:
            function = cast(FunctionType, self._function)
            own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            # No CUDA graphs of its own: the kernels may be recorded as part of a larger graph.
            made = self._made[key] = torch.compile(own, fullgraph=True)
            for x in args:  # known from the first call on, where torch would learn it from the second size
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return made


FEW = 2**20
"""Numbers of a tensor below which a compiled function is not worth the host's time."""
_recorded = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """Around a step whose kernels are recorded and replayed, runs before the recording included: the host's time does
    not count."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def in_recorded() -> bool:
    """Whether this is such a step."""
    return _recorded.get()


def _wants(compiled: bool | None, x: Tensor) -> bool:
    return x.is_cuda and (_recorded.get() or x.numel() >= FEW) if compiled is None else compiled


# ---------------------------------------------------------------------- rotary embedding


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, compiled: bool | None = None) -> tuple[Tensor, Tensor]:
    """Stock ``apply_rotary_pos_emb``: (B, H, T, d) queries and (B, H_kv, T, d) keys, turned by (B or 1, T, d)."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    if not query.dtype == key.dtype == cos.dtype == sin.dtype:  # the result is of the wider type
        query, key = (_stock(x, cos[:, :, None], sin[:, :, None]) for x in (query, key))
    else:
        query, key = _rotate(query, key, cos, sin, False, compiled)
    return query.transpose(1, 2), key.transpose(1, 2)


def rotate_vision(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, compiled: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Stock ``apply_rotary_pos_emb_vision``: (N, H, d) queries and keys, turned by (N, d) in float32, in the type they
    came in."""
    return _rotate(query, key, cos.float(), sin.float(), True, compiled)


def _rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, wide: bool, compiled: bool | None
) -> tuple[Tensor, Tensor]:
    """(…, H, d) queries and keys by (…, d); ``wide``: in float32 inside."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        turned: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cos, sin, wide, compiled)
        return turned
    return _turn(query, key, cos, sin, wide, compiled, back=False)


class _Turned(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    how: tuple[bool, bool]


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing of queries and keys is kept for it. Positions have no
    gradient."""

    @staticmethod
    def forward(
        ctx: _Turned, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, wide: bool, compiled: bool | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        compiled = _wants(compiled, query)  # decided here: a backward pass may run in another thread
        ctx.how = wide, compiled
        return _turn(query, key, cos, sin, wide, compiled, back=False)

    @staticmethod
    def backward(ctx: _Turned, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        wide, compiled = ctx.how
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            back = tuple(_stock(_widened(x, wide), cos[..., None, :], sin[..., None, :], True) for x in (query, key))
            return back[0].to(query.dtype), back[1].to(key.dtype), None, None, None, None
        return *_turn(query, key, cos, sin, wide, compiled, back=True), None, None, None, None


def _turn(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, wide: bool, compiled: bool | None, back: bool
) -> tuple[Tensor, Tensor]:
    """Both turned, or turned back, without a graph."""
    if _wants(compiled, query):
        rows, shape = query.shape[:-2], (*query.shape[:-2], query.shape[-1])
        flat = [x.flatten(0, -3) for x in (query, key)]
        flat += [x.expand(shape).flatten(0, -2) for x in (cos, sin)]
        found = _COMPILED[back, wide](*flat)
        if found is not None:
            return found[0].unflatten(0, rows), found[1].unflatten(0, rows)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return _short(query, cos, sin, wide, back), _short(key, cos, sin, wide, back)


def _short(x: Tensor, cos: Tensor, sin: Tensor, wide: bool, back: bool) -> Tensor:
    """16 bits: in three operations, each half completed where it lies, rounded less often than stock. Wider types: bit
    for bit as stock."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return _stock(_widened(x, wide), cos, sin, back).to(x.dtype)
    half = x.shape[-1] // 2
    scaled = x * cos
    out = scaled if scaled.dtype == x.dtype else torch.empty_like(scaled, dtype=x.dtype)
    low, high = slice(None, half), slice(half, None)
    for to, other, sign in ((low, high, -1), (high, low, 1)):
        by = sin[..., other] if back else sin[..., to]
        sign = -sign if back else sign
        torch.addcmul(scaled[..., to], x[..., other], by, value=sign, out=out[..., to])
    return out


def _widened(x: Tensor, wide: bool) -> Tensor:
    return x.float() if wide else x


def _stock(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """The definition, for (…, H, d) and (…, 1, d); ``back``: its transpose."""
    half = x.shape[-1] // 2
    if back:
        y = x * sin
        return x * cos + torch.cat((y[..., half:], -y[..., :half]), -1)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _pointwise(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """`_stock` without joining halves, for (N, H, d) and (N, d): every number by itself, so that a compiler makes one
    kernel of it."""
    half = x.shape[-1] // 2
    sign = torch.where(torch.arange(2 * half, device=x.device) < half, -1, 1).to(sin.dtype)
    cos, sin = cos[:, None], (sin * sign)[:, None]
    if back:
        return x * cos + _exchanged(x * sin, half)
    return x * cos + _exchanged(x, half) * sin


def _exchanged(x: Tensor, half: int) -> Tensor:
    return x.unflatten(-1, (2, half)).flip(-2).flatten(-2)


def _forth(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _pointwise(query, cos, sin), _pointwise(key, cos, sin)


def _back(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _pointwise(query, cos, sin, True), _pointwise(key, cos, sin, True)


def _forth_wide(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = _forth(query.float(), key.float(), cos, sin)
    return turned[0].to(query.dtype), turned[1].to(key.dtype)


def _back_wide(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = _back(query.float(), key.float(), cos, sin)
    return turned[0].to(query.dtype), turned[1].to(key.dtype)


_COMPILED = {
    (False, False): _Compiled(_forth),
    (True, False): _Compiled(_back),
    (False, True): _Compiled(_forth_wide),
    (True, True): _Compiled(_back_wide),
}


# ---------------------------------------------------------------------- gate


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the approximation by tanh, Gemma's."""
    return F.gelu(x, approximate="tanh")


def gate(x: Tensor, y: Tensor, act: Activation, compiled: bool | None = None) -> Tensor:
    """``act(x) * y``; ``act`` is ``F.silu`` or `gelu_tanh`."""
    fast = compiles_gate(x, y, act, compiled)
    wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if wanted and (fast or (x.numel() >= FEW and _alike(x, y) and act in _GATES)):
        found: Tensor = _Gate.apply(x, y, act, fast)
        return found
    return _gated(x, y, act, fast)


def compiles_gate(x: Tensor, y: Tensor, act: Activation, compiled: bool | None = None) -> bool:
    """Whether `gate` runs compiled. Asked after a call: whether that one did."""
    return act in _GATES and _alike(x, y) and _wants(compiled, x) and _GATES[act][0].usable


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.is_contiguous() and y.is_contiguous() and x.shape == y.shape and x.dtype == y.dtype


def _gated(x: Tensor, y: Tensor, act: Activation, compiled: bool) -> Tensor:
    out = _GATES[act][0](x.view(-1), y.view(-1)) if compiled else None
    return act(x) * y if out is None else out[0].view(x.shape)


class _GateInputs(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    how: tuple[Activation, bool]


class _Gate(torch.autograd.Function):
    """Keeps both inputs, not what the activation made of the first."""

    @staticmethod
    def forward(ctx: _GateInputs, x: Tensor, y: Tensor, act: Activation, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.how = act, compiled
        return _gated(x, y, act, compiled)

    @staticmethod
    def backward(ctx: _GateInputs, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, y), (act, compiled) = ctx.saved_tensors, ctx.how
        if compiled and not torch.is_grad_enabled():
            found = _GATES[act][1](grad.contiguous().view(-1), x.view(-1), y.view(-1))
            if found is not None:
                return found[0].view(x.shape), found[1].view(y.shape), None, None
        return *_GRADIENTS[act](grad, x, y), None, None


def _silu_gate(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (F.silu(x) * y,)


def _silu_gradient(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled():  # a gradient of the gradient is asked for, which that kernel does not have
        sigmoid = x.sigmoid()
        return grad * y * sigmoid * (1 + x * (1 - sigmoid)), grad * F.silu(x)
    return torch.ops.aten.silu_backward(grad * y, x), grad * F.silu(x)


def _gelu_gate(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (gelu_tanh(x) * y,)


def _gelu_gradient(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.gelu_backward(grad * y, x, approximate="tanh"), grad * gelu_tanh(x)


_GRADIENTS: dict[Activation, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    F.silu: _silu_gradient,
    gelu_tanh: _gelu_gradient,
}
_GATES: dict[Activation, tuple[_Compiled, _Compiled]] = {
    F.silu: (_Compiled(_silu_gate), _Compiled(_silu_gradient)),
    gelu_tanh: (_Compiled(_gelu_gate), _Compiled(_gelu_gradient)),
}
