"""Rotary embeddings, gates and vision attention in fewer kernels: the numbers of stock layers, gradients included."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from helpers import DEVICE, DTYPE, difference, mixed_prompts, stock_inputs
from realvr.backbone import Backbone, fused_layers, fused_norms, packed_attention, padded_vision, small_kernels, vision
from realvr.backbone.loading import load
from realvr.latent import prefill, trajectory
from realvr.latent.graphs import record_step

GELU = small_kernels.gelu_tanh


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def heads(batch: int, columns: int, dtype: torch.dtype, rows: int | None = None) -> list[Tensor]:
    """Queries and keys as projections leave them, (B, H, T, d), and the two factors, unlike in their halves."""
    query, key = (numbers(batch, columns, n, 16, dtype=dtype, seed=n).transpose(1, 2) for n in (6, 2))
    return [query, key, *(numbers(rows or batch, columns, 16, dtype=dtype, seed=n) for n in (3, 4))]


def gradients(call: Callable[..., Any], given: list[Tensor], inputs: int = 2) -> list[Tensor]:
    """Outputs, and gradients of a scalar of them by the first inputs."""
    given = [x.detach().requires_grad_(i < inputs) for i, x in enumerate(given)]
    out = call(*given)
    out = [out] if isinstance(out, Tensor) else list(out)
    seen = [numbers(*x.shape, dtype=x.dtype, seed=9 + i) for i, x in enumerate(out)]
    return [x.detach() for x in out] + list(torch.autograd.grad(out, given[:inputs], seen))


def stock_function(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"), name)


def exact(name: str, given: list[Tensor]) -> list[Tensor]:
    """Of the stock function's definition in float64 throughout."""
    axis = 1 if name == "apply_rotary_pos_emb" else -2

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        half = query.shape[-1] // 2
        return [
            x * cos.unsqueeze(axis) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(axis)
            for x in (query, key)
        ]

    return gradients(turn, [x.double() for x in given])


