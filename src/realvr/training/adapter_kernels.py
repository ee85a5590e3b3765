"""Our own Triton kernels for adapters of bfloat16 layers.

torch has no product of a 16-bit and a 32-bit matrix: for an adapter it widens the input, multiplies in 32 bits without
matrix units, widens the output and rounds the sum. These kernels read and write every wide matrix once, in 16 bits, and
are as exact as products in 32 bits. A sum over columns or rows is cut into parts, so that there are enough programs;
the order of additions depends on sizes and device alone.

Triton comes with torch for CUDA. Where it is missing or does not compile, or if a kernel differs from its definition in
float64, torch's operations are used and a notice is printed (`wrong`).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from realvr.errors import UserError, out_of_memory

MOST_RANK = 64
FEW = 16
"""Rows that are few: a latent step has them, or a decoding step of two prompts."""
PARTS, PARTS_OF_FEW = 16, 32
"""Parts of a sum for want of programs, at most."""
TERMS = 4096
"""Most terms of a part: matrix units cut off what they add up."""
PROGRAMS = 2
"""Programs per multiprocessor, given enough rows and columns."""
NARROW, WIDEN, SUMMED = (64, 64), (64, 128), (64, 128)
"""Rows and columns of a tile of each kernel: the fastest on an H200 (`benchmarks/adapter_kernels.py --tiles`)."""
NARROW_FEW = 128
"""Columns where rows are few."""
WARPS, STAGES = 4, 3
"""Of a program, and blocks in flight."""
TOLERANCE = 5e-5
"""Largest relative error of what stays in 32 bits, and of what is rounded to 16 bits beyond that rounding; it should be
about 1e-6. With one bfloat16 factor instead of three, or sums in 16 bits, it would be 1e-3 or more."""


@cache
def installed() -> bool:
    """Whether there is Triton."""
    return find_spec("triton") is not None


@cache
def _kernels() -> ModuleType:
    """Imported when they are needed: Triton takes its time."""
    from realvr.training import triton_adapters

    return triton_adapters


_compiled: dict[tuple[object, ...], Any] = {}
launched: Counter[str] = Counter()
"""How often each kernel was launched or recorded, by name."""


def _launch(
    name: str, grid: tuple[int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], fixed: dict[str, int]
) -> None:
    """Run a kernel. Triton finds out at every call which of its compiled versions is meant, which takes the host
    several times as long as the launch itself. Here it is asked once for the same numbers; the first of them is the
    number of rows, of which it matters only whether it is 1 or a multiple of 16."""
    rows, device = numbers[0], tensors[0].device
    aligned = not any(x.data_ptr() % 16 for x in tensors)
    types = tuple(x.dtype for x in tensors)
    key = (name, device, types, rows == 1, rows % 16 == 0, *numbers[1:], *fixed.values())
    known = _compiled.get(key) if aligned else None
    with torch.cuda.device_of(tensors[0]):  # where Triton launches
        if known is not None:
            known[(*grid, 1)](*tensors, *numbers, *fixed.values())
            launched[name] += 1
            return
        kernel = getattr(_kernels(), name)
        try:
            made = kernel[grid](*tensors, *numbers, **fixed, num_warps=WARPS, num_stages=STAGES)
        except Exception as error:  # compilers fail in many ways
            if out_of_memory(error):
                raise
            raise UserError(f"{_brief(error)}; lora.kernels: false trains without our kernels") from error
    launched[name] += 1
    if aligned and made is not None:  # Triton's interpreter makes nothing
        _compiled[key] = made


def narrow(x_NC: Tensor, weight_CR: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * x @ weight`` as parts (P, N, R) that are still to be added up; ``x`` in bfloat16, the rest in 32
    bits."""
    (rows, columns), rank = x_NC.shape, weight_CR.shape[1]
    tile, step = (FEW, NARROW_FEW) if rows <= FEW else NARROW
    step = step if rank <= 32 else step // 2  # there is room for fewer of a weight of high rank
    most = PARTS_OF_FEW if rows <= FEW else PARTS
    per, parts = _cut(columns, step, most, _ceil(rows, tile), x_NC.device)
    out = x_NC.new_empty(parts, rows, rank, dtype=torch.float32)
    _launch(
        "narrow",
        (_ceil(rows, tile), parts),
        (x_NC, weight_CR, out),
        (rows, columns, rank, per, scale, x_NC.stride(0), *weight_CR.stride()),
        {"ROWS": tile, "COLUMNS": step, "RANK": _power(rank), "WIDE": not x_NC.is_cuda},
    )
    return out


