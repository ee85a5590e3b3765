"""Adapters as one node of the graph: peft's numbers bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import DEVICE, mixed_prompts
from live_memory import LiveMemory
from memory import Case, rl_batch
from realvr.backbone import Backbone, small_kernels
from realvr.latent.span import prefill
from realvr.training import low_rank
from realvr.training.adapters import Adapters
from realvr.training.gradients import DeferredLinear, defer_gradients
from realvr.training.method import Step
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.sections import LoraSettings
from realvr.training.thin_lora import ThinLinear, thin

ROWS, INPUTS, OUTPUTS, RANK = 40, 24, 56, 4
BF16, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_kernels, "FEW", 1)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each pass through the node."""
    found: list[bool] = []

    def watched(*args: Any) -> Tensor:
        found.append(True)
        return low_rank._LowRank.apply(*args)

    monkeypatch.setattr(low_rank, "low_rank", watched)
    return found


def layer(alpha: float = 8, dropout: float = 0.0, bias: bool = True) -> Any:
    """A bfloat16 layer with a 32-bit adapter that is not zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=bias)).to(DEVICE, BF16)
    config = LoraConfig(r=RANK, lora_alpha=alpha, lora_dropout=dropout, target_modules=["0"])
    made: Any = get_peft_model(net, thin(config)).base_model.model[0]
    made.lora_B["default"].weight.data.normal_()
    assert type(made) is ThinLinear and made.lora_A["default"].weight.dtype == WIDE
    return made


def stock(adapted: Any) -> Any:
    """The same layer with peft's forward pass."""
    adapted.__class__ = Linear
    return adapted


