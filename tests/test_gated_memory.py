"""Gated MLPs that make ``act(x) * y`` again for the backward pass: stock numbers, bit for bit, in less memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as recomputed

from helpers import DEVICE, mixed_prompts
from live_memory import LiveMemory
from optional import need_package
from realvr.backbone import Backbone, fused_layers, small_kernels
from realvr.latent import prefill, trajectory
from realvr.training.gradients import Deferral, DeferredLinear

WIDTH, FFN, ROWS, COLUMNS = 24, 56, 3, 10
MODES = ("cached", "checkpointed-prefill", "checkpointed")
LAYERS = ("linear", "deferred", "lora")
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="watches operations, and stock is bit for bit the same, on the CPU")


@pytest.fixture(autouse=True)
def _few_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_kernels, "FEW", 1)


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep the product, as layers without this do."""
    return lambda: monkeypatch.setattr(fused_layers, "made_again", lambda *_, **__: nullcontext())


def make(act: str, dtype: torch.dtype, kind: str = "linear") -> Any:
    """A stock MLP; its last layer is of this kind, with LoRA all are."""
    from transformers import Gemma3TextConfig, Qwen2Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN}
    mlp: Any = Qwen2MLP(Qwen2Config(**sizes)) if act == "silu" else Gemma3MLP(Gemma3TextConfig(**sizes))
    mlp = mlp.to(DEVICE, dtype)
    if kind == "deferred":
        mlp.down_proj = DeferredLinear(mlp.down_proj, Deferral())
    if kind == "lora":
        need_package("peft")
        from peft import LoraConfig, inject_adapter_in_model

        from realvr.training.thin_lora import ThinLinear, thin

        mlp.requires_grad_(False)
        names = ["gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(thin(LoraConfig(r=4, init_lora_weights=False, target_modules=names)), mlp)
        assert isinstance(mlp.down_proj, ThinLinear)
        for name, parameter in mlp.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()  # as `realvr.training.adapters` has it
    return mlp


def given(dtype: torch.dtype) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, COLUMNS, WIDTH, generator=numbers).to(DEVICE, dtype).requires_grad_()


def learnt(mlp: nn.Module, dtype: torch.dtype, run: Callable[..., Any] | None = None) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    x, trained = given(dtype), [p for p in mlp.parameters() if p.requires_grad]
    out = mlp(x) if run is None else run(mlp, x)
    seen = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    out.backward(seen)
    found = [out.detach(), x.grad, *(p.grad for p in trained)]
    assert all(each is not None for each in found) and len(found) > 3
    for p in trained:
        p.grad = None
    return found  # type: ignore[return-value]