def check(mine: list[Tensor], stock: list[Tensor], right: list[Tensor]) -> None:
    """Wider types bit for bit; 16 bits no further from the truth."""
    for a, b, c in zip(mine, stock, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == torch.bfloat16:
            assert float((a - c).abs().mean()) <= 1.001 * float((b - c).abs().mean())
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("batch", "columns", "rows"), [(16, 50, None), (3, 200, 1), (700, 1, None)])
def test_rotation_equals_stock(batch: int, columns: int, rows: int | None, dtype: torch.dtype) -> None:
    given = heads(batch, columns, dtype, rows)
    stock = stock_function("apply_rotary_pos_emb")
    mine = gradients(lambda *x: small_kernels.rotate(*x, compiled=False), given)
    check(mine, gradients(stock, given), exact("apply_rotary_pos_emb", given))
    with torch.no_grad():
        assert all(map(torch.equal, small_kernels.rotate(*given, compiled=False), mine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_vision_rotation_equals_stock(dtype: torch.dtype) -> None:
    """Cut from one product, turned in float32 whatever the type."""
    query, key, _ = numbers(500, 3, 4, 16, dtype=dtype, seed=1).unbind(1)
    given = [query, key, *(numbers(500, 16, dtype=torch.float32, seed=n) for n in (3, 4))]
    mine = gradients(lambda *x: small_kernels.rotate_vision(*x, compiled=False), given)
    stock = gradients(stock_function("apply_rotary_pos_emb_vision"), given)
    check(mine, stock, exact("apply_rotary_pos_emb_vision", given))


def test_factors_of_another_type_give_the_stock_type() -> None:
    query, key, *_ = heads(2, 3, torch.bfloat16)
    *_, cos, sin = heads(2, 3, torch.float32)
    mine = gradients(small_kernels.rotate, [query, key, cos, sin])
    stock = gradients(stock_function("apply_rotary_pos_emb"), [query, key, cos, sin])
    assert mine[0].dtype == torch.float32 and all(map(torch.equal, mine, stock))


def test_gradients_of_gradients() -> None:
    query, key, cos, sin = heads(1, 2, torch.float64)
    small = [x[:, :2, :, :4].detach().requires_grad_() for x in (query, key)]

    def turned(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.sin() for x in small_kernels.rotate(query, key, cos[..., :4], sin[..., :4]))

    assert torch.autograd.gradcheck(turned, small)
    assert torch.autograd.gradgradcheck(turned, small)


@pytest.mark.slow
def test_compiled_equals_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the compiler's CPU backend; few versions for many shapes; under a recording none is made."""
    made: list[object] = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: made.append(a) or original(*a, **k))
    stock = stock_function("apply_rotary_pos_emb")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fused layers")
        for dtype in (torch.float32, torch.bfloat16):
            for batch, columns in ((16, 50), (1, 1), (2, 7), (5, 1), (1, 300)):
                given = heads(batch, columns, dtype)
                mine = gradients(lambda *x: small_kernels.rotate(*x, compiled=True), given)
                for a, b, c in zip(mine, gradients(stock, given), exact("apply_rotary_pos_emb", given), strict=True):
                    assert a.dtype == b.dtype
                    if dtype == torch.float32:
                        torch.testing.assert_close(a, b)
                    elif a.numel() > 1000:
                        assert float((a - c).abs().mean()) <= float((b - c).abs().mean())
        assert len(made) <= 8
        query, key, _ = numbers(500, 3, 4, 16, dtype=torch.bfloat16, seed=1).unbind(1)
        given = [query, key, *(numbers(500, 16, dtype=torch.float32, seed=n) for n in (3, 4))]
        mine = gradients(lambda *x: small_kernels.rotate_vision(*x, compiled=True), given)
        for a, b in zip(mine, gradients(stock_function("apply_rotary_pos_emb_vision"), given), strict=True):
            assert difference(a, b) <= 0.04
        for act in (F.silu, GELU):
            given = [numbers(3, 700, dtype=torch.bfloat16, seed=n) for n in (1, 2)]
            mine = gradients(lambda x, y, act=act: small_kernels.gate(x, y, act, compiled=True), given)
            plain = gradients(lambda x, y, act=act: act(x) * y, given)
            right = gradients(lambda x, y, act=act: act(x) * y, [x.double() for x in given])
            for a, b, c in zip(mine, plain, right, strict=True):
                assert a.dtype == b.dtype and float((a - c).abs().mean()) <= float((b - c).abs().mean())
        given = heads(4, 3, torch.float64)
        with torch.compiler.set_stance("eager_on_recompile"):
            mine = gradients(lambda *x: small_kernels.rotate(*x, compiled=True), given)
        assert all(map(torch.allclose, mine, gradients(stock, given)))


@pytest.mark.slow
def test_kernels_that_the_compiler_makes() -> None:
    """One for queries and one for keys, one for a gate and one for both its gradients."""
    from torch._inductor import metrics  # takes seconds to import

    query, key = (numbers(9, n, 24, dtype=torch.bfloat16, seed=n) for n in (6, 2))
    cos, sin = (numbers(9, 24, dtype=torch.bfloat16, seed=n) for n in (3, 4))
    flat, other, grad = (x.flatten() for x in (query, query + 1, query + 2))
    for (_, wide), compiled in small_kernels._COMPILED.items():
        metrics.reset()
        assert compiled(query, key, cos.float() if wide else cos, sin.float() if wide else sin) is not None
        assert metrics.generated_kernel_count == 2
    for forth, back in small_kernels._GATES.values():
        for compiled, given in ((forth, (flat, other)), (back, (grad, flat, other))):
            metrics.reset()
            assert compiled(*given) is not None and metrics.generated_kernel_count <= 1  # 0: compiled before


def test_what_does_not_compile_runs_all_the_same() -> None:
    def breaks(x: Tensor) -> tuple[Tensor]:
        torch._dynamo.graph_break()
        return (x + 1,)

    compiled = small_kernels._Compiled(breaks)
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="not compiled on this machine") as said:
        assert compiled(x) is None and compiled(x) is None
    assert len(said) == 1


