"""The code that Triton compiles for `realvr.backbone.decode_kernels`: imported where Triton is.

Tensors are pointers here, and what has no annotation is one of them or a number.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def pieces(
    query,
    key,
    value,
    trunk_k,
    trunk_v,
    own_k,
    own_v,
    bias,
    column,
    partial,
    largest,
    total,
    scaling,
    length,
    size,
    per,
    trunk_pieces,
    kv_heads,
    rows,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    bias_b,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCHES: tl.constexpr,
) -> None:
    """One piece of columns, one K/V head of one prompt, some rows: query heads that share the K/V head, of all
    branches. What is not finite in the values of one branch reaches the other branches of its prompt: their weight of 0
    is multiplied by it."""
    piece, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // kv_heads, pair % kv_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    branch, head = row // SHARE, kv_head * SHARE + row % SHARE
    wide = tl.arange(0, WIDTH)
    there = (row < rows)[:, None]
    place = batch * query_b + head * query_h + branch * query_n
    q = tl.load(query + place[:, None] + wide[None, :], mask=there, other=0.0)
    written = tl.load(column)
    key += batch * key_b + kv_head * key_h
    value += batch * value_b + kv_head * value_h
    bias += batch * bias_b
    top = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    on_trunk = piece < trunk_pieces
    group = tl.cdiv(rows, SHARE)
    if on_trunk:
        start, limit, each, before = piece * per, length, length, 0
        keys, values = trunk_k + pair * length * WIDTH, trunk_v + pair * length * WIDTH
    else:
        start, limit, each, before = (piece - trunk_pieces) * per, group * size, size, length
        keys, values = own_k + pair * group * size * WIDTH, own_v + pair * group * size * WIDTH
    limit = tl.minimum(start + per, limit)
    for first in range(start, limit, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < limit
        at = col[:, None] * WIDTH + wide[None, :]
        whose = col // each
        index = col - whose * each
        # Not the new column, which the first piece writes meanwhile; of branches nothing behind it either.
        before_it, beside_it = inside & (index < written), inside & (index != written)
        inside = tl.where(on_trunk, inside, before_it) if BRANCHES else beside_it
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        hidden = tl.load(bias + before + index, mask=inside, other=float("-inf"))
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling + hidden[None, :]
        if BRANCHES:
            score = tl.where(on_trunk | (branch[:, None] == whose[None, :]), score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        summed = summed * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    if piece == 0:  # the new column, which each row sees, of its own branch
        k = tl.load(key + branch[:, None] * key_n + wide[None, :], mask=there, other=0.0)
        v = tl.load(value + branch[:, None] * value_n + wide[None, :], mask=there, other=0.0)
        into = (pair * group + branch) * size + written
        first_row = there & (row % SHARE == 0)[:, None]
        tl.store(own_k + into[:, None] * WIDTH + wide[None, :], k, mask=first_row)
        tl.store(own_v + into[:, None] * WIDTH + wide[None, :], v, mask=first_row)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scaling
        higher = tl.maximum(top, score)
        weight, shrink = tl.exp(score - higher), tl.exp(top - higher)
        summed = summed * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)
        top = higher
    slot = (pair * tl.num_programs(0) + piece) * rows + row
    tl.store(partial + slot[:, None] * WIDTH + wide[None, :], acc, mask=there)
    tl.store(largest + slot, top, mask=row < rows)
    tl.store(total + slot, summed, mask=row < rows)


@triton.jit
def merge(
    partial,
    largest,
    total,
    out,
    count,
    kv_heads,
    rows,
    group,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """The pieces of one row."""
    row, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = tl.arange(0, PIECES)
    there = piece < count
    slot = (pair * count + piece) * rows + row
    top = tl.load(largest + slot, mask=there, other=float("-inf"))
    share = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(share * tl.load(total + slot, mask=there, other=0.0), 0)
    wide = tl.arange(0, WIDTH)
    part = tl.load(partial + slot[:, None] * WIDTH + wide[None, :], mask=there[:, None], other=0.0)
    found = tl.sum(part * share[:, None], 0) / whole
    batch, kv_head = pair // kv_heads, pair % kv_heads
    branch, head = row // SHARE, kv_head * SHARE + row % SHARE
    place = ((batch * group + branch) * kv_heads * SHARE + head) * WIDTH
    tl.store(out + place + wide, found.to(out.dtype.element_ty))


@triton.jit
def norm(x, weight, out, stride, width, epsilon, OFFSET: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    numbers = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        scale += 1.0
    root = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
    tl.store(out + row * width + at, (numbers * root * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def turn(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_n,
    query_h,
    key_n,
    key_h,
    heads,
    kv_heads,
    WIDTH: tl.constexpr,
) -> None:
    """One head of one column."""
    column, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    across = (at + WIDTH // 2) % WIDTH
    c = tl.load(cos + column * WIDTH + at).to(tl.float32)
    s = tl.load(sin + column * WIDTH + at).to(tl.float32)
    s = tl.where(at < WIDTH // 2, -s, s)
    if head < heads:
        place = query + column * query_n + head * query_h
        found = tl.load(place + at).to(tl.float32) * c + tl.load(place + across).to(tl.float32) * s
        tl.store(query_out + (column * heads + head) * WIDTH + at, found.to(query_out.dtype.element_ty))
    else:
        head -= heads
        place = key + column * key_n + head * key_h
        found = tl.load(place + at).to(tl.float32) * c + tl.load(place + across).to(tl.float32) * s
        tl.store(key_out + (column * kv_heads + head) * WIDTH + at, found.to(key_out.dtype.element_ty))
