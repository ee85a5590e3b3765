"""Attention inside each example of packed rows, against a loop over examples and matrices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from realvr.backbone import packed_attention
from realvr.backbone.packed_attention import Packed, attend_packed

HEADS, KV_HEADS, WIDTH = 4, 2, 16
ROWS = ((7, 1, 30, 5), (9, 3), (40, 3))  # lengths of the examples of each row: all levels of length, padding behind two
COLUMNS = max(map(sum, ROWS))
MODULE = cast(nn.Module, SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True))


def segments() -> Tensor:
    """(R, T): examples numbered over all rows, -2 for padding."""
    found, number = torch.full((len(ROWS), COLUMNS), -2), 0
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            found[row, start : start + length] = number
            start, number = start + length, number + 1
    return found


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(ROWS), heads, COLUMNS, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """(T, H, d) of one causal sequence (T, H, d), head by head, query by query."""
    group = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for head in range(query.shape[1]):
        k, v = key[:, head // group], value[:, head // group]
        rows = [(k[: t + 1] @ query[t, head] * scale).softmax(0) @ v[: t + 1] for t in range(len(query))]
        out = torch.cat([out[:, :head], torch.stack(rows)[:, None], out[:, head + 1 :]], dim=1)
    return out


def every_sequence(query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float) -> Tensor:
    parts = zip(ends[:-1], ends[1:], strict=True)
    return torch.cat([by_hand(query[a:b], key[a:b], value[a:b], scale) for a, b in parts])


def right(scale: float) -> tuple[Tensor, list[Tensor]]:
    """Output at the real columns, and the gradients of a weighted sum of them."""
    given, real = inputs(), segments() >= 0
    out = torch.zeros(len(ROWS), COLUMNS, HEADS, WIDTH, dtype=torch.float64)
    flat = [x.transpose(1, 2) for x in given]
    for row, lengths in enumerate(ROWS):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        part = every_sequence(*(x[row, : ends[-1]] for x in flat), ends, scale)
        out = torch.cat([out[:row], torch.cat([part, out[row, ends[-1] :]])[None], out[row + 1 :]])
    return out[real], list(torch.autograd.grad(weighted(out[real]), given))


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def check(scale: float) -> None:
    given = inputs()
    out = attend_packed(MODULE, *given, Packed.build(segments()), scale)
    assert out.shape == (len(ROWS), COLUMNS, HEADS, WIDTH)
    assert bool(out.isfinite().all()), "padding must not poison products with a gradient of zero"
    expected, gradients = right(scale)
    found = out[segments() >= 0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, theirs in zip(torch.autograd.grad(weighted(found), given), gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)


def test_examples_are_independent_causal_sequences() -> None:
    check(scale=0.3)


def releases() -> dict[str, Callable[..., Tensor]]:
    """``varlen_attn`` as releases of torch declare it."""

    def first(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        is_causal: bool = False, return_aux: Any = None,
    ) -> Tensor:  # fmt: skip
        assert is_causal and cu_seq_k is cu_seq_q and query.shape[1] == key.shape[1]
        assert max_q == max_k == int(cu_seq_q.diff().max()) and cu_seq_q.dtype == torch.int32
        return every_sequence(query, key, value, cu_seq_q.tolist(), query.shape[-1] ** -0.5)

    def later(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0) and (enable_gqa or query.shape[1] == key.shape[1])
        return every_sequence(query, key, value, cu_seq_q.tolist(), scale or query.shape[-1] ** -0.5)

    return {"first": first, "later": later}


@pytest.mark.parametrize("release", ["first", "later"])
def test_variable_length_function_of_torch(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the release calls things, its function gets the examples, the scale and grouped heads right."""
    function = releases()[release]
    names = frozenset(inspect.signature(function).parameters)
    monkeypatch.setattr(packed_attention, "_varlen", lambda: (function, names))
    monkeypatch.setattr(packed_attention, "has_varlen", lambda query: True)
    check(scale=0.3)


def test_declared_parameters_of_the_installed_torch() -> None:
    """The real function has what we name; whether it runs is for a GPU to show."""
    found = packed_attention._varlen()
    if found is None:
        pytest.skip("this torch has no variable-length attention")
    assert found[1] >= {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"}
    assert found[1] & {"window_size", "is_causal"}


@pytest.mark.parametrize(
    "segment", [torch.tensor([[0, 1, 0]]), torch.tensor([[-1, 0, 0]])], ids=["in two pieces", "with a trunk"]
)
def test_what_is_no_packed_row_is_refused(segment: Tensor) -> None:
    with pytest.raises(ValueError, match="in one piece"):
        Packed.build(segment)
