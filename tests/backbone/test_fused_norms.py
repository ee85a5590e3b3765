"""RMSNorms as one kernel: the numbers of stock norms or better ones, and a model that nobody sees changed."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import op_tape
from helpers import DEVICE, difference, mixed_prompts, tolerance
from realvr.backbone import Backbone, fused_norms
from realvr.backbone.loading import load
from realvr.latent import Sampling, prefill, score, trajectory
from realvr.latent.fast import FastDecode
from realvr.latent.graphs import fingerprint, why_not_modules
from realvr.latent.group_rollout import rollout
from realvr.training import gradients
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings


def norms(backbone: Backbone) -> list[Any]:
    """Everything in the decoder that is called a norm."""
    return [m for m in backbone.decoder.modules() if "norm" in type(m).__name__.lower()]


def formula(norm: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The definition, in the type of ``x``, which no rounding interrupts."""
    epsilon = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
    gain = 1 + weight if type(norm).__name__.startswith("Gemma") else weight
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gain


def kinds(backbone: Backbone) -> list[Any]:
    """One norm of each class and width, with weights that are not all 1 or 0."""
    found = {(type(norm), tuple(norm.weight.shape)): norm for norm in norms(backbone)}
    generator = torch.Generator().manual_seed(1)
    for norm in found.values():
        with torch.no_grad():
            norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.3)
    return list(found.values())


def passed(call: Callable[[Tensor], Tensor], weight: nn.Parameter, x: Tensor) -> list[Tensor]:
    """Output, and gradients of a scalar of it by input and weight."""
    generator = torch.Generator().manual_seed(3)
    x = x.detach().requires_grad_()
    y = call(x)
    seen = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], seen)]


def inputs(norm: Any, dtype: torch.dtype, heads: bool = False) -> Tensor:
    """Rows of very different size, some so small that epsilon counts."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 5, 4, norm.weight.shape[0], generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-4, 1.5, 5, dtype=torch.float64)[:, None, None]
    return x.to(DEVICE, dtype).transpose(1, 2) if heads else x.to(DEVICE, dtype)


@pytest.mark.parametrize("heads", [False, True])
def test_every_norm_equals_the_stock_one(checkpoint: Path, heads: bool) -> None:
    """float32 against the class itself; float64, where that computes in float32, against the definition. ``heads``: an
    input that is not contiguous."""
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        ours = load(checkpoint, dtype=dtype, device=DEVICE, fused_layers=True)
        for norm in kinds(ours):
            assert fused_norms.is_fused(norm)
            stock = lambda x, norm=norm: type(norm).forward(norm, x)  # noqa: E731
            right = stock if dtype == torch.float32 else lambda x, norm=norm: formula(norm, x, norm.weight)
            x = inputs(norm, dtype, heads)
            for mine, theirs in zip(passed(norm, norm.weight, x), passed(right, norm.weight, x), strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                assert difference(mine, theirs) <= limit * max(1.0, float(theirs.abs().max()))
            with torch.no_grad():
                torch.testing.assert_close(norm(x), right(x), rtol=limit, atol=0)


def test_in_16_bits_no_further_from_the_truth_than_stock(checkpoint: Path) -> None:
    ours = load(checkpoint, dtype=torch.bfloat16, device=DEVICE, fused_layers=True)
    for norm in kinds(ours):
        x = inputs(norm, torch.bfloat16)
        weight = nn.Parameter(norm.weight.detach().double())
        right = passed(lambda x, w=weight, n=norm: formula(n, x, w), weight, x.double())
        mine = passed(norm, norm.weight, x)
        stock = passed(lambda x, n=norm: type(n).forward(n, x), norm.weight, x)
        for a, b, c in zip(mine, stock, right, strict=True):
            assert a.dtype == b.dtype == torch.bfloat16
            scale = c.abs().amax(-1, keepdim=True)
            assert float(((a - c).abs() / scale).mean()) <= 1.001 * float(((b - c).abs() / scale).mean())
        with torch.no_grad():
            assert torch.equal(norm(x), mine[0])


def test_other_types_of_input_keep_the_stock_type(fresh: Backbone) -> None:
    """A weight of another type than the states, and autocast: as the class does it, bit for bit, without a warning."""
    fresh.fused_layers = True
    fresh.model.to(torch.float32)
    for norm in kinds(fresh):
        x = inputs(norm, torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mine, stock = norm(x), type(norm).forward(norm, x)
            assert mine.dtype == stock.dtype and torch.equal(mine, stock)
            with torch.autocast(x.device.type, torch.bfloat16):
                mine, stock = norm(x.float()), type(norm).forward(norm, x.float())
            assert mine.dtype == stock.dtype and torch.equal(mine, stock)


def test_all_norms_of_the_decoder_and_only_those(fresh: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fresh.fused_layers
    asked: list[int] = []
    original = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *a, **k: asked.append(1) or original(*a, **k))
    with torch.no_grad():
        batch = fresh.batch(mixed_prompts(fresh))
        prefill(fresh, batch)
        assert not asked
        fresh.fused_layers = True
        asked.clear()
        prefill(fresh, batch)
    assert len(asked) == len(norms(fresh)) > 2 * fresh.layers
    assert not any(map(fused_norms.is_fused, (m for tower in fresh.vision_modules() for m in tower.modules())))


def passes(backbone: Backbone, memory: Any = "cached", prompts: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents and log-probabilities, and the gradients of all trained parameters."""
    generator = torch.Generator().manual_seed(6)
    batch = backbone.batch(mixed_prompts(backbone)[:prompts])
    _, after, z_BKD = trajectory(backbone, batch, latents=3, memory=memory)
    ids = torch.randint(5, 200, (len(batch), 1, 4), generator=generator).to(z_BKD.device)
    logp, _, _ = score(backbone, after, ids, checkpointed=memory == "checkpointed")
    seen = torch.randn(z_BKD.shape, generator=generator).to(z_BKD)
    trained = {name: p for name, p in backbone.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((z_BKD * seen).sum() + logp.sum(), list(trained.values()), allow_unused=True)
    grads = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
    return torch.cat([z_BKD.detach().flatten(), logp.detach().flatten()]), grads


def assert_same(mine: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]], limit: float) -> None:
    assert difference(mine[0], theirs[0]) <= limit * float(theirs[0].abs().max())
    assert mine[1].keys() == theirs[1].keys()
    scale = max(float(x.abs().max()) for x in theirs[1].values())
    assert all(difference(mine[1][name], x) <= limit * scale for name, x in theirs[1].items())


