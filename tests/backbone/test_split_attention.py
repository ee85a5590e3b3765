"""Attention to a trunk and inside its branches, merged, against one softmax under the mask that it replaces."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_flash import Gpu, OnGpu
from realvr.backbone import flash_checks, packed_attention, split_attention
from realvr.backbone.attention import Columns, Pass, Probe
from realvr.backbone.notices import notice_once
from realvr.backbone.split_attention import Split, attend_split, weights_on

ROWS, HEADS, KV_HEADS, WIDTH, SCALE = 3, 4, 2, 8, 0.4
PADDING = (5, 0, 2)
CASES = {
    "branches": Split(11, 4, 5),
    "one branch": Split(11, 1, 6),
    "one column each": Split(11, 4, 1),
    "padded trunk": Split(11, 4, 5, torch.arange(11) >= torch.tensor(PADDING)[:, None]),
}
EVERY = pytest.mark.parametrize("case", CASES)


def inputs(split: Split, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value of the trunk, key and value of the branches. Layers make them with heads behind columns."""
    generator, new = torch.Generator().manual_seed(0), split.branches * split.size
    sizes = ((new, HEADS), (split.trunk, KV_HEADS), (split.trunk, KV_HEADS), (new, KV_HEADS), (new, KV_HEADS))
    made = [torch.randn(ROWS, *size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [(x * 1.5).to(dtype).transpose(1, 2).requires_grad_() for x in made]


def split_way(split: Split, given: list[Tensor]) -> Tensor:
    query, trunk_key, trunk_value, key, value = given
    return attend_split(query, (trunk_key, trunk_value), (key, value), split, SCALE)[0]


def weights(split: Split, given: list[Tensor]) -> Tensor:
    """(B, H, G * S, T + G * S) under the mask of `Columns`."""
    branch = torch.arange(split.branches).repeat_interleave(split.size)
    segment = torch.cat([torch.full((split.trunk,), -1), branch]).expand(ROWS, -1)
    real = None
    if split.real is not None:
        real = torch.cat([split.real, torch.ones(ROWS, len(branch), dtype=torch.bool)], dim=1)
    mask = Columns(split.trunk + len(branch), real, segment).visible(len(branch), None, torch.device("cpu"))
    assert mask is not None
    key = torch.cat([given[1], given[3]], dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
    return (given[0] @ key.mT * SCALE).masked_fill(~mask, float("-inf")).softmax(-1)


def masked_way(split: Split, given: list[Tensor]) -> Tensor:
    value = torch.cat([given[2], given[4]], dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
    return (weights(split, given) @ value).transpose(1, 2)


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def gaps(split: Split) -> list[float]:
    """Largest differences of the output and of the gradient by each input."""
    given = inputs(split)
    found, right = split_way(split, given), masked_way(split, given)
    assert found.shape == right.shape and found.is_contiguous()
    mine, theirs = (torch.autograd.grad(weighted(out), given) for out in (found, right))
    assert min(float(grad.abs().max()) for grad in theirs) > 1e-3 or split.size == 1
    return [float((a - b).detach().abs().max()) for a, b in zip((found, *mine), (right, *theirs), strict=True)]


@EVERY
def test_equals_the_mask(case: str) -> None:
    assert max(gaps(CASES[case])) <= 1e-12


@pytest.mark.parametrize("case", ["branches", "padded trunk"])
def test_gradients_by_finite_differences(case: str) -> None:
    split = replace(CASES[case], branches=2, size=2)
    assert torch.autograd.gradcheck(lambda *given: split_way(split, list(given)), inputs(split))


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_wrong_log_sum_exp_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices a part that is merged, or differentiated, with a sum other than the merged one."""
    name = "_scaled_dot_product_flash_attention_for_cpu" + ("_backward" if wrong == "backward" else "")
    stock = getattr(torch.ops.aten, name)

    def forward(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = stock(*args, **options)
        return out, lse + 0.1 * args[4]  # of the causal part

    def backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return stock(*args[:5], args[5] + 0.1, *args[6:], **options)

    aten = torch.ops.aten
    names = [f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
    changed = {name: getattr(aten, name) for name in names} | {name: forward if wrong == "forward" else backward}
    monkeypatch.setattr(split_attention, "aten", SimpleNamespace(**changed))
    found = gaps(CASES["branches"])
    assert max(found[1:]) > 1e-3 and (found[0] > 1e-3) == (wrong == "forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_rounds_as_the_mask_does(case: str, dtype: torch.dtype) -> None:
    """In narrow numbers: as near to float64 as the masked way, up to a factor."""
    split = CASES[case]
    exact = [x.detach().double().requires_grad_() for x in inputs(split, dtype)]
    right = masked_way(split, exact)
    expected = (right, *torch.autograd.grad(weighted(right), exact))
    errors = []
    for way in (split_way, masked_way):
        given = inputs(split, dtype)
        out = way(split, given)
        assert out.dtype == dtype
        found = (out, *torch.autograd.grad(weighted(out.double()), given))
        errors.append(
            [
                float((a - b).detach().norm() / b.detach().norm().clamp(min=1e-3))
                for a, b in zip(found, expected, strict=True)
            ]
        )
    assert all(mine <= 3 * max(masked, torch.finfo(dtype).eps) for mine, masked in zip(*errors, strict=True))


def test_padding_behind_a_branch_reaches_nothing() -> None:
    """However large the padded columns of a branch are, real ones do not change, and no gradient is lost in NaN."""
    split = CASES["padded trunk"]
    real = (torch.arange(split.size) < torch.tensor([5, 2, 1, 0])[:, None]).flatten()  # of each branch
    found = []
    for filling in (0.0, 50.0):
        given = [x.detach().clone() for x in inputs(split)]
        for x in (given[0], given[3], given[4]):
            x[:, :, ~real] = filling
        given = [x.requires_grad_() for x in given]
        out = split_way(split, given)[:, real]
        grads = torch.autograd.grad(weighted(out), given)
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert all(float(grads[i][:, :, ~real].abs().max()) == 0 for i in (0, 3, 4))
        assert split.real is not None and float(grads[1].transpose(1, 2)[~split.real].abs().max()) == 0
        found.append((out, *(grad for grad in grads)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@EVERY
def test_weights_on_some_columns(case: str) -> None:
    split, columns = CASES[case], slice(1, 7)
    given = inputs(split)
    _, lse = attend_split(given[0], (given[1], given[2]), (given[3], given[4]), split, SCALE)
    found = weights_on(given[0], given[1], lse, columns, split, SCALE)
    torch.testing.assert_close(found, weights(split, given)[..., columns], rtol=0, atol=1e-12)
    assert not found.requires_grad and not lse.requires_grad


# ---------------------------------------------------------------------- what a GPU would be asked for


@EVERY
def test_operators_of_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what it is declared with: grouped heads, boundaries of a padded trunk, what it wants back."""
    gpu = Gpu()
    monkeypatch.setattr(split_attention, "aten", gpu)
    monkeypatch.setattr(split_attention, "has_flash", lambda query: True)
    assert max(gaps(CASES[case])) <= 1e-12
    assert gpu.called == [("dense" if CASES[case].real is None else "sequences"), "dense"]


@EVERY
def test_the_installed_torch_declares_them_so(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operators take these arguments and return these shapes; whether they run is for a GPU to show."""
    monkeypatch.setattr(split_attention, "has_flash", lambda query: True)
    split = CASES[case].to(torch.device("meta"))
    given = [x.detach().to("meta", torch.bfloat16).requires_grad_() for x in inputs(split)]
    out = split_way(split, given)
    assert out.shape == (ROWS, split.branches * split.size, HEADS, WIDTH)
    for grad, x in zip(torch.autograd.grad(out.sum(), given), given, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype


# ---------------------------------------------------------------------- what is refused


def test_branches_of_several_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="7 columns are not 2 branches of one size"):
        Split.build(3, None, 2, 7, None)


def test_padding_inside_a_branch_is_refused() -> None:
    real = torch.tensor([[True, True, False, True, False, False]])
    assert Split.build(3, None, 2, 6, real).size == 3
    with pytest.raises(RuntimeError, match="padding before a real column"):
        Split.build(3, None, 3, 6, real.roll(1, 1))


@pytest.mark.parametrize(
    ("why", "match"),
    [
        ("float32", "no flash attention"),
        ("old", "no flash attention"),
        ("window", "sliding window"),
        ("gradient", "with a gradient"),
    ],
)
def test_the_mask_is_used_with_a_notice(why: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many layers and passes there are."""
    monkeypatch.setattr(packed_attention, "_recent", lambda device: why != "old")
    split = Split(trunk=8, branches=2, size=3)
    fits, half = 11, OnGpu(torch.bfloat16)

    def ask() -> bool:
        if why == "gradient":
            probe = Probe(columns=slice(2, 4), gradient=True)
            return Pass([], Columns(14), (probe,), split=split).split(None, torch.zeros(1, 2, 3, 64)) is not None
        return split.takes(OnGpu(torch.float32) if why == "float32" else half, fits - (why == "window"))  # type: ignore[arg-type]

    notice_once.cache_clear()
    with pytest.warns(UserWarning, match=match) as said:
        assert not ask() and not ask()
    assert len(said) == 1
    monkeypatch.setattr(packed_attention, "_recent", lambda device: True)
    monkeypatch.setattr(flash_checks, "merges", lambda query: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split.takes(half, fits) and split.takes(torch.zeros(1), None)  # type: ignore[arg-type]