def given(rows: int = ROWS) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(2, rows // 2, INPUTS, generator=numbers).to(DEVICE, BF16).requires_grad_()


def learnt(adapted: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of input and adapter."""
    out = (run or adapted)(x)
    seen = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [x, *trained], seen)]


def same(mine: list[Tensor], right: list[Tensor]) -> None:
    assert len(mine) == len(right) == 4
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, right, strict=True))


# ---------------------------------------------------------------------- peft's numbers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [8, 7], ids=["power of two", "other scaling"])
def test_bit_for_bit(alpha: float, bias: bool, used: list[bool]) -> None:
    mine = learnt(layer(alpha, bias=bias), given())
    assert used == [True]
    same(mine, learnt(stock(layer(alpha, bias=bias)), given()))
    assert used == [True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool, used: list[bool]) -> None:
    adapted = layer()
    again = learnt(adapted, given()) if not reentrant else None

    def run(x: Tensor) -> Tensor:
        return checkpoint(adapted, x, use_reentrant=reentrant)

    if again is not None:
        same(learnt(adapted, given(), run), again)
        assert used == [True] * 3
        return
    x, other = given(), given()  # the reentrant kind knows no torch.autograd.grad
    run(x).float().sum().backward()
    mine = [x.grad, *(p.grad for p in adapted.parameters() if p.requires_grad)]
    for p in adapted.parameters():
        p.grad = None
    adapted(other).float().sum().backward()
    right = [other.grad, *(p.grad for p in adapted.parameters() if p.requires_grad)]
    assert all(map(torch.equal, mine, right)) and used


def test_gradients_that_nobody_wants() -> None:
    """A frozen half of the adapter, an input without gradient: the others are the same."""
    for frozen in ("lora_A", "lora_B", "x"):
        found = []
        for own in (True, False):
            adapted, x = layer(), given()
            adapted = adapted if own else stock(adapted)
            if frozen == "x":
                x = x.detach()
            else:
                getattr(adapted, frozen)["default"].weight.requires_grad_(False)
            adapted(x).float().square().sum().backward()
            found.append([p.grad for p in [x, *adapted.parameters()]])
        assert sum(g is None for g in found[0]) >= 1
        for mine, right in zip(*found, strict=True):
            assert (mine is None) == (right is None) and (mine is None or torch.equal(mine, right))


def test_a_changed_input_is_an_error() -> None:
    for own in (True, False):
        adapted = layer() if own else stock(layer())
        x = given() * 1
        total = adapted(x).float().sum()
        with torch.no_grad():
            x.mul_(2)
            if not own:  # peft keeps a copy, and does not notice
                total.backward()
                continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3", "qwen3-vl-moe"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_whole_pass_is_that_of_peft(
    build_tiny: Callable[[str], Path], family: str, checkpointed: bool, used: list[bool]
) -> None:
    found = []
    for own in (True, False):
        backbone = Backbone.load(build_tiny(family), dtype=BF16, device=DEVICE)
        torch.manual_seed(0)
        Adapters(backbone, LoraSettings(rank=RANK, alpha=8))
        layers = [module for module in backbone.model.modules() if isinstance(module, Linear)]
        for each in layers:
            each.lora_B["default"].weight.data.normal_(std=0.05)
            if not own:
                stock(each)
        batch = backbone.batch(mixed_prompts(backbone)[:2])
        visual = backbone.encode_images(batch.images)
        _, hidden = prefill(backbone, batch, visual, checkpointed=checkpointed)
        # The square of normalised states would be a constant, and its gradient rounding.
        weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        (hidden.float() * weight).sum().backward()
        # The last layer's output has no part in it where only keys and values are read.
        found.append([hidden.detach(), *(p.grad for p in backbone.model.parameters() if p.requires_grad)])
    assert len(used) >= len(layers)
    for mine, right in zip(*found, strict=True):
        assert (mine is None) == (right is None) and (mine is None or torch.equal(mine, right))


def test_a_step_of_stage_two_is_that_of_peft(build_tiny: Callable[[str], Path], used: list[bool]) -> None:
    """Prompt, replay, latent steps and readouts. Gradients of all passes are added up in the same order."""
    found, batch = [], None
    for own in (True, False):
        backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=BF16, device=DEVICE)
        torch.manual_seed(0)
        Adapters(backbone, LoraSettings(rank=RANK, alpha=8))
        for each in [module for module in backbone.model.modules() if isinstance(module, Linear)]:
            each.lora_B["default"].weight.data.normal_(std=0.05)
            if not own:
                stock(each)
        batch = batch or rl_batch(backbone, Case("", "", grid=(4, 6), group=3, answer=6, latents=3, rows=2))
        loss, _ = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr")))(batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in backbone.model.parameters() if p.requires_grad)])
    assert len(used) > 100
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)


# ---------------------------------------------------------------------- what is kept


def kept(adapted: nn.Module, x: Tensor) -> int:
    """Bytes that one pass leaves, output and input not counted."""
    with LiveMemory(adapted) as memory:
        memory.known.add(x.untyped_storage()._cdata)
        out = adapted(x)
        found = memory.now - out.nbytes
        del out
        gc.collect()
        assert memory.now == 0
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the CPU's operations leave")
def test_no_copy_of_the_input_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, copy = 4 * ROWS * RANK, 4 * ROWS * INPUTS
    assert kept(layer(), given()) == inner
    assert kept(stock(layer()), given()) == inner + copy
    monkeypatch.setattr(small_kernels, "FEW", ROWS * INPUTS + 1)
    assert kept(layer(), given()) == inner + copy
    monkeypatch.setattr(small_kernels, "FEW", ROWS * INPUTS)
    assert kept(layer(), given()) == inner


# ---------------------------------------------------------------------- where it does not apply


def test_peft_s_way_where_layers_are_not_plain(used: list[bool]) -> None:
    """Hooks (an engine gathers weights there), dropout, autocast, layers of another kind, weights that an engine has
    cut, 32-bit inputs, 16-bit adapters, inputs that peft does not cast; and without gradient."""
    before, behind, dropping, other, biased = layer(), layer(), layer(dropout=0.5), layer(), layer()
    before.lora_A["default"].register_forward_pre_hook(lambda module, args: None)
    behind.lora_B["default"].register_forward_hook(lambda module, args, out: None)
    other.lora_B["default"] = DeferredLinear(other.lora_B["default"], None)  # type: ignore[arg-type]
    biased.lora_B["default"] = nn.Linear(RANK, OUTPUTS).to(DEVICE)
    for adapted in (before, behind, dropping, other, biased):
        assert not adapted.keeps_input
        adapted(given())
    plain, narrow, uncast, cut = layer(), layer(), layer(), layer()
    with torch.autocast(DEVICE, BF16):
        plain(given())
    with torch.no_grad():
        plain(given())
    plain.float()(given().float())
    for part in (narrow.lora_A, narrow.lora_B):
        part["default"].to(BF16)
    narrow(given())
    uncast.cast_input_dtype_enabled = False
    with pytest.raises(RuntimeError, match="dtype"):  # peft's own error: the product has two formats
        uncast(given())
    cut.lora_A["default"].weight = nn.Parameter(Shard(cut.lora_A["default"].weight.detach()))
    cut(given())
    assert used == []
    assert layer().keeps_input and layer(dropout=0.5).eval().keeps_input
    layer(dropout=0.5).eval()(given())
    assert used == [True]


class Shard(Tensor):
    """Of a class of its own, as the weights of an engine that cuts them."""


def test_adapters_are_not_deferred(build_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realvr.training.gradients.LEAST", 0)
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=BF16, device=DEVICE)
    Adapters(backbone, LoraSettings(rank=RANK))
    assert defer_gradients(backbone.model) is None
