"""Gradients of a trunk's keys and values, made for all steps of a span together, against a softmax written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from realvr.backbone.attention import joined
from realvr.backbone.span_attention import Trunk, attend_span
from realvr.backbone.trunk_gradients import LaterGradients, Queries, multiplied

ROWS, HEADS, SHARED, WIDTH, LENGTH, STEPS = 2, 6, 2, 8, 23, 4
"""Three heads of queries for one of keys and values."""
SCALING = 0.3


def noise(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """(B, T, H, d) of queries that see the columns ``seen`` (B, 1, T, C); keys and values repeated for every head."""
    key, value = (x.repeat_interleave(HEADS // SHARED, dim=1) for x in (key, value))
    scores = (query @ key.mT * SCALING).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def visible(padded: bool) -> Tensor | None:
    """The second row begins with five columns of padding; both end with room that is not in use."""
    if not padded:
        return None
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[1, :5] = False
    real[:, -3:] = False
    return real


def passes() -> list[tuple[int, int]]:
    """First column and number of queries of each: single ones, and the last latent with its marker."""
    return [*((t, 1) for t in range(STEPS - 1)), (STEPS - 1, 2)]


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_all_steps(padded: bool, window: int | None) -> None:
    trunk = [noise(ROWS, SHARED, LENGTH, WIDTH, seed=i).requires_grad_() for i in (1, 2)]
    own = [noise(ROWS, SHARED, STEPS + 1, WIDTH, seed=i).requires_grad_() for i in (3, 4)]
    query = noise(ROWS, HEADS, STEPS + 1, WIDTH, seed=5).requires_grad_()
    back = noise(ROWS, STEPS + 1, HEADS, WIDTH, seed=6)
    real = visible(padded)
    place = torch.arange(LENGTH + STEPS + 1).expand(ROWS, -1)
    later = LaterGradients()
    stand = Trunk(LENGTH, STEPS + 1, real, later)
    found, right = [], []
    for first, count in passes():
        end = first + count
        runs = stand.runs(count, HEADS // SHARED, window, place[:, : LENGTH + end], torch.device("cpu"))
        pair = own[0][:, :, :end], own[1][:, :, :end]
        found.append(attend_span(query[:, :, first:end], (trunk[0], trunk[1]), pair, runs, SCALING))
        columns, rows = place[:, None, : LENGTH + end], place[:, LENGTH + first : LENGTH + end, None]
        seen = columns <= rows
        if window is not None:
            seen = seen & (columns > rows - window)
        if real is not None:
            behind = torch.ones(ROWS, end, dtype=torch.bool)
            seen = seen & torch.cat([real, behind], dim=1)[:, None]
        keys, values = (torch.cat([x, y], dim=2) for x, y in zip(trunk, pair, strict=True))
        right.append(softmax_attention(query[:, :, first:end], keys, values, seen[:, None]))
    ours, theirs = torch.cat(found, dim=1), torch.cat(right, dim=1)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    expected = torch.autograd.grad(theirs, [query, *own, *trunk], back)
    given = torch.autograd.grad(ours, [query, *own, *trunk], back, allow_unused=True)
    for one, other in zip(given[:3], expected[:3], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert given[3:] == (None, None)
    queries = later.of(trunk[0])
    assert queries is not None and later.of(trunk[1]) is None
    for made, other in zip(multiplied(queries, *trunk), expected[3:], strict=True):
        assert torch.allclose(made, other, rtol=0, atol=1e-12)
        if real is not None:
            assert not made[~real[:, None].expand(-1, SHARED, -1)].any()
    later.clear()
    assert later.of(trunk[0]) is None


def test_a_hidden_infinity_stays_where_it_is() -> None:
    """What padding holds is nobody's business; queries of some steps may see everything, and those of others not."""
    key, value = (noise(1, 1, 6, WIDTH, seed=i) for i in (1, 2))
    real = torch.tensor([[False, True, True, True, True, True]])
    rows = [noise(1, 1, 2, WIDTH, seed=i) for i in (3, 4, 5)]
    lse = noise(1, 1, 2, seed=6)
    later = LaterGradients()
    later.add(key, Queries(*rows, lse, real, SCALING))
    first = later.of(key)
    assert first is not None
    right = multiplied(first, key, value)
    spoiled = [x.clone() for x in (key, value)]
    for x in spoiled:
        x[:, :, 0] = torch.inf
    found = multiplied(first, *spoiled)
    assert all(map(torch.equal, found, right)) and not right[0][:, :, 0].any()
    later.add(key, Queries(*rows, lse, None, SCALING))
    both = later.of(key)
    assert both is not None and both.real is not None
    assert torch.equal(both.real, torch.stack([real, real, real | True, real | True], dim=1))


def test_sums_of_16_bit_gradients_are_rounded_once() -> None:
    """As close to float64 as a bfloat16 number can be, where eight gradients that are added up one by one are not."""
    trunk = [noise(1, 1, LENGTH, WIDTH, seed=i, dtype=torch.bfloat16) for i in (1, 2)]
    own = [noise(1, 1, 1, WIDTH, seed=i, dtype=torch.bfloat16) for i in (3, 4)]

    def gradients(dtype: torch.dtype, later: LaterGradients | None) -> tuple[Tensor, ...]:
        pair: Any = [x.to(dtype).requires_grad_() for x in trunk]
        outs = []
        for step in range(8):
            query = noise(1, 1, 1, WIDTH, seed=10 + step, dtype=torch.bfloat16).to(dtype)
            runs = Trunk(LENGTH, 1, None, later).runs(1, 1, None, None, torch.device("cpu"))
            outs.append(attend_span(query, (pair[0], pair[1]), (own[0].to(dtype), own[1].to(dtype)), runs, SCALING))
        back = [noise(1, 1, 1, WIDTH, seed=30 + step, dtype=torch.bfloat16).to(dtype) for step in range(8)]
        found = torch.autograd.grad(outs, pair, back, allow_unused=True)
        if later is None:
            return found
        queries = later.of(pair[0])
        assert queries is not None
        return multiplied(queries, *pair)

    right = gradients(torch.float64, None)
    for ours, plain, exact in zip(
        gradients(torch.bfloat16, LaterGradients()), gradients(torch.bfloat16, None), right, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        gaps = [float((x.double() - exact).norm() / exact.norm()) for x in (ours, plain)]
        assert gaps[0] < gaps[1] < 0.05


@pytest.mark.parametrize("lengths", [(7, 3), (2, 9, 1), (4, 4)])
def test_joined_pieces_have_gradients_of_their_own(lengths: tuple[int, ...]) -> None:
    """The numbers of `torch.cat`; what a short piece gets keeps no gradient of the long one alive."""
    pieces = tuple((noise(1, 2, n, 4, seed=n), noise(1, 2, n, 4, seed=n + 50)) for n in lengths)
    leaves = [x.requires_grad_() for pair in pieces for x in pair]
    keys, values = joined(pieces)
    assert torch.equal(keys, torch.cat([k for k, _ in pieces], dim=2))
    back = noise(*keys.shape, seed=1), noise(*keys.shape, seed=2)
    found = torch.autograd.grad((keys, values), leaves, back)
    again = [torch.cat([pair[i] for pair in pieces], dim=2) for i in (0, 1)]
    assert all(map(torch.equal, found, torch.autograd.grad(again, leaves, back)))
    for grad in found:
        if grad.shape[2] < max(lengths):
            assert grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    assert torch.autograd.gradgradcheck(lambda *given: joined(tuple((x, x) for x in given))[0], leaves[::2])
