"""Whether flash attention computes on this device what attention in parts and inside packed examples asks of it.

Both call operators that differ between releases of torch and between GPUs. Before their first use for a number format
and head width on a device, output and gradients are compared with their definition in float64, on random numbers. Where
they differ, or an operator fails, they are not used, and a notice says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from realvr.backbone.noise import Noise, worst
from realvr.backbone.notices import notice_once
from realvr.errors import out_of_memory

ROWS, HEADS, KV_HEADS = 2, 4, 2
"""Rows, heads, and heads of keys and values that are tried."""
TRUNK, BRANCHES, SIZE = 1100, 3, 5
"""Columns of a trunk, enough to be shared out among multiprocessors; branches behind it, and their columns."""
LENGTHS = (70, 1, 140)
"""Of packed sequences."""
TOLERANCE = 0.05
"""Largest distance of a tensor from its definition, relative to its length, in 16 bits. Rounding is several times
smaller; an operator that means something else by its arguments is around 1."""

Attend = Callable[..., Tensor]


def merges(query: Tensor) -> bool:
    """Whether attention to a trunk and to columns behind it can be merged, for queries like this."""
    return _agrees("split attention", _merged_gap, query.device, query.dtype, query.shape[-1])


def packs(query: Tensor) -> bool:
    """Whether sequences that lie one behind the other can be attended in one kernel, for queries like this."""
    return _agrees("variable-length attention", _packed_gap, query.device, query.dtype, query.shape[-1])


@cache
def _agrees(
    title: str, gap: Callable[[Noise, torch.dtype, int], float], device: torch.device, dtype: torch.dtype, width: int
) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # nothing is computed now
        raise RuntimeError(f"{title} is recorded without having run before")
    try:
        with _apart(device):
            far = gap(Noise(device), dtype, width)
        if far <= TOLERANCE:
            return True
        why = f"computes something else on this machine: {far:.1e} apart"
    except Exception as error:  # operators change in many ways
        if out_of_memory(error):  # which is no fault of theirs
            raise
        why = f"does not run on this machine ({type(error).__name__}: {' '.join(str(error).split())})"[:300]
    notice_once(f"{title}: flash attention {why}; it is not used")
    return False


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """With gradient, and without the caller's modes. A layer under gradient checkpointing would count what is saved for
    the gradients here as its own, and miss it when it is recomputed: hence hooks that change nothing."""
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        saved_tensors_hooks(lambda x: x.detach(), lambda x: x) if allowed else nullcontext(),
    ):
        yield


# ---------------------------------------------------------------------- what is compared


def _merged_gap(noise: Noise, dtype: torch.dtype, width: int) -> float:
    """Of branches, and of the last two columns of a span, behind a trunk that is seen whole or in part."""
    from realvr.backbone.span_attention import Run, attend_span
    from realvr.backbone.split_attention import Split, attend_split

    def branches(real: Tensor | None, *given: Tensor) -> Tensor:
        query, *trunk, key, value = given
        split = Split(TRUNK, BRANCHES, SIZE, real)
        return attend_split(query, (trunk[0], trunk[1]), (key, value), split, width**-0.5)[0]

    def steps(real: Tensor | None, *given: Tensor) -> Tensor:
        query, *trunk, key, value = given
        runs = [Run(TRUNK, 1, HEADS // KV_HEADS, real)] * query.shape[2]
        return attend_span(query, (trunk[0], trunk[1]), (key, value), runs, width**-0.5)

    column = torch.arange(TRUNK, device=noise.device)
    run = torch.stack([column >= 0, column >= TRUNK // 3])
    number = torch.arange(BRANCHES * SIZE, device=noise.device)
    causal = number[:, None] >= number
    of_branch = causal & (number[:, None] // SIZE == number // SIZE)
    gaps = []
    for attend, own_QT, ends in ((branches, of_branch, TRUNK), (steps, causal[SIZE - 2 : SIZE, :SIZE], TRUNK - 7)):
        new, behind = own_QT.shape
        sizes = [(HEADS, new), *[(KV_HEADS, TRUNK)] * 2, *[(KV_HEADS, behind)] * 2]
        for real in (None, run & (column < ends)):
            given = [noise.normal(ROWS, *size, width, dtype=dtype) for size in sizes]
            seen = torch.ones_like(run) if real is None else real
            mask = torch.cat([seen[:, None].expand(-1, new, -1), own_QT.expand(ROWS, -1, -1)], dim=-1)
            gaps.append(_gap(partial(attend, real), partial(_joined, mask), given, noise))
    return worst(gaps)


def _joined(mask_BQT: Tensor, query: Tensor, *kv: Tensor) -> Tensor:
    key, value = torch.cat(kv[::2], dim=2), torch.cat(kv[1::2], dim=2)
    return _masked(query, key, value, mask_BQT).transpose(1, 2)


def _packed_gap(noise: Noise, dtype: torch.dtype, width: int) -> float:
    """Of sequences of several lengths, causal or not."""
    from realvr.backbone.packed_attention import attend_varlen

    ends = torch.tensor([0, *LENGTHS], device=noise.device).cumsum(0, dtype=torch.int32)

    def sequences(causal: bool, *given: Tensor) -> Tensor:
        query, key, value = given
        return attend_varlen(query, key, value, ends, max(LENGTHS), width**-0.5, causal)

    def one_by_one(causal: bool, *given: Tensor) -> Tensor:
        found = []
        for start, end in pairwise(ends.tolist()):
            query, key, value = (x[None, start:end].transpose(1, 2) for x in given)
            mask = torch.ones(1, end - start, end - start, dtype=torch.bool, device=noise.device)
            found.append(_masked(query, key, value, mask.tril() if causal else mask)[0].transpose(0, 1))
        return torch.cat(found)

    gaps = []
    for causal in (True, False):
        given = [noise.normal(sum(LENGTHS), heads, width, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        gaps.append(_gap(partial(sequences, causal), partial(one_by_one, causal), given, noise))
    return worst(gaps)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask_BQT: Tensor) -> Tensor:
    """The definition, for (B, H, Q, d) queries."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask_BQT[:, None], float("-inf")).softmax(-1) @ value


def _gap(attend: Attend, definition: Attend, given: Sequence[Tensor], noise: Noise) -> float:
    """Largest distance of the output or of a gradient."""
    exact = [x.double().requires_grad_() for x in given]
    mine = [x.requires_grad_() for x in given]
    outs = attend(*mine), definition(*exact)
    grad = noise.like(outs[0].detach())
    found = outs[0], *torch.autograd.grad(outs[0], mine, grad)
    right = outs[1], *torch.autograd.grad(outs[1], exact, grad.double())
    with torch.no_grad():
        return worst([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)])