def test_counters_see_every_operation() -> None:
    """Nothing is compiled under a mode that looks at operations, and nothing is given up for it."""
    given = heads(2, 3, torch.float32)
    pair = [numbers(3, 5, dtype=torch.float32, seed=n) for n in (1, 2)]
    with warnings.catch_warnings(), FlopCounterMode(display=False):
        warnings.simplefilter("error")
        turned = gradients(lambda *x: small_kernels.rotate(*x, compiled=True), given)
        gated = gradients(lambda x, y: small_kernels.gate(x, y, F.silu, compiled=True), pair)
    assert all(map(torch.equal, turned, gradients(stock_function("apply_rotary_pos_emb"), given)))
    assert all(map(torch.allclose, gated, gradients(lambda x, y: F.silu(x) * y, pair)))  # a counter takes it apart
    assert not any(each._broken for each in (small_kernels._COMPILED[False, False], *small_kernels._GATES[F.silu]))


@pytest.mark.parametrize("act", [F.silu, GELU])
def test_gate(act: Callable[[Tensor], Tensor]) -> None:
    given = [numbers(3, 5, dtype=DTYPE, seed=n) for n in (1, 2)]
    mine = gradients(lambda x, y: small_kernels.gate(x, y, act, compiled=False), given)
    assert all(map(torch.equal, mine, gradients(lambda x, y: act(x) * y, given)))


def layers(backbone: Backbone) -> list[nn.Module]:
    """Attention and dense MLPs of the decoder."""
    found = [layer.self_attn for layer in backbone.decoder.layers]
    return found + [layer.mlp for layer in backbone.decoder.layers if hasattr(layer.mlp, "gate_proj")]


