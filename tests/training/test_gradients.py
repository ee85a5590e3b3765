"""Deferred weight gradients against plain autograd: every parameter, every memory mode, through the real loop; and what
they save.

Measured in float64: 3e-16 relative. In bfloat16 they are nearer to the float64 truth than autograd's.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memory as benchmark
from engine_runs import assert_same_model, assert_same_steps, train
from live_memory import LiveMemory
from realvr.backbone import Backbone
from realvr.training import gradients, loop
from realvr.training.adapters import Adapters
from realvr.training.estimate import Setup, decoder_of, estimate, weights_of
from realvr.training.gradients import Deferral, DeferredLinear, defer_gradients
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.sections import LoraSettings
from stage_runs import configure, lines, make, numbers, world, write

CASE = benchmark.Case("", "", grid=(4, 6), group=3, answer=6, latents=3, rows=2)
MODES = ("cached", "checkpointed-prefill", "checkpointed")
FAMILIES = ("qwen2.5-vl", "qwen3-vl", "gemma3", "internvl3", "qwen3-vl-moe")


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LEAST", 0)
    monkeypatch.setattr(gradients, "FEW_ROWS", 8)  # prompt and replay have more, latent steps fewer


# ---------------------------------------------------------------------- what autograd promises


class Net(nn.Module):
    """A recurrence: one weight, one pass of 16 rows and three of two rows."""

    def __init__(self, deferral: Deferral | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        for parameter in self.layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.x = nn.Parameter(torch.randn(2, 8, 4, generator=generator, dtype=torch.float64))
        if deferral is not None:
            self.layer = DeferredLinear(self.layer, deferral)

    def forward(self, again: bool = False) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.layer(x).tanh()

        def step(x: Tensor) -> Tensor:
            return checkpoint(run, x, use_reentrant=False) if again else run(x)

        prompt = step(self.x)
        z = prompt[:, -1:]
        for _ in range(3):
            z = step(z + prompt.mean(1, keepdim=True))
        return (z * torch.arange(4)).sum() + prompt.square().sum()


def named(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == right.keys() and right
    floor = 1e-9 * max(float(g.norm()) for g in right.values())
    for name, gradient in right.items():
        assert float((found[name] - gradient).norm()) <= tolerance * max(float(gradient.norm()), floor), name


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("straight", [False, True], ids=["returned", "into .grad"])
def test_backward(again: bool, straight: bool) -> None:
    plain, deferral = Net(), Deferral()
    ours = Net(deferral)
    for _ in range(2):  # the second is added to the first
        plain(again).backward()
        with deferral.into_grad() if straight else nullcontext():
            ours(again).backward()
    same(named(ours), named(plain))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_other_ways_backward(again: bool) -> None:
    """``torch.autograd.grad``; a pass that leaves the weight out, and one after it; a graph that is used twice; two
    graphs at once; parts without gradient."""
    plain, deferral = Net(), Deferral()
    ours = Net(deferral)
    for wanted in ([0, 1, 2], [1], [0]):
        found, right = (
            torch.autograd.grad(net(again), [list(net.parameters())[i] for i in wanted]) for net in (ours, plain)
        )
        for one, other in zip(found, right, strict=True):
            assert torch.allclose(one, other, rtol=1e-12)
    assert not named(ours)
    for net in (ours, plain):
        loss = net(again)
        loss.backward(inputs=[net.x], retain_graph=True)
        assert net.layer.weight.grad is None
        loss.backward(retain_graph=True)
        loss.backward()
        one, other = net(again), net(again) * 3
        one.backward()
        other.backward()
    same(named(ours), named(plain))
    for net in (ours, plain):
        net.zero_grad()
        net.layer.weight.requires_grad_(False)
        net(again).backward()
        net.layer.weight.requires_grad_(True)
        net.layer.bias.requires_grad_(False)
        net(again).backward()
    same(named(ours), named(plain))


def test_hooks_of_a_weight_see_the_whole_gradient() -> None:
    deferral, seen = Deferral(), []
    ours, plain = Net(deferral), Net()
    ours.layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with deferral.into_grad():
        ours().backward()
    plain().backward()
    assert len(seen) == 1 and torch.allclose(seen[0], plain.layer.weight.grad, rtol=1e-12)
    same(named(ours), named(plain))


def test_a_graph_is_freed_and_a_copy_is_independent() -> None:
    ours = Net(Deferral())
    ours(True).backward()  # what torch does at the first time is not looked at
    ours.zero_grad()
    gc.collect()
    gc.disable()
    try:
        loss = ours(True)
        shared = ours.layer._shared
        assert shared is not None and shared() is not None
        twin = copy.deepcopy(ours)
        twin(True).backward()
        assert ours.layer.weight.grad is None and twin.layer.weight.grad is not None
        loss.backward()
        del loss
        assert shared() is None  # without the collector of cycles
    finally:
        gc.enable()


# ---------------------------------------------------------------------- whole steps


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    """Such as one that is out of memory: what was kept so far is in no circle with its graph."""
    net = Net(Deferral())
    net().backward()
    net.zero_grad()

    def fail(_: Tensor) -> None:
        raise MemoryError("out of memory")

    with LiveMemory(net) as memory:
        kept = net.x * 1
        hidden = net.layer(kept[:, :2])
        hidden.register_hook(fail)
        with pytest.raises(MemoryError):
            net.layer(hidden.tanh()).sum().backward()
        del kept, hidden
        gc.collect()
    assert memory.now == 0


@pytest.fixture(scope="module")
def loaded(build_tiny: Callable[[str], Path]) -> Callable[..., Backbone]:
    def load(family: str, dtype: torch.dtype = torch.float64, markers: bool = False) -> Backbone:
        backbone = Backbone.load(build_tiny(family), dtype=dtype, device="cpu")
        torch.manual_seed(1)
        Adapters(backbone, LoraSettings(), markers=markers)
        return backbone

    return load


def measured(
    backbone: Backbone, module: Step, batches: list[Any], deferral: Deferral | None = None, term: str | None = None
) -> dict[str, Tensor]:
    """Gradients of every parameter, summed over the microbatches."""
    for batch in batches:
        loss, _ = module(batch, term=term)
        with deferral.into_grad() if deferral is not None else nullcontext():
            loss.backward()
    found = named(backbone.model)
    backbone.model.zero_grad(set_to_none=True)
    return found


def compare(backbone: Backbone, modules: list[tuple[Step, str | None]], batches: list[Any], tolerance: float) -> int:
    """Everything with autograd, then with deferral, returned and straight; the number of deferred layers."""
    right = [measured(backbone, module, batches, term=term) for module, term in modules]
    deferral = defer_gradients(backbone.model)
    assert deferral is not None
    for (module, term), expected in zip(modules, right, strict=True):
        same(measured(backbone, module, batches, term=term), expected, tolerance)
        same(measured(backbone, module, batches, deferral, term=term), expected, tolerance)
    return sum(isinstance(module, DeferredLinear) for module in backbone.model.modules())


def rl_batches(backbone: Backbone, beta: float = 0.0, **changes: Any) -> list[Any]:
    """Two microbatches of different length."""
    case = replace(CASE, microbatches=2, **changes)
    batches = [benchmark.rl_batch(backbone, replace(case, grid=grid)) for grid in (case.grid, (3, 5))]
    for batch in batches if beta else ():
        batch.ref_logp_BGS = batch.old_logp_BGS + 0.3
    return batches


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", [f if f in FAMILIES[:2] else pytest.param(f, marks=SLOW) for f in FAMILIES])
def test_stage_two_step(loaded: Callable[..., Backbone], family: str) -> None:
    """All memory modes, each term alone, a KL; two microbatches."""
    wide = family != "qwen3-vl-moe"  # grouped products of experts have no float64
    backbone = loaded(family, torch.float64 if wide else torch.float32)
    modes = {memory: Step(ReaLVR(backbone, ReaLVRConfig(type="realvr", memory=memory, beta=0.1))) for memory in MODES}
    modules = [(module, None) for module in modes.values()]
    modules += [(modes["cached"], term) for term in ("policy", "evidence")]
    count = compare(backbone, modules, rl_batches(backbone, beta=0.1), 1e-12 if wide else 1e-4)
    assert count == (7 if wide else 4) * backbone.layers + 1


def test_stage_one_step(loaded: Callable[..., Backbone]) -> None:
    backbone = loaded("qwen2.5-vl", markers=True)
    modules = [Step(LvrSft(backbone, LvrSftConfig(gradient_checkpointing=again))) for again in (False, True)]
    batches = [benchmark.sft_batch(backbone, replace(CASE, rows=1)) for _ in range(2)]
    compare(backbone, [(modules[0], None), (modules[1], None), (modules[0], "reconstruction")], batches, 1e-12)


def test_sixteen_bits_are_nearer_to_the_truth() -> None:
    """The same 16-bit activations and gradients, multiplied out in float64, against both ways in 16 bits."""
    errors: dict[str, list[float]] = {"autograd": [], "deferred": []}
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        layer = nn.Linear(48, 40, bias=False, dtype=torch.bfloat16)
        passes = [
            (torch.randn(n, 48, generator=generator).bfloat16(), torch.randn(n, 40, generator=generator).bfloat16())
            for n in (200, 96, *[2] * 8)
        ]
        truth = sum((g.double().T @ x.double() for x, g in passes), torch.zeros(40, 48, dtype=torch.float64))
        deferral = Deferral()
        for name, module in (("autograd", layer), ("deferred", DeferredLinear(layer, deferral))):
            layer.weight.grad = None
            loss = sum((module(x) * g).sum() for x, g in passes)
            with deferral.into_grad():
                loss.backward()
            errors[name].append(float((layer.weight.grad.double() - truth).norm() / truth.norm()))
    assert sum(errors["deferred"]) < 0.95 * sum(errors["autograd"])


# ---------------------------------------------------------------------- what it saves


class Products(TorchDispatchMode):
    """Counts products and sums that are as large as one of the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        self.shapes = {tuple(w.shape) for w in linears} | {tuple(w.shape[::-1]) for w in linears}
        self.products = self.sums = self.all = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        large = isinstance(result, Tensor) and tuple(result.shape) in self.shapes
        self.products += large and name in ("mm", "addmm", "addmm_")
        self.sums += large and name in ("add", "add_")
        self.all += 1
        return result


