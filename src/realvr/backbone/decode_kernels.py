"""Kernels of our own for one column per sequence, in Triton: attention over static keys and values, rotary embedding,
RMSNorm.

A recorded step (`small_kernels.recorded`) has to wait for its many small kernels. Attention of such a step is eleven
operations of torch per layer; here it is two kernels. The first cuts the columns of trunk and branches into pieces and
leaves each piece's softmax unnormalised; the second merges the pieces. New keys and values are read where they were
computed and written into the buffers on the way.

Triton comes with torch for CUDA. Where it is missing or does not compile, a notice is printed and torch's operations
are used. The same happens if a kernel is wrong: each is compared with its definition before its first use for a shape
on a device (`kernel_checks`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from realvr.backbone import kernel_checks, small_kernels
from realvr.backbone.notices import notice_once
from realvr.errors import out_of_memory

if TYPE_CHECKING:
    from realvr.backbone.static import KeysValues

BLOCK = 64
"""Most columns loaded per iteration."""
ROWS = 64
"""Most queries of one program."""
STAGES = 3
"""Blocks of columns in flight."""
PIECE = 128
"""Fewest columns of a piece."""
PIECES = 64
"""Most pieces, which one program merges."""
PROGRAMS = 2
"""Programs per multiprocessor, given enough columns."""
_SMALL = 160 * 2**10
"""Bytes of shared memory below which a program takes half as many queries."""
Found = TypeVar("Found")
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_broken: dict[tuple[object, ...], str] = {}
_compared: set[tuple[object, ...]] = set()
launched: Counter[str] = Counter()
"""How often each kernel was launched or recorded, by name."""


def takes(kernel: str, x: Tensor) -> bool:
    """Whether there is such a kernel for these numbers here and now: in a recorded step, without gradient."""
    wanted = small_kernels.in_recorded() and x.is_cuda and x.dtype in _TYPES and not torch.is_grad_enabled()
    if wanted and not _installed():
        notice_once("decoding kernels: there is no Triton; operations of torch are used instead")
        return False
    return wanted and _kind(kernel, x) not in _broken


def takes_heads(kernel: str, query: Tensor) -> bool:
    """The same for heads so wide; float32 takes twice the shared memory."""
    width = query.shape[-1]
    return takes(kernel, query) and 16 <= width <= 512 // query.element_size() and width & (width - 1) == 0


def tried(kernel: str, like: Sequence[Tensor], run: Callable[[], Found], gap: Callable[[], float]) -> Found | None:
    """The result of a kernel for tensors like these, the first of which `takes` has seen. ``gap``: how far the kernel
    is from its definition for such tensors, asked before it is first used. None where it does not compile or is wrong,
    with a notice: that is no reason to stop."""
    x = like[0]
    layout = (*_kind(kernel, x), *((each.shape, each.stride()) for each in like))
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if recording and layout not in _compared:  # nothing is computed now, and a step runs before it is recorded
        raise RuntimeError(f"decoding kernels: {kernel} is recorded without having run before")
    try:
        with torch.cuda.device_of(x):  # where Triton launches
            if layout not in _compared:
                if not (far := gap()) <= kernel_checks.tolerance(x.dtype):
                    _leave_out(kernel, x, f"computes something else on this machine: {far:.1e} apart")
                    return None
                _compared.add(layout)
            found = run()
    except Exception as error:  # compilers fail in many ways
        if recording or out_of_memory(error):  # which is no fault of the kernel
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        _leave_out(kernel, x, f"does not run on this machine ({why})")
        return None
    launched[kernel] += 1
    return found


def _leave_out(kernel: str, x: Tensor, why: str) -> None:
    _broken[_kind(kernel, x)] = why
    notice_once(f"decoding kernels: {kernel} {why}; operations of torch are used from now on")


def _kind(kernel: str, x: Tensor) -> tuple[object, ...]:
    return kernel, x.dtype, x.shape[-1], x.device


def why_not() -> str | None:
    """Why operations of torch are used instead, as far as that is known."""
    if not _installed():
        return "there is no Triton"
    return "; ".join(f"{kernel} {why}" for (kernel, *_), why in _broken.items()) or None


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _kernels() -> ModuleType:
    """Imported when they are needed: Triton takes its time."""
    from realvr.backbone import triton_kernels

    return triton_kernels


# ---------------------------------------------------------------------- attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trunk: KeysValues,
    branches: KeysValues | None,
    column: Tensor,
    bias_BT: Tensor,
    scaling: float,
) -> Tensor:
    """Attention output (B, N, H, d) of ``query`` (B, H, N, d), and the new ``key`` and ``value`` (B, H_kv, N, d)
    written at ``column``: of the trunk (B, H_kv, T, d), or with ``branches`` (B, H_kv, N, S, d) of each branch.
    ``bias_BT`` (B, T), with branches (B, T + S), is -inf where a column is hidden."""
    kernels = _kernels()
    batch, heads, group, width = query.shape
    kv_heads, length = trunk[0].shape[1:3]
    own = trunk if branches is None else branches  # where new keys and values go: N runs of so many columns
    size = own[0].shape[-2]
    rows, pairs = group * (heads // kv_heads), batch * kv_heads
    per, pieces = _pieces(length, 0 if branches is None else group * size, pairs, _processors(query.device))
    tile = max(16, min(_most_rows(query.device), _power(rows)))
    partial = query.new_empty(pairs, sum(pieces), rows, width, dtype=torch.float32)
    edges = query.new_empty(2, pairs, sum(pieces), rows, dtype=torch.float32)
    out = query.new_empty(batch, group, heads, width)
    kernels.pieces[(sum(pieces), pairs, -(-rows // tile))](
        *(query, key, value, *trunk, *own, bias_BT, column, partial, edges, edges[1]),
        *(scaling, length, size, per, pieces[0], kv_heads, rows),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], bias_BT.stride(0)),
        SHARE=heads // kv_heads,
        ROWS=tile,
        WIDTH=width,
        BLOCK=block_size(width, query.element_size()),
        BRANCHES=branches is not None,
        num_warps=4,
        num_stages=STAGES,
    )
    kernels.merge[(rows, pairs)](
        *(partial, edges, edges[1], out, sum(pieces), kv_heads, rows, group),
        SHARE=heads // kv_heads,
        WIDTH=width,
        PIECES=_power(sum(pieces)),
        num_warps=4,
    )
    return out


def lies_well(
    query: Tensor, key: Tensor, value: Tensor, trunk: KeysValues, branches: KeysValues | None, bias_BT: Tensor
) -> bool:
    """Whether `attend` can read these: numbers of one type, heads of one width, rows without gaps."""
    buffers, new = (*trunk, *(branches or ())), (query, key, value)
    return (
        all(x.dtype == query.dtype and x.shape[-1] == query.shape[-1] for x in (*buffers, *new))
        and all(x.is_contiguous() for x in buffers)
        and all(x.stride(-1) == 1 for x in (*new, bias_BT))
    )


def block_size(width: int, bytes_each: int) -> int:
    """Columns loaded per iteration: there is shared memory for so many."""
    return max(16, min(BLOCK, 2**14 // (width * bytes_each)))


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _pieces(length: int, own: int, pairs: int, processors: int) -> tuple[int, tuple[int, int]]:
    """Columns of a piece, and pieces of the trunk and of the branches."""
    wanted = min(PIECES - 2, max(1, -(-PROGRAMS * processors // pairs)))  # both parts may have one that is not full
    per = max(PIECE, BLOCK * math.ceil((length + own) / wanted / BLOCK))
    return per, (-(-length // per), -(-own // per))


@cache
def _most_rows(device: torch.device) -> int:
    if device.type != "cuda":
        return ROWS
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return ROWS if shared >= _SMALL else ROWS // 2


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ---------------------------------------------------------------------- rotary embedding


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, H, d) queries and (B, T, H_kv, d) keys, turned by (B or 1, T, d); in float32 inside."""
    batch, length, heads, width = query.shape
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in (query.flatten(0, 1), key.flatten(0, 1))]
    turns = [x.expand(batch, length, width).reshape(-1, width).contiguous() for x in (cos, sin)]
    out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    strides = [stride for x in given for stride in x.stride()[:2]]
    _kernels().turn[(len(given[0]), heads + key.shape[2])](
        *(*given, *turns, *out, *strides, heads, key.shape[2]), WIDTH=width, num_warps=1
    )
    return out[0].view(query.shape), out[1].view(key.shape)


# ---------------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: bool) -> Tensor:
    """``weight * x / rms(x)``, or ``(1 + weight) * …``, in float32 inside."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = flat.new_empty(flat.shape)
    block = _power(width)
    _kernels().norm[(len(flat),)](
        *(flat, weight, out, flat.stride(0), width, epsilon),
        OFFSET=offset,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return out.view(x.shape)