def learnt(backbone: Backbone) -> tuple[Tensor, dict[str, Tensor]]:
    _, hidden = prefill(backbone, backbone.batch(mixed_prompts(backbone)))
    weights = {name: p for name, p in backbone.decoder.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((hidden * numbers(*hidden.shape, dtype=hidden.dtype, seed=1)).sum(), weights.values())
    return hidden.detach(), dict(zip(weights, found, strict=True))


@pytest.mark.skipif(DEVICE != "cpu", reason="compiled on a GPU")
def test_layers_are_stock_bit_for_bit(fresh: Backbone) -> None:
    """In float32, norms aside; gradients up to the order of sums over heads (Gemma's norms) and experts."""
    plain = learnt(fresh)
    fresh.fused_layers = True
    assert all(map(fused_layers.is_fused, layers(fresh)))
    fused_norms.restore(fresh.decoder)
    fused = learnt(fresh)
    assert torch.equal(fused[0], plain[0])
    for name, x in plain[1].items():
        assert difference(fused[1][name], x) <= 1e-6 * float(x.abs().max())
    assert fresh.fused_layers
    fresh.fused_layers = False
    assert not any("forward" in vars(module) for module in fresh.decoder.modules())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"], indirect=True)
def test_compiled_layers_learn_the_same(fresh: Backbone) -> None:
    """Latent steps with layers that are computed again for the gradient, in whatever thread that happens."""

    def passed() -> list[Tensor]:
        _, _, z_BKD = trajectory(fresh, fresh.batch(mixed_prompts(fresh)[:2]), latents=3, memory="checkpointed")
        weights = [p for p in fresh.decoder.parameters() if p.requires_grad]
        seen = numbers(*z_BKD.shape, dtype=z_BKD.dtype, seed=1)
        return [z_BKD.detach(), *torch.autograd.grad((z_BKD * seen).sum(), weights, allow_unused=True)]

    plain = passed()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fused layers")
        fused_layers.fuse(fresh.decoder, compiled=True)
        fused = passed()
    scale = max(float(x.abs().max()) for x in plain[1:] if x is not None)
    assert difference(fused[0], plain[0]) <= 1e-5 * float(plain[0].abs().max())
    for mine, theirs in zip(fused[1:], plain[1:], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or difference(mine, theirs) <= 1e-5 * scale


@pytest.mark.skipif(DEVICE != "cpu", reason="compiled on a GPU")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_stock_attention_and_its_cache(fresh: Backbone, attention: str) -> None:
    """Without anything of ours around them the layers generate with a stock cache as stock ones do."""
    inputs = stock_inputs(fresh, mixed_prompts(fresh)[:2])
    fresh.model.set_attn_implementation(attention)
    plain = fresh.model.generate(**inputs, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        scores = fresh.model(**inputs, use_cache=False).logits
    fresh.fused_layers = True
    fused_norms.restore(fresh.decoder)
    assert torch.equal(fresh.model.generate(**inputs, max_new_tokens=4, do_sample=False), plain)
    with torch.no_grad():
        assert torch.equal(fresh.model(**inputs, use_cache=False).logits, scores)


def test_hooks_and_modules_inside_are_called(fresh: Backbone) -> None:
    fresh.fused_layers = True
    seen: list[nn.Module] = []
    for layer in layers(fresh):
        for each in (layer, *layer.children()):
            each.register_forward_hook(lambda module, *_: seen.append(module))
    with torch.no_grad():
        prefill(fresh, fresh.batch(mixed_prompts(fresh)[:1]))
    acts = {type(layer.act_fn) for layer in layers(fresh) if hasattr(layer, "act_fn")}
    inside = {id(each) for layer in layers(fresh) for each in (layer, *layer.children()) if type(each) not in acts}
    assert {id(module) for module in seen} == inside


class Qwen2MLP(nn.Module):
    """Known by name only."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_classes_that_are_not_known_stay(fresh: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = layers(fresh)[0]
    stock = type(attention).forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = stock(self, *args, **kwargs)
        return out.clamp(-1, 1), weights

    monkeypatch.setattr(type(attention), "forward", changed)
    with pytest.warns(UserWarning, match="has changed and stays") as said:
        fresh.fused_layers = True
    assert len(said) == 1 and not fused_layers.is_fused(attention)
    with pytest.warns(UserWarning, match="Qwen2MLP has changed"):
        assert fused_layers.fuse(Qwen2MLP()) == 0


# ---------------------------------------------------------------------- vision


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in 16 bits; a CPU has no pinned memory."""
    monkeypatch.setattr(padded_vision, "pays", lambda device, dtype: True)
    monkeypatch.setattr(vision, "staged", lambda pixels, dtype: pixels.to(dtype))


def tokens(backbone: Backbone) -> Tensor:
    found = backbone.encode_images([image for prompt in mixed_prompts(backbone) for image in prompt.images])
    return torch.cat([x.flatten().double() for x in (found.features_ND, *found.deepstack)])


@pytest.mark.usefixtures("pays")
def test_towers_equal_plain(checkpoint: Path) -> None:
    """Visual tokens of images of several sizes; nothing of it is left in the model."""
    ours = load(checkpoint, dtype=torch.float32, device=DEVICE)
    plain = tokens(ours)
    ours.fast_vision = True
    fast = tokens(ours)
    assert difference(fast, plain) <= 1e-5 * float(plain.abs().max())
    assert torch.equal(tokens(ours), fast)
    assert not any("forward" in vars(module) for module in ours.core.modules())
    if ours.mrope:
        asked: list[int] = []
        original = small_kernels.rotate_vision
        small_kernels.rotate_vision = lambda *a, **k: asked.append(1) or original(*a, **k)
        try:
            tokens(ours)
        finally:
            small_kernels.rotate_vision = original
        assert len(asked) == len(ours.core.visual.blocks)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"], indirect=True)
def test_patches_as_one_product(fresh: Backbone) -> None:
    """Gradients of what is trained too; a hook on the convolution is still called."""
    embed = fresh.core.visual.patch_embed
    embed.requires_grad_(True)
    pixels = mixed_prompts(fresh)[0].images[0].pixels.to(DEVICE, DTYPE)
    weights = list(embed.parameters())

    def passed() -> list[Tensor]:
        out = embed(pixels)
        return [out.detach(), *torch.autograd.grad(out, weights, numbers(*out.shape, dtype=DTYPE, seed=1))]

    plain = passed()
    assert fused_layers.fuse(embed) == 1
    for mine, theirs in zip(passed(), plain, strict=True):
        assert mine.shape == theirs.shape and difference(mine, theirs) <= 1e-5 * float(theirs.abs().max())
    called: list[int] = []
    embed.proj.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(passed()[0], plain[0]) and called


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
def test_towers_in_16_bits_are_no_further_from_the_truth(checkpoint: Path) -> None:
    ours, right = (load(checkpoint, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.float32))
    right.model.load_state_dict(ours.model.state_dict())
    truth, plain = tokens(right), tokens(ours)
    ours.fast_vision = True
    assert float((tokens(ours) - truth).abs().mean()) <= 1.05 * float((plain - truth).abs().mean())


def per_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """torch's function for sequences of any length, one after the other."""
    assert window_size == (-1, -1) and max_q == max_k == int(cu_seq_q.diff().max()) and cu_seq_q.dtype == torch.int32
    parts = (x.split(cu_seq_q.diff().tolist()) for x in (query, key, value))
    return torch.cat(
        [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), scale=scale).transpose(0, 1)
         for part in zip(*parts, strict=True)]
    )  # fmt: skip


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
def test_towers_with_variable_length_attention(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function gets the right chunks of every block; how it computes is torch's."""
    ours = load(checkpoint, dtype=torch.float32, device=DEVICE)
    plain = tokens(ours)
    called: list[int] = []
    function = lambda *a, **k: called.append(1) or per_sequence(*a, **k)  # noqa: E731
    names = frozenset(inspect.signature(per_sequence).parameters)
    monkeypatch.setattr(packed_attention, "_varlen", lambda: (function, names))
    monkeypatch.setattr(fused_layers, "has_varlen", lambda query: True)
    ours.fast_vision = True
    assert difference(tokens(ours), plain) <= 1e-5 * float(plain.abs().max())
    assert len(called) == len(ours.core.visual.blocks)


def test_few_numbers_are_worth_a_compiled_call_only_in_a_recording() -> None:
    class OnGpu:
        is_cuda = True

        def __init__(self, numbers: int) -> None:
            self.numel = lambda: numbers

    few, many = OnGpu(small_kernels.FEW - 1), OnGpu(small_kernels.FEW)
    wants = small_kernels._wants
    assert not wants(None, few) and wants(None, many) and wants(True, few) and not wants(False, many)  # type: ignore[arg-type]
    seen = []
    record_step(lambda step, reset: step, lambda: None, [])
    replay = record_step(lambda step, reset: (step(), step)[1], lambda: seen.append(wants(None, few)), [])  # type: ignore[arg-type]
    replay()
    assert seen == [True, False]
    assert not wants(None, torch.empty(2 * small_kernels.FEW))


def test_a_backward_pass_goes_the_way_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GPU runs in a thread of autograd, which knows nothing of a recording."""
    ways: list[tuple[bool, bool | None]] = []
    plain, recorded = small_kernels._turn, small_kernels._recorded

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, wide: bool, compiled: Any, back: bool) -> Any:
        ways.append((back, compiled))
        return plain(query, key, cos, sin, wide, False, back)

    monkeypatch.setattr(small_kernels, "_turn", turn)
    monkeypatch.setattr(small_kernels, "_wants", lambda compiled, _: recorded.get() if compiled is None else compiled)
    query, key = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 8) for _ in range(2))
    with small_kernels.recorded():
        turned = small_kernels.rotate(query, key, cos, sin)
    loss = sum(x.sum() for x in turned)
    with ThreadPoolExecutor(1) as other:
        other.submit(loss.backward).result()
    assert ways == [(False, True), (True, True)]