def test_one_product_for_all_latent_steps(loaded: Callable[..., Backbone]) -> None:
    """Per weight: prompt, span of the replay, completions and all latent steps; and no sums beside them."""
    backbone = loaded("qwen2.5-vl")
    (batch,) = rl_batches(backbone, rows=1, latents=12, answer=9)[:1]
    module = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr", memory="cached")))
    counts = {}
    for name in ("autograd", "deferred"):
        deferral = defer_gradients(backbone.model) if name == "deferred" else Deferral()
        assert deferral is not None
        loss, _ = module(batch)
        with Products(backbone.model) as found, deferral.into_grad():
            loss.backward()
        counts[name] = found
        backbone.model.zero_grad()
    weights = 7 * backbone.layers
    assert counts["autograd"].products >= weights * (3 + 12)
    assert counts["deferred"].products < weights * 5  # few others happen to have the size of a weight
    assert counts["deferred"].sums <= 8 < weights * 12 <= counts["autograd"].sums  # those left are of the embedding


def deeper(folder: Path, source: Path, rank: int = 0) -> Backbone:
    """A tiny model whose decoder layers outweigh its tables and activations."""
    import json

    from transformers import AutoConfig, AutoModelForImageTextToText

    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"num_hidden_layers": 12, "intermediate_size": 512}
    if kinds := raw["text_config"].get("layer_types"):
        raw["text_config"]["layer_types"] = (kinds * 12)[:12]
    (folder / "config.json").write_text(json.dumps(raw))
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    backbone = Backbone.load(folder, dtype=torch.bfloat16, device="cpu")
    Adapters(backbone, LoraSettings(rank=rank))
    return backbone


