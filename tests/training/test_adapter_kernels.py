"""Our Triton kernels for adapted layers on the CPU: run by Triton's interpreter against the definitions, compiled for
GPUs, and launched as far as a launch goes without one; and where the package uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

import op_tape
from memory import Case, rl_batch
from realvr.backbone import Backbone
from realvr.backbone.automatic import Where
from realvr.backbone.notices import notice_once
from realvr.latent import span_recording
from realvr.latent.recorded_span import RecordedSpan
from realvr.training import adapter_kernels, low_rank
from realvr.training.adapters import Adapters
from realvr.training.method import Step
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.sections import LoraSettings
from realvr.training.thin_lora import ThinLinear, thin

TESTS = Path(__file__).parents[1]
BF16, CPU = torch.bfloat16, torch.device("cpu")
INTERPRETED = {"TRITON_INTERPRET": "1"}


def cases(script: str, what: str, **variables: str) -> dict[str, float]:
    """What each line of a script says."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / f"{script}.py"), what],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.rsplit(" ", 1) for line in ran.stdout.splitlines()]
    assert len({name for name, _ in lines}) == len(lines)
    return {name: float(number) for name, number in lines}


# ---------------------------------------------------------------------- the kernels themselves


def test_numbers() -> None:
    """As the interpreter multiplies by itself, and with factors in three bfloat16 parts, as on a GPU."""
    found = cases("adapter_kernel_cases", "numbers", **INTERPRETED)
    ways = [f"{name} {how}" for how in ("in 32 bits", "in thirds") for name in ("narrow", "summed", "widen", "kept")]
    assert set(found) == {
        *ways,
        "gaps in 32 bits",
        "gaps in thirds",
        "short parts of 1100 columns",
        "short parts of 20 columns",
    }
    assert all(error < 2.5e-6 for error in found.values()), found
    assert found["gaps in thirds"] < adapter_kernels.TOLERANCE / 20


def test_broken_kernels_are_refused() -> None:
    found = cases("adapter_kernel_cases", "refused", **INTERPRETED)
    assert {"right", "right, rank 1", "sums in 16 bits", "widen, base", "summed, not a number"} <= set(found)
    assert len(found) == 26 and not any(found.values()), found


def test_layers() -> None:
    """Output and gradients, in all ways in which layers are called in training."""
    found = cases("adapter_layer_cases", "wired", **INTERPRETED)
    assert len(found) == 4 * 12 and all(error < 4e-6 for error in found.values()), found


@pytest.mark.slow
def test_a_step_of_stage_two_is_as_near_to_32_bits_as_that_of_peft() -> None:
    found = cases("adapter_layer_cases", "step", **INTERPRETED)
    assert set(found) == {"loss", "gradients", "gradients at all"}
    assert all(number <= 0 for number in found.values()), found


def test_a_launch_takes_the_compiled_kernel_that_triton_would_take(tmp_path: Path) -> None:
    """For other numbers of rows, places, strides and formats; the launcher refuses what a kernel was not compiled
    for."""
    (said,) = cases("adapter_kernel_cases", "launched", TRITON_CACHE_DIR=str(tmp_path))
    assert said.startswith("launches")