@pytest.mark.parametrize("memory", ["cached", "checkpointed-prefill", "checkpointed"])
def test_passes_and_gradients_equal_plain(fresh: Backbone, memory: str) -> None:
    """The tolerance is that of float32: stock norms compute in it."""
    plain = passes(fresh, memory)
    fresh.fused_layers = True
    fused = passes(fresh, memory)
    assert_same(fused, plain, tolerance(1e-5))
    assert any("norm" in name for name in fused[1])
    fresh.fused_layers = False
    again = passes(fresh, memory)
    assert torch.equal(again[0], plain[0]) and all(torch.equal(x, again[1][name]) for name, x in plain[1].items())


def test_passes_and_gradients_in_float64(checkpoint: Path) -> None:
    """Against the definition in the place of every norm; far below what float32 inside would leave."""
    ours = load(checkpoint, dtype=torch.float64, device=DEVICE, fused_layers=True)
    if getattr(ours.text_config, "num_experts", None):
        ours.model.set_experts_implementation("eager")  # the grouped product of torch knows no float64
    fused = passes(ours)
    ours.fused_layers = False
    stock = passes(ours)
    for norm in norms(ours):
        norm.forward = lambda x, norm=norm: formula(norm, x, norm.weight)
    right = passes(ours)
    assert_same(fused, right, 1e-11)
    assert difference(stock[0], right[0]) > 1e-9


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"], indirect=True)
@pytest.mark.parametrize("order", ["norms first", "norms last"])
def test_with_adapters_and_deferred_gradients(fresh: Backbone, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LEAST", 0)
    if order == "norms first":
        fresh.fused_layers = True
    Adapters(fresh, LoraSettings(rank=2, alpha=4))
    for name, parameter in fresh.model.named_parameters():
        if ("norm" in name or "o_proj.base_layer" in name) and "visual" not in name and "vision" not in name:
            parameter.requires_grad_(True)  # so that norms, and weights that are deferred, are trained beside adapters
    assert gradients.defer_gradients(fresh.model) is not None
    fresh.fused_layers = True
    fused = passes(fresh, "checkpointed-prefill")
    assert all(map(fused_norms.is_fused, norms(fresh)))
    fresh.fused_layers = False
    assert_same(fused, passes(fresh, "checkpointed-prefill"), tolerance(1e-5))


def test_nobody_sees_a_changed_model(fresh: Backbone, tmp_path: Path) -> None:
    """Names, parameters, classes, modules and files; copies norm with their own weights."""
    model = fresh.model
    before = {name: id(x) for name, x in model.named_parameters()}
    modules = [(id(m), type(m)) for m in model.modules()]
    names = list(model.state_dict())
    fresh.fused_layers = True
    assert {name: id(x) for name, x in model.named_parameters()} == before and list(model.state_dict()) == names
    assert [(id(m), type(m)) for m in model.modules()] == modules
    again = load(fresh.save(tmp_path), dtype=fresh.dtype, device=DEVICE)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.model.state_dict().items())
    norm = norms(fresh)[0]
    stream = io.BytesIO()
    torch.save(norm, stream)
    stream.seek(0)
    for other in (copy.deepcopy(norm), torch.load(stream, weights_only=False)):
        x = inputs(norm, fresh.dtype)
        expected = norm(x)
        with torch.no_grad():
            other.weight.add_(1)
        assert fused_norms.is_fused(other) and torch.equal(norm(x), expected)
        assert difference(other(x), expected) > 0.5 and difference(other(x), type(other).forward(other, x)) < 1e-4