def widen(
    inner_PNR: Tensor, weight_RC: Tensor, scale: float, base_NC: Tensor, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``base + scale * inner @ weight`` in the format of ``base``, rounded once, and with ``keep`` the sum of the parts
    (N, R). ``base`` is contiguous and is written over."""
    parts, rows, rank = inner_PNR.shape
    columns = weight_RC.shape[1]
    tile, block = min(WIDEN[0], _power(rows)), WIDEN[1]
    whole = inner_PNR.new_empty(rows, rank) if keep and parts > 1 else None
    _launch(
        "widen",
        (_ceil(rows, tile), _ceil(columns, block)),
        (inner_PNR, weight_RC, base_NC, inner_PNR if whole is None else whole),
        (rows, columns, rank, parts, scale, *weight_RC.stride()),
        {
            "ROWS": tile,
            "COLUMNS": block,
            "RANK": _power(rank),
            "PARTS": 1 << (parts - 1).bit_length(),  # or there would be a kernel for every number of parts
            "KEEP": whole is not None,
        },
    )
    return base_NC, inner_PNR[0] if keep and whole is None else whole


def summed(inner_NR: Tensor, x_NC: Tensor, scale: float = 1.0, turned: bool = False) -> Tensor:
    """``scale * inner.T @ x`` (R, C) in 32 bits, or with ``turned`` its transpose (C, R): a sum over rows."""
    (rows, columns), rank = x_NC.shape, inner_NR.shape[1]
    tile, block = min(SUMMED[0], _power(rows)), SUMMED[1]
    per, parts = _cut(rows, tile, PARTS, _ceil(columns, block), x_NC.device)
    shape = (columns, rank) if turned else (rank, columns)
    out = inner_NR.new_empty(parts, *shape)
    strides = (1, rank) if turned else (columns, 1)
    _launch(
        "summed",
        (_ceil(columns, block), parts),
        (inner_NR, x_NC, out),
        (rows, columns, rank, per, scale, x_NC.stride(0), *strides),
        {"ROWS": tile, "COLUMNS": block, "RANK": _power(rank), "WIDE": not x_NC.is_cuda},
    )
    return out[0] if parts == 1 else out.sum(0)


def _ceil(size: int, each: int) -> int:
    return -(-size // each)


def _power(size: int) -> int:
    """The next power of two, of which matrix units take at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _cut(size: int, step: int, most: int, others: int, device: torch.device) -> tuple[int, int]:
    """How much of a sum of so many terms one program adds up, and the number of parts."""
    wanted = min(most, max(1, _ceil(PROGRAMS * _processors(device), others)))
    per = min(TERMS, step * _ceil(_ceil(size, wanted), step))
    return per, max(1, _ceil(size, per))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# ---------------------------------------------------------------------- compared with the definition

COMPARED = (1, 3, 20, 75, 1200)
"""Rows: of latent steps, of decoding steps, of a prompt; every size of tile, and a single row, which is a case of its
own."""


@torch.no_grad()
def wrong(device: torch.device, rank: int, inputs: int, outputs: int) -> str:
    """Why adapters of such a layer cannot use these kernels on this device; empty if they can."""
    if not installed():
        return "there is no Triton"
    if rank > MOST_RANK:
        return f"rank {rank} is above {MOST_RANK}"
    try:
        # Twice: a kernel is launched in another way at first.
        each = [gaps(device, rank, inputs, outputs, rows) for rows in COMPARED for _ in range(2)]
        gap = max_of(sum(each, []))
    except Exception as error:  # compilers fail in many ways
        if out_of_memory(error):
            raise
        return _brief(error.__cause__ if isinstance(error, UserError) and error.__cause__ else error)
    return "" if gap <= TOLERANCE else f"relative error {gap:.1e}"


def gaps(
    device: torch.device, rank: int, inputs: int, outputs: int, rows: int, dtype: torch.dtype = torch.bfloat16
) -> list[float]:
    """How far each kernel is from float64 for random numbers of these shapes."""
    numbers = torch.Generator(device).manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=numbers, device=device)

    x, grad, base = (noise(rows, size).to(dtype) for size in (inputs, outputs, outputs))
    of_base = noise(rows, inputs).to(dtype)
    down, up = noise(rank, inputs) / math.sqrt(inputs), noise(outputs, rank)
    wide_x, wide_grad, wide_down, wide_up = (t.double() for t in (x, grad, down, up))
    inner, back = wide_x @ wide_down.t(), 3 * wide_grad @ wide_up
    right, right_of_x = base.double() + 3 * inner @ wide_up.t(), of_base.double() + back @ wide_down
    parts, parts_back = narrow(x, down.t()), narrow(grad, up, 3.0)
    # As layers call it: forward without gradient and with it, backward.
    still, _ = widen(parts, up.t(), 3.0, base.clone())
    out, found_inner = widen(parts, up.t(), 3.0, base, keep=True)
    of_x, found_back = widen(parts_back, down, 1.0, of_base, keep=True)
    assert found_inner is not None and found_back is not None
    return [
        _apart(found_inner, inner),
        _apart(found_back, back),
        _beyond(still, right),
        _beyond(out, right),
        _beyond(of_x, right_of_x),
        _apart(summed(found_inner, grad, 3.0, turned=True), 3 * wide_grad.t() @ inner),
        _apart(summed(found_back, x), back.t() @ wide_x),
    ]


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def max_of(gaps: list[float]) -> float:
    """The largest; infinite where one is no number, which Python's ``max`` may pass over."""
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def _apart(found: Tensor, right: Tensor) -> float:
    """Of the worst row, relative to all: a row of one number may be near zero."""
    return float((found.double() - right).norm(dim=-1).max() / right.norm(dim=-1).mean())


def _beyond(found: Tensor, right: Tensor) -> float:
    """Rounding is off by no more than half a unit in the last place."""
    off = (found.double() - right).abs() - torch.finfo(found.dtype).eps / 2 * right.abs()
    worst = off.clamp(min=0).max() / right.abs().mean()
    return float(worst) if bool(found.isfinite().all()) else math.inf