def test_each_device_has_compiled_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that belongs to another GPU must not be launched."""
    asked: list[torch.device] = []
    used: list[tuple[torch.device, torch.device]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def compile_for(x: Tensor, *_: Any, **__: Any) -> Any:
                asked.append(x.device)
                return Made(x.device)

            return compile_for

    class Made:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda x, *_: used.append((self.device, x.device))

    monkeypatch.setattr(adapter_kernels, "_kernels", lambda: SimpleNamespace(narrow=Kernel()))
    monkeypatch.setattr(adapter_kernels, "_compiled", {})
    monkeypatch.setattr(adapter_kernels, "_processors", lambda _: 4)
    for place in ("cpu", "meta") * 2:
        adapter_kernels.narrow(torch.empty(3, 64, dtype=BF16, device=place), torch.empty(64, 16, device=place))
    assert [device.type for device in asked] == ["cpu", "meta"]
    assert len(used) == 2 and all(made == given for made, given in used)


@pytest.mark.slow
def test_they_compile_for_gpus(tmp_path: Path) -> None:
    """Within what a multiprocessor has on the chip: 163 KiB of an A100, 99 of an RTX 3090, 227 of an H200."""
    found = cases("adapter_kernel_cases", "compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 9
    for line, shared in found.items():
        assert shared <= {"80": 163, "86": 99, "90": 227}[line.split()[1]], line


@pytest.mark.parametrize("processors", [4, 82, 132])
def test_sums_are_cut_without_gaps_into_parts_whose_places_have_31_bits(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(adapter_kernels, "_processors", lambda _: processors)
    limits = adapter_kernels.PARTS, adapter_kernels.PARTS_OF_FEW
    for size in (1, 16, 17, 75, 512, 3584, 18_944, 152_064, 200_000):
        for step in (16, 32, 64, 128):
            for most in limits:
                for others in (1, 2, 43, 339, 3125):
                    per, parts = adapter_kernels._cut(size, step, most, others, CPU)
                    assert per % step == 0 and 0 < per <= adapter_kernels.TERMS
                    assert per * (parts - 1) < size <= per * parts
                    assert parts <= max(most, -(-size // adapter_kernels.TERMS))
    # Parts of a sum are found by products of 32-bit numbers.
    for rows in (16, 8 * 2709, 200_000):
        for columns in (512, 18_944, 152_064):
            tiles = -(-rows // adapter_kernels.NARROW[0])
            _, parts = adapter_kernels._cut(columns, 32, limits[rows <= adapter_kernels.FEW], tiles, CPU)
            assert parts * rows * adapter_kernels.MOST_RANK < 2**31
            _, parts = adapter_kernels._cut(rows, 64, limits[0], -(-columns // adapter_kernels.SUMMED[1]), CPU)
            assert parts * columns * adapter_kernels.MOST_RANK < 2**31


def test_the_largest_error_counts_what_is_no_number() -> None:
    for errors in ([1e-6, float("nan")], [float("nan"), 1e-6], [float("inf")]):
        assert adapter_kernels.max_of(errors) == float("inf")
    assert adapter_kernels.max_of([1e-6, 3e-6]) == 3e-6


# ---------------------------------------------------------------------- which layers have them


@pytest.fixture
def tiny(build_tiny: Callable[[str], Path]) -> Callable[..., Backbone]:
    return lambda dtype=BF16: Backbone.load(build_tiny("qwen2.5-vl"), dtype=dtype, device="cpu")


def layers_of(adapters: Adapters) -> list[ThinLinear]:
    return [module for module in adapters.peft.modules() if isinstance(module, ThinLinear)]


def compared(gap: Callable[[int, int], float]) -> Callable[..., list[float]]:
    """Stands for the comparison, which needs a GPU."""

    def gaps(device: torch.device, rank: int, inputs: int, outputs: int, rows: int) -> list[float]:
        return [1e-6, gap(inputs, outputs)]

    return gaps


def test_kernels_are_used_on_an_nvidia_gpu_in_bfloat16_where_they_are_wanted(
    tiny: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *_: 1e-6))
    for device, dtype, wanted, amd in (
        (gpu, BF16, True, None),
        (gpu, BF16, True, "6.2"),
        (gpu, BF16, False, None),
        (gpu, torch.float32, True, None),
        (gpu, torch.float16, True, None),
        (CPU, BF16, True, None),
    ):
        backbone = tiny(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(Backbone, "device", property(lambda _, found=device: found))
            patch.setattr(torch.version, "hip", amd)
            adapters = Adapters(backbone, LoraSettings(rank=4, kernels=wanted))
        right = gpu if (device, dtype, wanted, amd) == (gpu, BF16, True, None) else None
        assert {layer.kernels for layer in layers_of(adapters)} == {right}


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl-moe"])
def test_by_default_kernels_are_for_dense_models(
    family: str, build_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts has them where they are asked for."""
    gpu, of = torch.device("cuda", 0), Where.of
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *_: 1e-6))
    assert LoraSettings().kernels == "auto"
    for wanted in ("auto", True, False):
        backbone = Backbone.load(build_tiny(family), dtype=BF16, device="cpu")
        found = replace(of(backbone), cuda=True)
        with monkeypatch.context() as patch:
            patch.setattr(Backbone, "device", property(lambda _: gpu))
            patch.setattr(Where, "of", lambda _, found=found: found)
            adapters = Adapters(backbone, LoraSettings(rank=4, kernels=wanted))
        right = wanted is True or (wanted == "auto" and family != "qwen3-vl-moe")
        assert {layer.kernels for layer in layers_of(adapters)} == {gpu if right else None}


def test_a_shape_that_is_wrong_leaves_out_its_layers_with_one_notice(
    tiny: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    notice_once.cache_clear()
    adapters = Adapters(tiny(), LoraSettings(rank=4))
    layers = layers_of(adapters)
    shapes = sorted({layer.widths for layer in layers})
    assert len(shapes) >= 3 and len(layers) > len(shapes)
    wrong = shapes[1:]
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *widths: float("nan") if widths in wrong else 4.9e-5))
    with pytest.warns(UserWarning, match="adapters of layers") as notices:
        adapters.use_kernels(CPU)
    assert {layer.widths for layer in layers if layer.kernels == CPU} == {shapes[0]}
    assert {layer.widths for layer in layers if layer.kernels is None} == set(wrong)
    named = ", ".join(f"{inputs} x {outputs}" for inputs, outputs in wrong)
    (notice,) = (str(notice.message) for notice in notices)
    assert notice == (f"adapters of layers of {named}: operations of torch instead of our kernels (relative error inf)")
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *_: 5.1e-5))
    with pytest.warns(UserWarning, match="relative error 5.1e-05"):
        adapters.use_kernels(CPU)
    assert {layer.kernels for layer in layers} == {None}
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *_: 4.9e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters.use_kernels(CPU)
    assert {layer.kernels for layer in layers} == {CPU}


