"""Cases for `training/test_adapter_kernels.py`, in a process of its own, as `adapter_kernel_cases`.

TRITON_INTERPRET=1 python tests/adapter_layer_cases.py wired     (where layers call the kernels)
TRITON_INTERPRET=1 python tests/adapter_layer_cases.py step      (in a whole step of Stage 2)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pretend_triton
from adapter_kernel_cases import BF16, CPU, SCALE, as_on_a_gpu, changed, kernels, noise, off

sys.path += [str(Path(__file__).parents[1] / name) for name in ("scripts", "benchmarks")]


def layer(rank: int, bias: bool, inputs: int = 70, outputs: int = 90) -> Any:
    """A bfloat16 layer with a 32-bit adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    from realvr.training.thin_lora import thin

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).to(BF16)
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=["0"])  # type: ignore[arg-type]
    made: Any = get_peft_model(net, thin(config)).base_model.model[0]
    made.lora_B["default"].weight.data.normal_()
    made.kernels = CPU
    return made


def equations(adapted: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """In float64, but for the products with the frozen weight, which a layer rounds by itself."""
    base = adapted.base_layer
    a, b = (part["default"].weight.detach().double() for part in (adapted.lora_A, adapted.lora_B))
    x_NI, grad_NO = (t.detach().reshape(-1, t.shape[-1]) for t in (x, grad))
    wide_x, wide_grad = x_NI.double(), grad_NO.double()
    out = nn.functional.linear(x_NI, base.weight, base.bias).double() + SCALE * (wide_x @ a.t()) @ b.t()
    return {
        "out": out.view(*x.shape[:-1], -1),
        "input": ((grad_NO @ base.weight).double() + SCALE * (wide_grad @ b) @ a).view(x.shape),
        "A": SCALE * (wide_grad @ b).t() @ wide_x,
        "B": SCALE * wide_grad.t() @ (wide_x @ a.t()),
    }


def learnt(adapted: Any, x: Tensor, grad: Tensor, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
    out = run(x)
    out.backward(grad)
    weights = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    assert adapted.base_layer.weight.grad is None
    return {"out": out.detach(), "input": x.grad, "A": weights[0].grad, "B": weights[1].grad}


def counting() -> Any:
    """The launch as on a GPU; the names of what it has launched are kept."""
    names: list[str] = []

    def counted(name: str, *given: Any) -> None:
        names.append(name)
        as_on_a_gpu(name, *given)

    return names, changed(_launch=counted)


FORWARD, BACKWARD = ["narrow", "widen"], ["summed", "narrow", "widen", "summed"]


def wired() -> None:
    """Prints ``name error`` lines: layers as they are called in training."""
    pretend_triton.round_as_a_gpu()
    launched, used = counting()
    with used:
        for rank, bias, shape in ((4, True, (1, 3)), (4, False, (2, 75)), (33, True, (1, 1)), (16, False, (140,))):
            for name, how in WAYS.items():
                adapted = layer(rank, bias)
                x, grad = noise(*shape, 70).to(BF16), noise(*shape, 90).to(BF16)
                if name == "turned input":  # neither rows nor columns are where they would be
                    x, grad = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, grad))
                if name == "one gradient for all":
                    grad = grad[(0,) * len(shape)].expand(grad.shape)
                found, names = how(adapted, x, grad, launched)
                assert launched == names, launched
                launched.clear()
                right = equations(adapted, x, grad)
                kinds = {what: torch.float32 if what in "AB" else BF16 for what in right}
                for what, value in found.items():
                    assert value.dtype == kinds[what] and value.shape == right[what].shape
                print(
                    f"{name}, {rank}, {shape}",
                    kernels.max_of([off(value, right[what]) for what, value in found.items()]),
                )


def _plain(adapted: Any, x: Tensor, grad: Tensor, launched: list[str]) -> tuple[dict[str, Any], list[str]]:
    return learnt(adapted, x.requires_grad_(), grad, adapted), FORWARD + BACKWARD


