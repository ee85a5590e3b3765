"""Triton without a GPU: its interpreter with the roundings of a GPU, and a driver for which it compiles kernels that
are never run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

SHARED = {80: 163, 86: 99, 90: 227}
"""KiB on the chip for one program: of an A100, an RTX 3090, an H200."""


def round_as_a_gpu(change: Callable[[np.ndarray, str], np.ndarray] = lambda x, _: x) -> None:
    """Numbers become bfloat16 by rounding, where the interpreter cuts them off, and bfloat16 numbers are multiplied in
    32 bits, which it cannot. ``change`` sees each factor (with the wanted precision) and each sum ("sum")."""
    cast = InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, kind)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    def dot(self: Any, a: Any, b: Any, total: Any, precision: Any, _: Any) -> Any:
        factors = [change(_wide(x), str(precision).rpartition(".")[2]) for x in (a, b)]
        return TensorHandle(change(np.matmul(*factors) + total.data, "sum"), total.dtype.scalar)

    InterpreterBuilder.create_fp_trunc = InterpreterBuilder.cast_impl = rounded
    InterpreterBuilder.create_dot = dot


def _wide(x: Any) -> np.ndarray:
    if x.dtype.scalar != tl.bfloat16:
        return x.data.astype(np.float32)
    return (x.data.astype(np.uint32) << 16).view(np.float32)


class Driver:
    """Each architecture is a device of its own. ``launched``: kernel, function, grid, stream and arguments of every
    launch; ``loaded``: name and shared memory of every kernel that was compiled."""

    def __init__(self, arch: int = 90) -> None:
        self.arch, self.stream = arch, 7
        self.launched: list[tuple[Any, ...]] = []
        self.loaded: list[tuple[str, int]] = []
        self._functions = count(100)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED[device] * 2**10},
            load_binary=self._load,
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: Launcher(self, source)
        triton.runtime.driver.set_active(self)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_stream(self, device: int) -> int:
        assert device == self.arch
        return self.stream

    def _load(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert kernel and device == self.arch
        self.loaded.append((name, shared))
        return 1, next(self._functions), 0, 0, 1024


class Launcher:
    """Takes arguments as that of Triton does, by their number, order and types, and holds them against what the kernel
    was compiled for: a number of 1, multiples of 16, aligned tensors."""

    def __init__(self, driver: Driver, source: Any) -> None:
        self.driver, self.source = driver, source

    def __call__(self, *given: Any) -> None:
        *grid, stream, function, _, _, _, _ = given[:9]
        args, source = given[9:], self.source
        assert len(grid) == 3 and all(isinstance(size, int) and size > 0 for size in grid)
        assert len(args) == len(source.signature)
        for place, (arg, (name, kind)) in enumerate(zip(args, source.signature.items(), strict=True)):
            aligned = ["tt.divisibility", 16] in source.attrs.get((place,), [])
            if kind == "constexpr":
                # Arguments that are part of the kernel are not handed on.
                right = arg == source.constants[(place,)]
            elif kind[0] == "*":
                kinds = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
                right = kinds[kind] == arg.dtype and not (aligned and arg.data_ptr() % 16)
            elif kind == "i32":
                right = type(arg) is int and -(2**31) <= arg < 2**31 and not (aligned and arg % 16)
            else:
                right = kind == "fp32" and type(arg) is float
            assert right, f"{source.fn.__name__}: {name} = {arg!r}, compiled for {kind}"
        values = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        self.driver.launched.append((source.fn.__name__, function, tuple(grid), stream, values))