def test_what_does_not_run_is_left_out_with_a_notice(
    tiny: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton, for a high rank, and where it fails: Triton itself, for want of a GPU."""
    notice_once.cache_clear()
    adapters = Adapters(tiny(), LoraSettings(rank=65))
    with pytest.warns(UserWarning, match="rank 65 is above 64"):
        adapters.use_kernels(CPU)
    adapters = Adapters(tiny(), LoraSettings(rank=4))
    with monkeypatch.context() as patch:
        patch.setattr(adapter_kernels, "find_spec", lambda name: None)
        adapter_kernels.installed.cache_clear()
        with pytest.warns(UserWarning, match="there is no Triton"):
            adapters.use_kernels(CPU)
    adapter_kernels.installed.cache_clear()
    pytest.importorskip("triton")
    assert adapter_kernels.installed()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match=r"instead of our kernels \(RuntimeError: "):
            adapters.use_kernels(CPU)
    assert {layer.kernels for layer in layers_of(adapters)} == {None}


def test_want_of_memory_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception, *_: object) -> list[float]:
        raise error

    for error in (torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")):
        monkeypatch.setattr(adapter_kernels, "gaps", partial(fail, error))
        with pytest.raises(type(error)):
            adapter_kernels.wrong(CPU, 4, 16, 16)
    monkeypatch.setattr(adapter_kernels, "gaps", partial(fail, ValueError("no such\ninstruction" + 400 * ".")))
    why = adapter_kernels.wrong(CPU, 4, 16, 16)
    assert why.startswith("ValueError: no such instruction..") and len(why) == 300


# ---------------------------------------------------------------------- which passes go through them


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each pass that would go through the kernels, which need a GPU; whether it keeps what a backward pass
    needs."""
    found: list[bool] = []

    def stands(x: Tensor, base: nn.Linear, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        assert (base.weight.shape, scaling) == ((up.shape[0], down.shape[1]), 2.0)
        found.append(torch.is_grad_enabled())
        return base(x)

    monkeypatch.setattr(low_rank, "adapted", stands)
    return found


def layer(own: bool = True, bias: bool = True, base: type[nn.Linear] = nn.Linear, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(base(24, 56, bias=bias)).to(BF16)
    made: Any = get_peft_model(net, thin(LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["0"]} | options)))
    found = made.base_model.model[0]
    found.lora_B["default"].weight.data.normal_()
    if own:
        found.kernels = CPU
    else:
        found.__class__ = Linear
    return found


def test_plain_layers_go_through_them(used: list[bool]) -> None:
    x = torch.randn(2, 3, 24).to(BF16)
    layer()(x), layer(bias=False)(x[:1, :1]), layer(lora_dropout=0.5).eval()(x)
    with torch.no_grad():
        layer()(x)
    assert used == [True, True, True, False]


class Shard(Tensor):
    """Of a class of its own, as the weights of an engine that cuts them."""


class Own(nn.Linear):
    """A layer of another kind."""


def _hook(of: str, register: str) -> Callable[[Any], None]:
    def change(adapted: Any) -> None:
        part = adapted.base_layer if of == "base" else getattr(adapted, of)["default"]
        getattr(part, register)(lambda *_: None)

    return change


def _trained(name: str) -> Callable[[Any], None]:
    return lambda adapted: getattr(adapted.base_layer, name).requires_grad_()


def _cut_up(adapted: Any) -> None:
    weight = adapted.base_layer.weight.detach()
    adapted.base_layer.weight = nn.Parameter(weight.as_subclass(Shard), requires_grad=False)


def _in_16_bits(adapted: Any) -> None:
    adapted.lora_A["default"].to(BF16), adapted.lora_B["default"].to(BF16)


def _somewhere(device: torch.device | None) -> Callable[[Any], None]:
    return lambda adapted: setattr(adapted, "kernels", device)


OTHERWISE: dict[str, Callable[[Any], object]] = {
    "hook before A": _hook("lora_A", "register_forward_pre_hook"),
    "hook behind B": _hook("lora_B", "register_forward_hook"),
    "hook before the layer": _hook("base", "register_forward_pre_hook"),
    "hook behind the layer": _hook("base", "register_forward_hook"),
    "hook of gradients": _hook("base", "register_full_backward_hook"),
    "merged": lambda adapted: adapted.merge(),
    "disabled": lambda adapted: adapted.enable_adapters(False),
    "trained weight": _trained("weight"),
    "trained bias": _trained("bias"),
    "a part of the weight": _cut_up,
    "adapter in 16 bits": _in_16_bits,
    "another device": _somewhere(torch.device("cuda", 0)),
    "another device of the kind": _somewhere(torch.device("cpu", 1)),
    "nowhere": _somewhere(None),
    "in 32 bits": lambda adapted: adapted.float(),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_layers_that_are_not_plain_go_the_way_of_peft(what: str, used: list[bool]) -> None:
    """Bit for bit."""
    x = torch.randn(2, 3, 24).to(torch.float32 if what == "in 32 bits" else BF16)
    found = []
    for own in (True, False):
        adapted = layer(own)
        OTHERWISE[what](adapted)
        found.append(adapted(x))
        with torch.no_grad():
            found.append(adapted(x))
    assert not used
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_passes_that_are_not_plain_go_the_way_of_peft(used: list[bool]) -> None:
    x = torch.randn(2, 3, 24).to(BF16)

    def passed(own: bool) -> list[Tensor]:
        found = [layer(own, base=Own)(x)] if own else [layer(own)(x)]
        found.append(layer(own)(x[:, :0]))
        found.append(layer(own, use_dora=True)(x))
        torch.manual_seed(1)
        found.append(layer(own, lora_dropout=0.5)(x))
        with torch.autocast("cpu", BF16):
            found.append(layer(own)(x))
        several = layer(own).eval()
        found.append(several(x, adapter_names=["default", "__base__"]))
        return found

    mine, right = passed(True), passed(False)
    assert not used
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_a_recorded_span_learns_through_them_what_a_plain_one_does(
    tiny: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of two steps, the second after an update in place. Definitions, which can be recorded on a
    CPU, stand for the kernels."""

    def narrow(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        return (scale * x.float() @ weight)[None]

    def widen(inner: Tensor, weight: Tensor, scale: float, base: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
        return base.copy_(base.float() + scale * inner.sum(0) @ weight), inner.sum(0)

    def summed(inner: Tensor, x: Tensor, scale: float = 1.0, turned: bool = False) -> Tensor:
        found = scale * inner.t() @ x.float()
        return found.t().contiguous() if turned else found

    for name, definition in (("narrow", narrow), ("widen", widen), ("summed", summed)):
        monkeypatch.setattr(adapter_kernels, name, definition)
    monkeypatch.setattr(adapter_kernels, "wrong", lambda *_: "")
    found, batch = [], None
    for record in (None, op_tape.record):
        backbone = tiny()
        torch.manual_seed(0)
        adapters = Adapters(backbone, LoraSettings(rank=4, alpha=8))
        adapters.use_kernels(CPU)
        for each in layers_of(adapters):
            each.lora_B["default"].weight.data.normal_(std=0.05)
        batch = batch or rl_batch(backbone, Case("", "", grid=(2, 2), group=2, answer=3, latents=2, rows=1))
        method = ReaLVR(backbone, ReaLVRConfig(type="realvr", split_attention=True))
        method.recorded = record and RecordedSpan(backbone, record=record)
        trained = [p for p in backbone.model.parameters() if p.requires_grad]
        for step in range(2):
            loss, _ = Step(method)(batch)
            found.append([loss.detach(), *torch.autograd.grad(loss, trained)])
            with torch.no_grad():  # both by the same signs: those of tiny gradients may differ
                torch._foreach_add_(trained, torch._foreach_sign(found[step][1:]), alpha=0.01)
        if method.recorded is not None:
            assert method.recorded.counts == {"recorded": 1, "replayed": 2}
    plain, recorded = found[:2], found[2:]
    assert not torch.equal(plain[0][0], plain[1][0])
    # Gradients of the prompt's keys and values, which have 16 bits, are rounded at other places.
    for right, mine in zip(plain, recorded, strict=True):
        assert torch.equal(mine[0], right[0])
        assert all(float((a - b).norm()) < 0.01 * float(b.norm()) for a, b in zip(mine, right, strict=True))


def test_layers_of_a_model_go_through_them_and_its_reference_does_not(
    tiny: Callable[..., Backbone], used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_kernels, "gaps", compared(lambda *_: 1e-6))
    backbone = tiny()
    adapters = Adapters(backbone, LoraSettings(rank=4, alpha=8))
    adapters.use_kernels(CPU)
    for each in layers_of(adapters):
        x = torch.randn(3, each.widths[0]).to(BF16)
        with adapters.reference():
            each(x)
        assert not used
        each(x)
        assert used.pop()
        with span_recording._aliased(backbone):  # as a recorded span calls it
            each(x)
        assert used.pop()
