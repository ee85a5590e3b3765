"""Cases for `training/test_adapter_kernels.py`, in a process of its own: Triton reads ``TRITON_INTERPRET`` when it is
imported. Layers and steps are in `adapter_layer_cases`.

TRITON_INTERPRET=1 python tests/adapter_kernel_cases.py numbers     (runs the kernels on the CPU)
TRITON_INTERPRET=1 python tests/adapter_kernel_cases.py refused     (broken ones, as the package compares them)
python tests/adapter_kernel_cases.py compile                        (compiles them for GPUs that need not be there)
python tests/adapter_kernel_cases.py launched                       (which compiled kernel a launch takes)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import pretend_triton
from realvr.training import adapter_kernels as kernels

CPU, BF16 = torch.device("cpu"), torch.bfloat16
ROWS = (1, 3, 16, 17, 75, 130)
SHAPES = ((1, 50, 40), (4, 97, 75), (16, 331, 200), (33, 130, 331), (64, 270, 130))
"""Rank, inputs, outputs; no width is a multiple of a tile's."""
SOME = {1: (3, 75), 33: (3, 17, 130), 64: (1, 16, 75)}
"""Rows for some ranks."""
SCALE = 0.7
launch = kernels._launch


def as_on_a_gpu(name: str, grid: Any, tensors: Any, numbers: Any, fixed: dict[str, int]) -> None:
    """The launch with 16-bit factors on matrix units."""
    launch(name, grid, tensors, numbers, fixed | ({"WIDE": False} if "WIDE" in fixed else {}))


