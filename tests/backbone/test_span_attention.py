"""Attention of latent steps to a trunk and to their own span, merged, against one dense softmax over both."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_flash import Gpu, OnGpu
from realvr.backbone import flash_checks, packed_attention, split_attention
from realvr.backbone.attention import Columns, Pass, Probe
from realvr.backbone.notices import notice_once
from realvr.backbone.span_attention import Run, Trunk, attend_span

ROWS, HEADS, KV_HEADS, WIDTH, SCALE, TRUNK = 3, 4, 2, 8, 0.4, 11


def between(before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """(B, TRUNK): all columns of each row but some on either side."""
    column, first, unused = torch.arange(TRUNK), torch.tensor(before)[:, None], torch.tensor(after)[:, None]
    return (column >= first) & (column < TRUNK - unused)


VISIBLE = {
    "all": None,
    "padding first": between((5, 0, 2), (0, 0, 0)),
    "unused last": between((0, 0, 0), (0, 4, 3)),
    "both": between((5, 0, 2), (0, 4, 3)),
    "one column each": between((0, 10, 6), (10, 0, 4)),
}
STEPS = {"first": (1, 1), "later": (1, 4), "last two": (2, 5)}  # queries, columns of the span up to them
EVERY = pytest.mark.parametrize("visible", VISIBLE)
STEP = pytest.mark.parametrize("step", STEPS)


def inputs(step: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value of the trunk, key and value of the span. Layers make them with heads behind columns."""
    generator, (queries, own) = torch.Generator().manual_seed(0), STEPS[step]
    sizes = ((queries, HEADS), (TRUNK, KV_HEADS), (TRUNK, KV_HEADS), (own, KV_HEADS), (own, KV_HEADS))
    made = [torch.randn(ROWS, *size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [(x * 1.5).to(dtype).transpose(1, 2).requires_grad_() for x in made]


def places(visible: Tensor | None, own: int) -> Tensor:
    """Of all columns in their own sequences; those of unused columns mean nothing."""
    seen = torch.ones(ROWS, TRUNK, dtype=torch.bool) if visible is None else visible
    place = (seen.long().cumsum(-1) - 1).masked_fill(~seen, 1000)
    return torch.cat([place, seen.sum(-1, keepdim=True) + torch.arange(own)], dim=1)


def split_way(visible: str, step: str, given: list[Tensor], window: int | None = None) -> Tensor:
    query, trunk_key, trunk_value, key, value = given
    queries, own = STEPS[step]
    real = VISIBLE[visible]
    real = None if real is None else real.to(query.device)
    place = places(VISIBLE[visible], own).to(query.device)
    runs = Trunk(TRUNK, 6, real).runs(queries, HEADS // KV_HEADS, window, place, query.device)
    return attend_span(query, (trunk_key, trunk_value), (key, value), runs, SCALE)


def dense_way(visible: str, step: str, given: list[Tensor], window: int | None = None) -> Tensor:
    """One query of one row and head at a time, over the columns that it sees."""
    query, trunk_key, trunk_value, key, value = given
    (queries, own), seen = STEPS[step], VISIBLE[visible]
    found = []
    for row in range(ROWS):
        columns = list(range(TRUNK)) if seen is None else seen[row].nonzero()[:, 0].tolist()
        for i in range(queries):
            mine = own - queries + i + 1
            near = columns if window is None else columns[max(len(columns) + mine - window, 0) :]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                keys = torch.cat([trunk_key[row, kv, near], key[row, kv, :mine]])
                values = torch.cat([trunk_value[row, kv, near], value[row, kv, :mine]])
                found.append((keys @ query[row, head, i] * SCALE).softmax(-1) @ values)
    return torch.stack(found).view(ROWS, queries, HEADS, WIDTH)


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def gaps(visible: str, step: str, window: int | None = None) -> list[float]:
    """Largest differences of the output and of the gradient by each input; what is hidden has none at all."""
    given = inputs(step)
    found, right = split_way(visible, step, given, window), dense_way(visible, step, given, window)
    assert found.shape == right.shape and found.is_contiguous()
    mine, theirs = (torch.autograd.grad(weighted(out), given) for out in (found, right))
    assert min(float(grad.abs().max()) for grad in theirs) > 1e-4
    for grad, exact in zip(mine[1:3], theirs[1:3], strict=True):
        assert bool((grad[exact == 0] == 0).all())
    return [float((a - b).detach().abs().max()) for a, b in zip((found, *mine), (right, *theirs), strict=True)]


@STEP
@EVERY
def test_equals_one_softmax(visible: str, step: str) -> None:
    assert max(gaps(visible, step)) <= 1e-12


@STEP
@pytest.mark.parametrize("visible", ["all", "both"])
@pytest.mark.parametrize("window", [7, 9])
def test_sliding_windows(visible: str, step: str, window: int) -> None:
    """Of the two last columns each sees another part of the trunk."""
    assert max(gaps(visible, step, window)) <= 1e-12
    given = inputs(step)
    hides = (dense_way("all", step, given, window) - dense_way("all", step, given)).detach().abs()
    assert float(hides.amax((0, 2, 3)).min()) > 1e-2


@pytest.mark.parametrize("step", ["later", "last two"])
def test_gradients_by_finite_differences(step: str) -> None:
    assert torch.autograd.gradcheck(lambda *given: split_way("both", step, list(given)), inputs(step))


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_wrong_log_sum_exp_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    names = [f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
    stock = {name: getattr(aten, name) for name in names}

    def forward(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = stock[names[0]](*args, **options)
        return out, lse + 0.1 * (args[1].shape[2] == TRUNK)

    def backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return stock[names[1]](*args[:5], args[5] + 0.1, *args[6:], **options)

    changed = stock | ({names[0]: forward} if wrong == "forward" else {names[1]: backward})
    monkeypatch.setattr(split_attention, "aten", SimpleNamespace(**changed))
    found = gaps("both", "later")
    assert max(found[1:]) > 1e-3 and (found[0] > 1e-3) == (wrong == "forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@STEP
def test_narrow_numbers(step: str, dtype: torch.dtype) -> None:
    given = inputs(step, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    right, out = dense_way("both", step, exact), split_way("both", step, given)
    assert out.dtype == dtype
    pairs = zip(
        (out, *torch.autograd.grad(weighted(out.double()), given)),
        (right, *torch.autograd.grad(weighted(right), exact)),
        strict=True,
    )
    # The gradient by a single own key is a difference of nearly equal numbers.
    worst = max(float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    assert worst <= 10 * torch.finfo(dtype).eps


def test_what_is_hidden_does_not_matter() -> None:
    """However large it is, in the trunk of a recorded span as behind padding."""
    hidden = ~VISIBLE["both"]  # type: ignore[operator]
    found = []
    for filling in (0.0, 300.0):
        given = [x.detach().clone() for x in inputs("last two")]
        for x in given[1:3]:
            x.transpose(1, 2)[hidden] = filling
        given = [x.requires_grad_() for x in given]
        out = split_way("both", "last two", given)
        grads = torch.autograd.grad(weighted(out), given)
        assert all(float(grad.transpose(1, 2)[hidden].abs().max()) == 0 for grad in grads[1:3])
        found.append((out, *grads))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- what a GPU would be asked for


@STEP
@EVERY
def test_operators_of_a_gpu(visible: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what it is declared with: heads folded, three sequences of a row, what it wants back."""
    gpu = Gpu()
    monkeypatch.setattr(split_attention, "aten", gpu)
    monkeypatch.setattr(split_attention, "has_flash", lambda query: True)
    assert max(gaps(visible, step)) <= 1e-12
    assert gpu.called == [("dense" if VISIBLE[visible] is None else "sequences"), "dense"] * STEPS[step][0]


@EVERY
def test_the_installed_torch_declares_them_so(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operators take these arguments and return these shapes; whether they run is for a GPU to show."""
    monkeypatch.setattr(split_attention, "has_flash", lambda query: True)
    given = [x.detach().to("meta", torch.bfloat16).requires_grad_() for x in inputs("last two")]
    out = split_way(visible, "last two", given)
    assert out.shape == (ROWS, 2, HEADS, WIDTH)
    for grad, x in zip(torch.autograd.grad(out.sum(), given), given, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype


def test_sequences_of_a_row() -> None:
    ends_q, ends_k = Run(TRUNK, 1, 2, VISIBLE["both"]).ends
    assert ends_q.tolist() == [0, 0, 2, 2, 2, 4, 4, 4, 6, 6]
    assert ends_k.tolist() == [0, 5, 11, 11, 11, 18, 22, 24, 30, 33]
    assert ends_q.dtype == ends_k.dtype == torch.int32


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("why", "match"),
    [
        ("float32", "no flash attention"),
        ("old", "no flash attention"),
        ("window", "shorter than a span"),
        ("probe", "attention rows"),
    ],
)
def test_keys_and_values_are_joined_with_a_notice(why: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many layers and passes there are."""
    monkeypatch.setattr(packed_attention, "_recent", lambda device: why != "old")
    trunk, half = Trunk(8, span=6), OnGpu(torch.bfloat16)

    def ask() -> bool:
        if why == "probe":
            probe = Probe(columns=slice(2, 4))
            return Pass([], Columns(9), (probe,), trunk=trunk).runs(None, torch.zeros(1, 2, 1, 64)) is not None
        return trunk.takes(OnGpu(torch.float32) if why == "float32" else half, 6 if why == "window" else 7)  # type: ignore[arg-type]

    notice_once.cache_clear()
    with pytest.warns(UserWarning, match=match) as said:
        assert not ask() and not ask()
    assert len(said) == 1
    monkeypatch.setattr(packed_attention, "_recent", lambda device: True)
    monkeypatch.setattr(flash_checks, "merges", lambda query: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trunk.takes(half, 7) and trunk.takes(torch.zeros(1), None)  # type: ignore[arg-type]
