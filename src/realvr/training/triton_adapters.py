"""The code that Triton compiles for `realvr.training.adapter_kernels`: imported where Triton is.

Tensors are pointers here, and what has no annotation is one of them or a number. Letters: N rows, C columns of a wide
matrix, R rank. Wide matrices have 16 bits (the format of ``x``), adapters and what is as narrow as the rank 32.

``WIDE`` is for Triton's interpreter, which cannot multiply bfloat16 numbers: they become 32-bit ones.

A 32-bit factor beside a bfloat16 one is cut into three bfloat16 ones, which together have all its digits: three
products on matrix units, added up in 32 bits, are as exact as one in 32 bits.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def times(narrow, wide, total):
    """``total + narrow @ wide``; one of them has 32 bits, the other 16 or, in the interpreter, 32 too."""
    if narrow.dtype == wide.dtype:
        return tl.dot(narrow, wide, total, input_precision="ieee")
    if narrow.dtype == tl.float32:
        high = narrow.to(wide.dtype)
        rest = narrow - high.to(tl.float32)
        middle = rest.to(wide.dtype)
        low = (rest - middle.to(tl.float32)).to(wide.dtype)
        return tl.dot(high, wide, tl.dot(middle, wide, tl.dot(low, wide, total)))
    high = wide.to(narrow.dtype)
    rest = wide - high.to(tl.float32)
    middle = rest.to(narrow.dtype)
    low = (rest - middle.to(tl.float32)).to(narrow.dtype)
    return tl.dot(narrow, high, tl.dot(narrow, middle, tl.dot(narrow, low, total)))


@triton.jit
def narrow(
    x,
    weight,
    out,
    rows,
    columns,
    rank,
    per,
    scale,
    x_n,
    weight_c,
    weight_r,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """(N, C) by (C, R): ``per`` columns of some rows, one of several parts of the sum."""
    tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, r = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    there, ranked = (row < rows)[:, None], (r < rank)[None, :]
    total = tl.zeros([ROWS, RANK], tl.float32)
    start = part * per
    limit = tl.minimum(start + per, columns)
    for first in range(start, limit, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        inside = c < limit
        left = tl.load(x + row[:, None] * x_n + c[None, :], mask=there & inside[None, :], other=0.0)
        left = left.to(tl.float32) if WIDE else left
        place = weight + c[:, None] * weight_c + r[None, :] * weight_r
        total = times(left, tl.load(place, mask=inside[:, None] & ranked, other=0.0), total)
    place = out + (part * rows + row)[:, None] * rank + r[None, :]
    tl.store(place, total * scale, mask=there & ranked)


@triton.jit
def widen(
    inner,
    weight,
    out,
    whole,
    rows,
    columns,
    rank,
    parts,
    scale,
    weight_r,
    weight_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """(N, R) by (R, C), added to what is in ``out``: some rows and columns. The ``parts`` of the first factor, at most
    ``PARTS``, are added up on the way; their sum goes to ``whole``."""
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, r = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    c = block * COLUMNS + tl.arange(0, COLUMNS)
    there, ranked, inside = (row < rows)[:, None], (r < rank)[None, :], c < columns
    at = row[:, None] * rank + r[None, :]
    left = tl.load(inner + at, mask=there & ranked, other=0.0)
    for part in tl.static_range(1, PARTS):
        place = part * rows * rank + at
        left += tl.load(inner + place, mask=there & ranked & (place < parts * rows * rank), other=0.0)
    if KEEP:  # noqa: SIM102 (known when it is compiled)
        if block == 0:
            tl.store(whole + at, left, mask=there & ranked)
    place = weight + r[:, None] * weight_r + c[None, :] * weight_c
    right = tl.load(place, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
    found = tl.dot(left, right, input_precision="tf32x3") * scale
    into = row[:, None] * columns + c[None, :]
    found += tl.load(out + into, mask=there & inside[None, :], other=0.0).to(tl.float32)
    tl.store(out + into, found.to(out.dtype.element_ty), mask=there & inside[None, :])


@triton.jit
def summed(
    inner,
    x,
    out,
    rows,
    columns,
    rank,
    per,
    scale,
    x_n,
    out_r,
    out_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """(N, R) transposed by (N, C): a sum over ``per`` rows, for some columns, one of several parts."""
    block, part = tl.program_id(0), tl.program_id(1)
    c, r = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside, ranked = (c < columns)[None, :], (r < rank)[:, None]
    total = tl.zeros([RANK, COLUMNS], tl.float32)
    start = part.to(tl.int64) * per
    limit = tl.minimum(start + per, rows)
    for first in range(start, limit, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < limit
        left = tl.load(inner + row[None, :] * rank + r[:, None], mask=there[None, :] & ranked, other=0.0)
        right = tl.load(x + row[:, None] * x_n + c[None, :], mask=there[:, None] & inside, other=0.0)
        right = right.to(tl.float32) if WIDE else right
        total = times(left, right, total)
    place = out + part * rank * columns + r[:, None] * out_r + c[None, :] * out_c
    tl.store(place, total * scale, mask=inside & ranked)
