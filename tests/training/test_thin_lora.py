"""The thin linear layer against peft's own, bit for bit: outputs, gradients, random numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import mixed_prompts
from realvr.backbone import Backbone
from realvr.latent.span import prefill
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings
from realvr.training.thin_lora import ThinLinear, thin


class Net(nn.Module):
    """Two adapted layers, one with a bias, as in a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(dtype: torch.dtype, own: bool, **options: Any) -> Any:
    """The net with adapters that are not zero; the same numbers whoever makes them."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["first", "second"]} | options)
    model = get_peft_model(Net().to(dtype), thin(config) if own else config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def passed(model: Any, dtype: torch.dtype) -> list[Tensor]:
    """Output without gradient, output with, and every gradient."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 24).to(dtype).requires_grad_()
    with torch.no_grad():
        still = model(x)
    y = model(x)
    y.square().sum().backward()
    return [still, y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("alpha", [8, 7], ids=["power of two", "other scaling"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_peft(dtype: torch.dtype, dropout: float, alpha: float) -> None:
    options = {"lora_dropout": dropout, "lora_alpha": alpha}
    stock, ours = (adapted(dtype, own, **options) for own in (False, True))
    assert {type(m) for m in ours.modules() if isinstance(m, Linear)} == {ThinLinear}
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    expected = [*passed(stock, dtype), torch.rand(1)]  # the last: as many random numbers were drawn before
    for one, other in zip(expected, [*passed(ours, dtype), torch.rand(1)], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    stock.eval(), ours.eval()  # without dropout
    assert torch.equal(passed(stock, dtype)[1], passed(ours, dtype)[1])


def test_what_is_not_plain_goes_the_way_of_peft() -> None:
    """DoRA, two adapters at once, a batch with adapters of its own, merged, disabled, input not cast."""
    x = torch.randn(3, 5, 24)

    def results(own: bool) -> list[Tensor]:
        found = []
        model = adapted(torch.float32, own).eval()
        with model.disable_adapter():
            found.append(model(x))
        model.add_adapter("second", model.peft_config["default"])
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.data.fill_(0.1)
        found.append(model(x, adapter_names=["default", "second", "__base__"]))
        model.base_model.set_adapter(["default", "second"])
        found.append(model(x))
        model.base_model.set_adapter(["second"])
        found.append(model(x))
        merged = copy.deepcopy(model)
        merged.merge_adapter()
        found.append(merged(x))
        merged.unmerge_adapter()
        found.append(merged(x))
        found.append(adapted(torch.float32, own, use_dora=True)(x))
        return found

    torch.manual_seed(3)
    stock = results(False)
    torch.manual_seed(3)
    ours = results(True)
    assert all(torch.equal(one, other) for one, other in zip(stock, ours, strict=True))
    assert len({tuple(y.flatten()[:4].tolist()) for y in ours}) >= 6  # the cases differ


def test_a_step_of_the_decoder_is_the_same_and_takes_fewer_operations(build_tiny: Callable[[str], Path]) -> None:
    """The whole model: the states and every gradient of the adapters; operations of a pass without gradient."""
    found: dict[bool, Any] = {}
    for own in (False, True):
        backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.bfloat16, device="cpu")
        torch.manual_seed(0)
        Adapters(backbone, LoraSettings(rank=4, alpha=8))
        layers = [module for module in backbone.model.modules() if isinstance(module, Linear)]
        for layer in layers:
            layer.lora_B["default"].weight.data.normal_()
            if not own:
                layer.__class__ = Linear
        batch = backbone.batch(mixed_prompts(backbone)[:2])
        visual = backbone.encode_images(batch.images)
        with torch.no_grad(), Counting() as counted:
            prefill(backbone, batch, visual)
        _, hidden = prefill(backbone, batch, visual)
        hidden.float().square().mean().backward()
        found[own] = hidden, {n: p.grad for n, p in backbone.model.named_parameters() if p.requires_grad}, counted.seen
    assert torch.equal(found[False][0], found[True][0])
    stock, ours = found[False][1], found[True][1]
    assert stock.keys() == ours.keys() and all(torch.equal(stock[name], ours[name]) for name in stock)
    fewer = found[False][2] - found[True][2]
    # Each layer: no product with the scaling, no cast back.
    assert fewer["aten.mul.Tensor"] == len(layers) and fewer["aten._to_copy.default"] == len(layers)


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))