def _changed_in_place(adapted: Any, x: Tensor, grad: Tensor, launched: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What activations and residual sums may do to an output."""
    found = learnt(adapted, x.requires_grad_(), grad, lambda x: adapted(x).add_(0))
    return found, FORWARD + BACKWARD


def _without_gradient(adapted: Any, x: Tensor, grad: Tensor, launched: list[str]) -> tuple[dict[str, Any], list[str]]:
    with torch.no_grad():
        return {"out": adapted(x)}, FORWARD


def _checkpointed(reentrant: bool) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    def run(adapted: Any, x: Tensor, grad: Tensor, launched: list[str]) -> tuple[dict[str, Any], list[str]]:
        passed = learnt(adapted, x.requires_grad_(), grad, lambda x: checkpoint(adapted, x, use_reentrant=reentrant))
        return passed, FORWARD * 2 + BACKWARD

    return run


def _frozen(what: str, names: list[str]) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    def run(adapted: Any, x: Tensor, grad: Tensor, launched: list[str]) -> tuple[dict[str, Any], list[str]]:
        for part in what.split():
            if part != "input":
                getattr(adapted, f"lora_{part}")["default"].weight.requires_grad_(False)
        found = learnt(adapted, x.requires_grad_("input" not in what), grad, adapted)
        assert [part for part in ("input", "A", "B") if found[part] is None] == what.split()
        return {name: value for name, value in found.items() if value is not None}, FORWARD + names

    return run


WAYS = {
    "plain": _plain,
    "output changed in place": _changed_in_place,
    "turned input": _plain,
    "one gradient for all": _plain,
    "without gradient": _without_gradient,
    "checkpointed": _checkpointed(False),
    "checkpointed, reentrant": _checkpointed(True),
    "frozen input": _frozen("input", ["summed", "narrow", "summed"]),
    "frozen A": _frozen("A", ["summed", "narrow", "widen"]),
    "frozen B": _frozen("B", ["narrow", "widen", "summed"]),
    "frozen input and A": _frozen("input A", ["summed"]),
    "frozen adapter": _frozen("A B", ["narrow", "widen"]),
}


def step() -> None:
    """Prints ``name error`` lines: a step of Stage 2 of a tiny model. How much further its loss and gradients are from
    those of the same model in float32 than peft's are."""
    import device_parity
    from peft.tuners.lora import Linear

    from memory import Case, rl_batch
    from realvr.backbone import Backbone
    from realvr.training.adapters import Adapters
    from realvr.training.method import Step
    from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
    from realvr.training.sections import LoraSettings

    pretend_triton.round_as_a_gpu()
    launched, used = counting()
    found: dict[str, list[Tensor]] = {}
    batch: Any = None
    with tempfile.TemporaryDirectory() as folder, used:
        path = device_parity.prepare("qwen2.5-vl", Path(folder))
        for how in ("peft", "ours", "wide"):
            backbone = Backbone.load(path, dtype=BF16, device="cpu")
            torch.manual_seed(0)
            adapters = Adapters(backbone, LoraSettings(rank=4, alpha=8))
            layers = [module for module in backbone.model.modules() if isinstance(module, Linear)]
            for each in layers:
                each.lora_B["default"].weight.data.normal_(std=0.05)
                if how == "peft":
                    each.__class__ = Linear
            if how == "ours":
                with changed(COMPARED=(3,)):
                    adapters.use_kernels(CPU)
                launched.clear()
            batch = batch or rl_batch(backbone, Case("", "", grid=(2, 2), group=2, answer=3, latents=2, rows=1))
            if how == "wide":
                backbone.model.float()
            loss, _ = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr")))(batch)
            loss.backward()
            assert (how == "ours") == bool(launched)
            if how == "ours":
                assert launched.count("summed") >= 2 * len(layers) and launched.count("widen") > 3 * len(layers)
                launched.clear()
            found[how] = [loss.detach(), *(p.grad for p in backbone.model.parameters() if p.requires_grad)]
            assert len(found[how]) == 1 + 2 * len(layers)

    def apart(how: str) -> tuple[float, float]:
        (loss, *grads), (right, *wide) = found[how], found["wide"]
        far = [float((mine - other).norm() / other.norm()) for mine, other in zip(grads, wide, strict=True)]
        return float((loss - right).abs()), sum(far) / len(far)

    for name, ours, peft in zip(("loss", "gradients"), apart("ours"), apart("peft"), strict=True):
        print(f"# {name}: {ours:.2e} apart from 32 bits, peft {peft:.2e}", file=sys.stderr)
        print(name, ours - 1.2 * peft)
    print("gradients at all", apart("ours")[1] - 0.1)


if __name__ == "__main__":
    {"wired": wired, "step": step}[sys.argv[1]]()