@contextmanager
def changed(**names: Any) -> Iterator[None]:
    before = {name: getattr(kernels, name) for name in names}
    for name, value in names.items():
        setattr(kernels, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(kernels, name, value)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def held(x: Tensor, dtype: torch.dtype = torch.float32, strided: bool = False) -> Tensor:
    """The same numbers, with NaN before and behind them; ``strided``: also between rows."""
    rows, columns = x.shape
    buffer = torch.full((rows + 2, columns + 5 * strided), math.nan, dtype=dtype)
    return buffer[1:-1, 2 * strided : 2 * strided + columns].copy_(x)


def off(found: Tensor, right: Tensor) -> float:
    """The largest error in terms of the mean number; of 16-bit numbers what rounding does not explain."""
    apart = (found.double() - right).abs()
    if found.dtype == BF16:
        unit = torch.ldexp(torch.ones_like(right), torch.frexp(right)[1] - 1) * torch.finfo(BF16).eps
        apart = torch.where(apart <= unit / 2, 0 * apart, apart - unit / 2)
    return float(apart.max() / right.abs().mean())


def numbers() -> None:
    """Prints ``name error`` lines."""
    pretend_triton.round_as_a_gpu()
    for how, way, processors in (("in 32 bits", launch, 4), ("in thirds", as_on_a_gpu, 132)):
        torch.manual_seed(0)
        with changed(_launch=way, _processors=lambda _, found=processors: found):
            each = [definitions(*shape, rows) for shape in SHAPES for rows in SOME.get(shape[0], ROWS)]
            for name in each[0]:
                print(f"{name} {how}", kernels.max_of([one[name] for one in each]))
            compared = [kernels.gaps(CPU, *shape, rows) for shape in SHAPES for rows in (1, 17)]
            print(f"gaps {how}", kernels.max_of(sum(compared, [])))
    with changed(_launch=as_on_a_gpu, TERMS=64):  # more parts than there may be for want of programs
        for inputs, rows in ((1100, 20), (20, 1100)):
            print(f"short parts of {inputs} columns", kernels.max_of(list(definitions(4, inputs, 20, rows).values())))


def refused() -> None:
    """Prints ``name error`` lines: what the comparison on the device says of the kernels, and 0 for each broken one
    that it refuses."""
    pretend_triton.round_as_a_gpu()
    with changed(_launch=as_on_a_gpu, COMPARED=(3, 75)):
        print("right", float(kernels.wrong(CPU, 16, 330, 131) != ""))
        print("right, rank 1", float(kernels.wrong(CPU, 1, 330, 131) != ""))
    with changed(_launch=as_on_a_gpu, COMPARED=(3, 20)):
        for name, broken in BROKEN.items():
            with broken():
                found = kernels.wrong(CPU, 16, 330, 131)
            assert not found or found.startswith("relative error"), found
            print(name, float(not found))
        with without_low_thirds():  # too near for a machine, not for these lines
            print("two thirds of a factor", float(kernels.max_of(kernels.gaps(CPU, 16, 330, 131, 75)) < 3e-6))


def definitions(rank: int, inputs: int, outputs: int, rows: int) -> dict[str, float]:
    """Each kernel, with and without strides, against float64."""
    found: dict[str, float] = {}

    def note(name: str, error: float) -> None:
        found[name] = kernels.max_of([found.get(name, 0.0), error])

    for strided in (False, True):
        x = held(noise(rows, inputs), BF16, strided)
        weight = held(noise(inputs, rank)) if strided else held(noise(rank, inputs)).t()
        parts = kernels.narrow(x, weight, SCALE)
        assert parts.dtype == torch.float32 and parts.shape[1:] == (rows, rank)
        assert len(parts) > 1 or inputs <= kernels.NARROW_FEW
        note("narrow", off(parts.sum(0), SCALE * x.double() @ weight.double()))
        inner = held(noise(rows, rank))
        for turned in (False, True):
            right = SCALE * inner.double().t() @ x.double()
            note("summed", off(kernels.summed(inner, x, SCALE, turned), right.t() if turned else right))
    for parts, turned, keep in ((1, False, True), (3, False, False), (7, True, True), (1, True, False)):
        inner = held(noise(parts * rows, rank)).view(parts, rows, rank)
        weight = held(noise(outputs, rank)).t() if turned else held(noise(rank, outputs))
        update = SCALE * inner.double().sum(0) @ weight.double()
        base = held(noise(rows, outputs), BF16)
        right = base.double() + update
        out, kept = kernels.widen(inner, weight, SCALE, base, keep)
        assert out is base and out.dtype == BF16 and bool(base._base.isnan().sum() == 2 * outputs)  # type: ignore[union-attr]
        assert (kept is not None) == keep
        note("widen", off(out, right))
        if kept is not None:
            note("kept", off(kept, inner.double().sum(0)))
    return found


# ---------------------------------------------------------------------- broken kernels


def broken(kernel: str, wrapped: Callable[..., Any]) -> Callable[[], Any]:
    right = getattr(kernels, kernel)
    return lambda: changed(**{kernel: lambda *given, **options: wrapped(right, *given, **options)})


def last_lost(out: Tensor, value: float = 0.0, row: bool = True) -> Tensor:
    (out[..., -1, :] if row else out[..., -1]).fill_(value)
    return out


def first(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The first result of `widen`, changed."""

    def wrapped(right: Any, *given: Any, **options: Any) -> Any:
        out, kept = right(*given, **options)
        return change(out), kept

    return wrapped


def column_of_base(widen: Any, inner: Any, weight: Any, scale: float, base: Any, keep: bool = False) -> Any:
    before = base[:, -1].clone()
    out, kept = widen(inner, weight, scale, base, keep)
    out[:, -1] = before
    return out, kept


def lost(when: Callable[[Tensor, bool], bool]) -> Callable[..., Any]:
    """`widen` that gives zeros for some weights and keeps."""

    def wrapped(widen: Any, inner: Any, weight: Any, scale: float, base: Any, keep: bool = False) -> Any:
        out, kept = widen(inner, weight, scale, base, keep)
        return out.zero_() if when(weight, keep) else out, kept

    return wrapped


def without_base(widen: Any, inner: Any, weight: Any, scale: float, base: Any, keep: bool = False) -> Any:
    return widen(inner, weight, scale, base.zero_(), keep)


def first_part_kept(widen: Any, inner: Tensor, *given: Any, **options: Any) -> Any:
    assert len(inner) > 1
    return widen(inner, *given, **options)[0], inner[0]


@triton.jit
def one_third(narrow, wide, total):  # type: ignore[no-untyped-def]
    kind = wide.dtype if narrow.dtype == tl.float32 else narrow.dtype
    return tl.dot(narrow.to(kind), wide.to(kind), total)


@triton.jit
def without_low(narrow, wide, total):  # type: ignore[no-untyped-def]
    kind = wide.dtype if narrow.dtype == tl.float32 else narrow.dtype
    if narrow.dtype == tl.float32:
        high = narrow.to(kind)
        return tl.dot(high, wide, tl.dot((narrow - high.to(tl.float32)).to(kind), wide, total))
    high = wide.to(kind)
    return tl.dot(narrow, high, tl.dot(narrow, (wide - high.to(tl.float32)).to(kind), total))


@contextmanager
def multiplied(by: Any) -> Iterator[None]:
    module = kernels._kernels()
    before, module.times = module.times, by
    yield
    module.times = before


def without_low_thirds() -> Any:
    return multiplied(without_low)


@contextmanager
def rounding(change: Callable[[np.ndarray, str], np.ndarray]) -> Iterator[None]:
    pretend_triton.round_as_a_gpu(change)
    yield
    pretend_triton.round_as_a_gpu()


def sums_in_16_bits(x: np.ndarray, what: str) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy() if what == "sum" else x


def single_tf32(x: np.ndarray, what: str) -> np.ndarray:
    return (x.view(np.uint32) & ~np.uint32(2**13 - 1)).view(np.float32) if what == "TF32x3" else x


BROKEN: dict[str, Callable[[], Any]] = {
    "sums in 16 bits": lambda: rounding(sums_in_16_bits),
    "one third of a factor": lambda: multiplied(one_third),
    "one product of tf32": lambda: rounding(single_tf32),
    "narrow, 16 bits": broken("narrow", lambda right, *given: right(*given).bfloat16().float()),
    "narrow, last column": broken("narrow", lambda right, x, w, *scale: right(x[:, :-1], w[:-1], *scale)),
    "narrow, last row": broken("narrow", lambda right, *given: last_lost(right(*given))),
    "narrow, last of the rank": broken("narrow", lambda right, *given: last_lost(right(*given), row=False)),
    "narrow, scale": broken("narrow", lambda right, x, w, *scale: right(x, w)),
    "narrow, a part": broken("narrow", lambda right, *given: right(*given)[:-1]),
    "narrow, not a number": broken("narrow", lambda right, *given: last_lost(right(*given), math.nan)),
    "widen, base": broken("widen", without_base),
    "widen, without gradient": broken("widen", lost(lambda weight, keep: not keep)),
    "widen, with gradient": broken("widen", lost(lambda weight, keep: keep and weight.stride(1) != 1)),
    "widen, backward": broken("widen", lost(lambda weight, keep: weight.stride(1) == 1)),
    "widen, last column": broken("widen", column_of_base),
    "widen, last row": broken("widen", first(last_lost)),
    "widen, scale": broken("widen", lambda right, i, w, s, *more, **keep: right(i, w, 1.0, *more, **keep)),
    "widen, first part kept": broken("widen", first_part_kept),
    "widen, not a number": broken("widen", first(lambda out: last_lost(out, math.nan))),
    "summed, last row": broken("summed", lambda right, i, x, *scale, **how: right(i[:-1], x[:-1], *scale, **how)),
    "summed, last column": broken(
        "summed", lambda right, *given, turned=False: last_lost(right(*given, turned=turned), row=turned)
    ),
    "summed, scale": broken("summed", lambda right, i, x, *scale, **how: right(i, x, **how)),
    "summed, not a number": broken("summed", lambda right, *given, **how: last_lost(right(*given, **how), math.nan)),
}

# ---------------------------------------------------------------------- for GPUs that are not there


def adapted(rank: int, inputs: int, outputs: int, rows: int, x: Tensor | None = None) -> None:
    """The kernels of a layer: forward with and without gradient, and backward."""
    x = torch.empty(rows, inputs, dtype=BF16) if x is None else x
    out = torch.empty(rows, outputs, dtype=BF16)
    down, up = torch.empty(rank, inputs), torch.empty(outputs, rank)
    for keep in (False, True):
        parts = kernels.narrow(x, down.t())
        kept = kernels.widen(parts, up.t(), SCALE, out, keep)[1]
    parts = kernels.narrow(out, up, SCALE)
    kernels.widen(parts, down, 1.0, torch.empty_like(x, memory_format=torch.contiguous_format), True)
    assert kept is not None
    kernels.summed(kept, out, SCALE, turned=True)
    kernels.summed(kept, x)


def compile_all() -> None:
    """For widths of 7B, in which every kernel has its largest tiles. Prints ``name arch KiB``, the most that any of the
    compiled ones takes."""
    processors = {80: 108, 86: 82, 90: 132}
    for arch, found in processors.items():
        driver = pretend_triton.Driver(arch)
        kernels._compiled.clear()
        with changed(_launch=as_on_a_gpu, _processors=lambda _, found=found: found):
            for rank, inputs, outputs in ((16, 3584, 18944), (64, 18944, 3584)):
                for rows in (3, 1200):
                    adapted(rank, inputs, outputs, rows)
            adapted(64, 3584, 18944, 1)
            kernels.widen(torch.empty(1, 75, 16), torch.empty(16, 3584), 1.0, torch.empty(75, 3584, dtype=BF16))
        for kernel in ("narrow", "widen", "summed"):
            print(f"{kernel} {arch} {max(shared for name, shared in driver.loaded if name == kernel) / 2**10}")


def launched() -> None:
    """What is launched with what was kept from earlier launches, and what Triton launches for the same arguments."""
    driver = pretend_triton.Driver()

    def twice(*given: Any) -> None:
        as_on_a_gpu(*given)
        kept, before = dict(kernels._compiled), len(driver.loaded)
        kernels._compiled.clear()
        as_on_a_gpu(*given)
        assert driver.launched[-1] == driver.launched[-2], driver.launched[-2:]
        assert len(driver.loaded) == before, "compiled again"
        kernels._compiled.update(kept)

    with changed(_launch=twice, _processors=lambda _: 8, TERMS=64):
        for rows in (16, 1, 1, 17, 32, 16, 3, 1, 33, 64, 4096, 16):
            adapted(4, 160, 70, rows)
        before = len(kernels._compiled)
        adapted(4, 160, 70, 16, torch.empty(16 * 160 + 1, dtype=BF16)[1:].view(16, 160))
        assert len(kernels._compiled) == before  # not for a place that is no multiple of 16
        adapted(4, 160, 70, 16, torch.empty(16, 170, dtype=BF16)[:, 8:168])
        assert len(kernels._compiled) > before
        kernels.narrow(torch.empty(1, 160, dtype=BF16).expand(17, 160), torch.empty(160, 1))
        inner, weight = torch.empty(2, 16, 4), torch.empty(4, 64)
        for kind in (BF16, torch.float16, torch.float32):  # of the same kernel, and a scale of 1
            for scale in (2.0, 1.0, 1.0):
                kernels.widen(inner, weight, scale, torch.empty(16, 64, dtype=kind))
                kernels.summed(inner[0], torch.empty(16, 64, dtype=kind), scale)
    made = len(driver.loaded)
    with changed(_launch=as_on_a_gpu, _kernels=None, _processors=lambda _: 8, TERMS=64):  # Triton is not asked again
        for rows in (33, 1, 16, 64, 3, 4096):
            driver.stream += 1  # the one of now
            adapted(4, 160, 70, rows)
            assert driver.launched[-1][3] == driver.stream
    assert len(driver.loaded) == made
    print("launches", len(driver.launched), "kernels", len(driver.loaded))


if __name__ == "__main__":
    {"numbers": numbers, "refused": refused, "compile": compile_all, "launched": launched}[sys.argv[1]]()