def test_recorded_steps_see_the_switch(fresh: Backbone) -> None:
    plain = fingerprint(fresh)
    fresh.fused_layers = True
    fused = fingerprint(fresh)
    assert fused != plain and why_not_modules(fresh, 100) == why_not_modules(load_like(fresh), 100)
    fresh.fused_layers = True  # again: nothing changes
    assert fingerprint(fresh) == fused
    fresh.fused_layers = False
    assert fingerprint(fresh) == plain


def test_recorded_steps_with_fused_norms(fresh: Backbone) -> None:
    """As a stand-in for CUDA graphs repeats them: recorded anew after the switch, and with weights as they are now."""
    fast = FastDecode(fresh, columns=8, tokens=4, recorded=True, record=op_tape.record)
    asked: dict[str, Any] = {"latents": 2, "sampling": Sampling(temperature=0.0, max_new=5, stop=None)}
    prompts = mixed_prompts(fresh)[:2]

    def check(recorded: int) -> None:
        ours, plain = rollout(fresh, prompts, fast=fast, **asked), rollout(fresh, prompts, **asked)
        assert difference(ours.latents_BKD, plain.latents_BKD) <= tolerance(1e-4)
        assert torch.equal(ours.tensors()[0], plain.tensors()[0])
        assert (fast.counts["recorded"], fast.counts["eager"]) == (recorded, 0)

    check(2)
    fresh.fused_layers = True
    check(4)
    with torch.no_grad():
        for norm in norms(fresh):
            norm.weight.mul_(1.5).add_(0.1)
    check(4)


def load_like(backbone: Backbone) -> Backbone:
    """The same model, never switched."""
    other = copy.copy(backbone)
    other.model = copy.deepcopy(backbone.model)
    other.core = other.model.model
    other.decoder = other.core.language_model
    other.fused_layers = False
    return other


class SumRMSNorm(nn.Module):
    """Called a norm, with everything that a norm has, and something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class LateRMSNorm(SumRMSNorm):
    """Epsilon outside of the root: differs for small inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class BiasRMSNorm(SumRMSNorm):
    """With a second parameter."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))


@pytest.mark.parametrize("kind", [SumRMSNorm, LateRMSNorm, BiasRMSNorm])
def test_an_unknown_norm_stays_with_one_notice(kind: type[SumRMSNorm]) -> None:
    model = nn.Sequential(kind(8), kind(8), nn.RMSNorm(8))
    with pytest.warns(UserWarning, match=f"fused norms: {kind.__name__} computes something else") as said:
        assert fused_norms.fuse(model) == 0
    assert len(said) == 1 and not any("forward" in vars(module) for module in model)


def test_a_forward_of_somebody_else_stays(fresh: Backbone) -> None:
    first, *others = norms(fresh)
    own = first.forward = type(first).forward.__get__(first)
    fresh.fused_layers = True
    assert first.forward is own and all(map(fused_norms.is_fused, others))
    fresh.fused_layers = False
    assert first.forward is own


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.skipif(DEVICE != "cpu", reason="a group of one process over gloo")
def test_weights_in_shards(fresh: Backbone, tmp_path: Path) -> None:
    """FSDP2: weights are DTensors between passes; gradients of norms arrive there."""
    fresh.fused_layers = True
    batch = fresh.batch(mixed_prompts(fresh)[:2])
    _, hidden = prefill(fresh, batch)
    hidden[..., 0].sum().backward()
    expected = {name: p.grad.clone() for name, p in fresh.decoder.named_parameters() if p.grad is not None}
    fresh.model.zero_grad(set_to_none=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for part in (*fresh.decoder.layers, fresh.decoder.norm):
            fully_shard(part, mesh=mesh)
        assert all(isinstance(norm.weight, DTensor) for norm in norms(fresh))
        _, again = prefill(fresh, batch)
        assert difference(again, hidden) == 0
        again[..., 0].sum().backward()
        found = {n: whole(p.grad) for n, p in fresh.decoder.named_parameters() if p.grad is not None}
    finally:
        torch.distributed.destroy_process_group()
    assert "norm.weight" in found and expected.keys() == found.keys()
    assert all(difference(found[name], x) <= 1e-12 for name, x in expected.items())