def peak_and_estimate(backbone: Backbone, case: Any, module: Step, batch: Any, deferred: bool) -> tuple[int, float]:
    """Most bytes alive in two microbatches, and what the estimate says."""
    deferral = (defer_gradients(backbone.model) if deferred else None) or Deferral()
    backbone.model.zero_grad()
    with LiveMemory(backbone.model) as memory:
        for _ in range(2):
            loss, _ = module(batch)
            with deferral.into_grad():
                loss.backward()
            del loss, _
    work = replace(benchmark.workload(backbone, case, batch), visual=0)
    found = estimate(decoder_of(backbone.model), weights_of(backbone.model), work, Setup(deferred=deferred))
    given = ("frozen weights", "trained weights", "optimizer")
    return memory.peak, max(
        sum(size for part, size in parts.items() if part not in given)
        for moment, parts in found.moments.items()
        if moment not in ("update", "rollout")
    )


def test_adapters_have_a_second_copy(build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """However large they are: autograd adds up their gradients, and the estimate knows."""
    backbone = deeper(tmp_path, build_tiny("qwen2.5-vl"), rank=32)
    case = replace(CASE, rows=1, microbatches=2, memory="checkpointed", grid=(2, 3), answer=3)
    batch = benchmark.rl_batch(backbone, case)
    module = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr", memory="checkpointed")))
    whole = sum(p.numel() * p.element_size() for p in backbone.model.parameters() if p.requires_grad)
    peak, expected = peak_and_estimate(backbone, case, module, batch, deferred=True)
    assert expected == pytest.approx(peak, rel=0.15) and peak > 1.9 * whole


def test_no_second_copy_of_gradients(build_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Bytes alive in the second of two microbatches, beside the gradients of the first; and the estimate of them."""
    backbone = deeper(tmp_path, build_tiny("qwen2.5-vl"))
    case = replace(CASE, rows=1, microbatches=2, memory="checkpointed", grid=(2, 3), answer=3)
    batch = benchmark.rl_batch(backbone, case)
    module = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr", memory="checkpointed")))
    whole = sum(p.numel() * p.element_size() for p in backbone.model.parameters() if p.requires_grad)
    peaks = {}
    for name in ("autograd", "deferred"):
        peaks[name], expected = peak_and_estimate(backbone, case, module, batch, deferred=name == "deferred")
        assert expected == pytest.approx(peaks[name], rel=0.15), name
    assert peaks["autograd"] - peaks["deferred"] > 0.6 * whole


# ---------------------------------------------------------------------- the real loop


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("rl", {"max_new": 6, "beta": 0.05, "memory": "checkpointed-prefill"}),
        pytest.param("sft", {"pack_tokens": 256}, marks=SLOW),
    ],
    ids=["rl", "sft"],
)
def test_a_run_is_the_same(kind: str, changes: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    """Losses, norms of the whole and of single terms, weights and exported names; two microbatches a step."""
    data = write(world(4), tmp_path / "data")
    changes = {**changes, "model": {"dtype": "float64"}, "log": {"parts_every": 2}}
    kinds = {}
    for way in ("autograd", "deferred"):
        optim = {"steps": 3, "batch": 2, "microbatch": 1, "gradients": way}
        task, settings, engine = make(kind, configure(kind, trained, data, tmp_path / way, optim=optim, **changes))
        assert loop.train(task, settings, engine) == 0
        kinds[way] = {type(inner) for inner in task.backbone.model.modules()}
    assert DeferredLinear in kinds["deferred"] and DeferredLinear not in kinds["autograd"]
    first, second = (numbers(lines(tmp_path / way)) for way in ("autograd", "deferred"))
    assert len(first) == 3 and any(name.startswith("grad_norm/") for name in first[1])
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12, nan_ok=True)
    states = [Backbone.load(tmp_path / way / "final", dtype="float64").model.state_dict() for way in kinds]
    same(states[1], states[0], 1e-7)  # `final` is written in 32 bits


@pytest.mark.slow
def test_two_ranks(trained: Path, tmp_path: Path) -> None:
    """DDP sees every gradient once, and averages it."""
    data = write(world(4), tmp_path / "data")
    plugin = tmp_path / "small_too.py"
    plugin.write_text(
        "from realvr.training import gradients\nfrom realvr.training.methods.realvr import ReaLVR\n\n"
        "gradients.LEAST, gradients.FEW_ROWS = 0, 8\n\n\n"
        'class SmallToo(ReaLVR):\n    """A plugin has to define something."""\n\n    name = "small-too"\n'
    )
    runs = {}
    for way in ("autograd", "deferred"):
        optim = {"steps": 3, "batch": 4, "microbatch": 1, "gradients": way}
        raw = configure(
            "rl", trained, data, tmp_path / way, model={"dtype": "float64"}, max_new=6, optim=optim,
            log={"parts_every": 2},
        )  # fmt: skip
        train("rl", raw, "--plugin", str(plugin))
        runs[way] = tmp_path / way
    assert_same_steps(runs["autograd"], runs["deferred"], rel=1e-8, abs=1e-11)
    assert_same_model(runs["autograd"], runs["deferred"], trained, tolerance=1e-6)