def same(mine: list[Tensor], right: list[Tensor]) -> None:
    assert len(mine) == len(right) and all(map(torch.equal, mine, right))


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_bit_for_bit(act: str, dtype: torch.dtype, kind: str, switched_off: Callable[[], None]) -> None:
    mlp = make(act, dtype, kind)
    stock = learnt(mlp, dtype)
    assert fused_layers.fuse(mlp) == 1
    fused = learnt(mlp, dtype)
    switched_off()
    same(fused, learnt(mlp, dtype))
    if DEVICE == "cpu":
        same(fused, stock)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_compiled_is_made_again_as_it_was(act: str, switched_off: Callable[[], None]) -> None:
    """Rounded once at the end, unlike in single operations: the two ways would differ in their last bits."""
    mlp = make(act, torch.bfloat16)
    stock = learnt(mlp, torch.bfloat16)
    fused_layers.fuse(mlp, compiled=True)
    fused = learnt(mlp, torch.bfloat16)
    switched_off()
    same(fused, learnt(mlp, torch.bfloat16))
    assert not torch.equal(fused[0], stock[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpointed_layers(kind: str, reentrant: bool) -> None:
    mlp = make("silu", torch.float32, kind)
    fused_layers.fuse(mlp)
    right = learnt(mlp, torch.float32)
    same(learnt(mlp, torch.float32, lambda *args: recomputed(*args, use_reentrant=reentrant)), right)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3", "qwen3-vl-moe"], indirect=True)
def test_memory_modes_learn_the_same(fresh: Backbone, memory: str, switched_off: Callable[[], None]) -> None:
    def passed() -> list[Tensor]:
        _, _, z_BKD = trajectory(fresh, fresh.batch(mixed_prompts(fresh)[:2]), latents=3, memory=memory)
        weights = [p for p in fresh.decoder.parameters() if p.requires_grad]
        seen = torch.arange(z_BKD.numel(), device=DEVICE).view(z_BKD.shape).sin()
        found = torch.autograd.grad((z_BKD * seen).sum(), weights, allow_unused=True)
        return [z_BKD.detach(), *(x for x in found if x is not None)]

    fresh.fused_layers = True
    ours = passed()
    switched_off()
    same(ours, passed())


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_gradients_of_gradients(act: str) -> None:
    mlp = make(act, torch.float64)
    fused_layers.fuse(mlp)
    x, weight = given(torch.float64).detach()[:1, :2].requires_grad_(), mlp.down_proj.weight
    stock = type(mlp).forward

    def second(forward: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(forward(x).square().sum(), [x, weight], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), list(mlp.parameters())))

    for mine, right in zip(second(mlp), second(lambda x: stock(mlp, x)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_one_graph_twice(switched_off: Callable[[], None]) -> None:
    mlp = make("gelu", torch.float32)
    fused_layers.fuse(mlp)

    def twice() -> list[Tensor]:
        out = mlp(given(torch.float32)).sum()
        weights = list(mlp.parameters())
        return [x for again in (True, False) for x in torch.autograd.grad(out, weights, retain_graph=again)]

    ours = twice()
    switched_off()
    same(ours, twice())


# ---------------------------------------------------------------------- what is kept


def kept(mlp: nn.Module, x: Tensor) -> int:
    """Bytes that one pass leaves, its output not counted; none without its graph."""
    with LiveMemory(mlp) as memory:
        memory.known.add(x.untyped_storage()._cdata)
        out = mlp(x)
        found = memory.now - out.nbytes
        del out
        gc.collect()
        assert memory.now == 0
    return found


@on_cpu
@pytest.mark.parametrize("kind", ["linear", "deferred"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_not_kept(dtype: torch.dtype, kind: str, switched_off: Callable[[], None]) -> None:
    """Of 3 (stock: 4) tensors as wide as the MLP 2 are left."""
    mlp, x = make("silu", dtype, kind), given(dtype)
    one = ROWS * COLUMNS * FFN * x.itemsize
    assert kept(mlp, x) == 4 * one
    fused_layers.fuse(mlp)
    assert kept(mlp, x) == 2 * one
    switched_off()
    assert kept(mlp, x) == 3 * one


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("thin", [True, False])
def test_adapters_keep_less_where_they_keep_it(
    dtype: torch.dtype, thin: bool, switched_off: Callable[[], None]
) -> None:
    """In 16 bits peft's keep a copy in 32, which stays."""
    from peft.tuners.lora import Linear

    mlp, x = make("silu", dtype, "lora"), given(dtype)
    fused_layers.fuse(mlp)
    for module in mlp.modules():
        if isinstance(module, Linear) and not thin:
            module.__class__ = Linear
    ours = kept(mlp, x)
    switched_off()
    products = int(thin or dtype == torch.float32)
    assert kept(mlp, x) - ours == products * ROWS * COLUMNS * FFN * x.itemsize


@on_cpu
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_what_a_pass_keeps(fresh: Backbone, memory: str, switched_off: Callable[[], None]) -> None:
    """One product less in every layer; where layers are checkpointed, nothing more than without."""
    fresh.fused_layers = True
    batch = fresh.batch(mixed_prompts(fresh)[:1])
    visual = fresh.encode_images(batch.images)

    def bytes_kept() -> int:
        with LiveMemory(fresh.model) as live:
            held = prefill(fresh, batch, visual, checkpointed=memory != "cached")
            found = live.now
            del held
        return found

    ours = bytes_kept()
    switched_off()
    one = batch.ids_BT.numel() * fresh.text_config.intermediate_size * fresh.dtype.itemsize
    layers = fresh.text_config.num_hidden_layers if memory == "cached" else 0
    assert bytes_kept() - ours == layers * one


# ---------------------------------------------------------------------- where it does not apply


@on_cpu
def test_few_numbers_are_kept_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = make("silu", torch.float32), given(torch.float32)
    fused_layers.fuse(mlp)
    one = ROWS * COLUMNS * FFN
    for few, tensors in ((one, 2), (one + 1, 4)):
        monkeypatch.setattr(small_kernels, "FEW", few)
        assert kept(mlp, x) == tensors * one * x.itemsize


@on_cpu
def test_not_in_a_recording_nor_for_others_who_see_to_what_is_kept() -> None:
    mlp, x = make("silu", torch.float32), given(torch.float32)
    fused_layers.fuse(mlp)
    one = ROWS * COLUMNS * FFN
    with small_kernels.recorded():
        assert kept(mlp, x) == 3 * one * x.itemsize
    seen: list[int] = []
    with saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        mlp(x)
    assert seen.count(one) == 3
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        mlp(x).sum().backward()


def test_inputs_that_a_hook_exchanges_or_changes() -> None:
    """What is kept is what the layer saw."""
    for hook in (lambda _, args: (args[0].roll(1, 0),), lambda _, args: (args[0].mul_(2),)):
        mlp = make("silu", torch.float32)
        mlp.down_proj.register_forward_pre_hook(hook)
        stock = learnt(mlp, torch.float32) if DEVICE == "cpu" else None
        fused_layers.fuse(mlp)
        fused = learnt(mlp, torch.float32)
        if stock is not None:
            same(fused, stock)


def test_a_changed_input_is_an_error() -> None:
    mlp = make("silu", torch.float32)
    fused_layers.fuse(mlp)
    outputs: list[Tensor] = []
    mlp.up_proj.register_forward_hook(lambda module, args, out: outputs.append(out))
    total = mlp(given(torch.float32)).sum()
    with torch.no_grad():
        outputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, mlp.down_proj.weight)


def test_a_changed_weight_is_an_error_as_it_is_to_autograd() -> None:
    for fused in (False, True):
        mlp = make("silu", torch.float32)
        if fused:
            fused_layers.fuse(mlp)
        x = given(torch.float32)
        total = mlp(x).sum()
        with torch.no_grad():
            mlp.down_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


class Product(torch.autograd.Function):
    """Keeps the parameter itself, as an engine may want it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


def test_weights_that_are_away_between_the_passes() -> None:
    """As ZeRO-3 does it: a parameter has no numbers until its layer runs, forward or backward."""
    mlp = make("silu", torch.float32)
    fused_layers.fuse(mlp)
    right = learnt(mlp, torch.float32)
    down = mlp.down_proj

    def run(mlp: nn.Module, x: Tensor) -> Tensor:
        out = mlp(x)
        gathered, down.weight.data = down.weight.data, down.weight.data.clone()  # elsewhere
        gathered.fill_(torch.nan)
        return out

    down.forward = lambda gated: Product.apply(gated, down.weight)
    for mine, theirs in zip(learnt(mlp, torch.float32, run), right, strict=True):
        torch.testing.assert_close(mine, theirs)
