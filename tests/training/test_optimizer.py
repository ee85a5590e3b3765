"""AdamW's groups and its 32-bit master weights, against torch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from realvr.training import optimizer
from realvr.training.engine.whole import estimate_whole
from realvr.training.memory import shapes
from realvr.training.optimizer import MasterAdamW, build_optimizer, parameter_groups
from realvr.training.sections import OptimSettings


class Tied(nn.Module):
    """An embedding, a norm, a frozen matrix, and an output matrix tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.middle = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight


def test_only_matrices_decay() -> None:
    module = Tied()
    decayed, rest = parameter_groups(module, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(module.middle.weight)] and decayed["weight_decay"] == 0.1
    wanted = [module.table.weight, module.norm.weight, module.norm.bias, module.middle.bias]
    assert [id(p) for p in rest["params"]] == [id(p) for p in wanted] and rest["weight_decay"] == 0.0


def test_master_weights_follow_torch_adamw_and_small_updates_add_up() -> None:
    torch.manual_seed(0)
    low = nn.Linear(6, 6).bfloat16()
    wide = nn.Linear(6, 6)
    wide.load_state_dict(low.state_dict())
    settings = OptimSettings(lr=5e-7, weight_decay=0.1)
    ours = build_optimizer(low, settings)
    theirs = torch.optim.AdamW(parameter_groups(wide, 0.1), lr=5e-7, betas=settings.betas, eps=settings.eps)
    assert isinstance(ours, MasterAdamW)
    start = low.weight.detach().clone()
    for step in range(300):
        for a, b in zip(low.parameters(), wide.parameters(), strict=True):
            gradient = torch.randn(b.shape, generator=torch.Generator().manual_seed(step)) * 0.1 + 0.2
            a.grad = gradient.bfloat16()
            b.grad = a.grad.float()
        ours.step()
        theirs.step()
    for a, b in zip(low.parameters(), wide.parameters(), strict=True):
        assert torch.allclose(ours.state[a]["master"], b, rtol=0, atol=1e-9)
        assert torch.equal(a, ours.state[a]["master"].bfloat16())
    assert not torch.equal(low.weight, start)  # without a master copy no weight of size 0.1 moves by 5e-7


def test_loading_master_weights_does_not_round_them() -> None:
    module = nn.Linear(6, 6).bfloat16()
    first = build_optimizer(module, OptimSettings())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.step()
    second = build_optimizer(module, OptimSettings())
    second.load_state_dict(first.state_dict())
    for parameter in module.parameters():
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert second.state[parameter][name].dtype == torch.float32
            assert torch.equal(second.state[parameter][name], first.state[parameter][name])


@pytest.mark.parametrize("master", [True, False])
def test_memory_estimate_is_what_the_optimizer_holds(master: bool) -> None:
    module = Tied().bfloat16()
    settings = OptimSettings(master_weights=master)
    found = estimate_whole(module, settings)
    trained, frozen = 20 + 4 + 4 + 16 + 4, 20
    assert found["trained weights"] == found["gradients"] == 2 * trained and found["frozen weights"] == 2 * frozen
    optimizer = build_optimizer(module, settings)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor) and value.ndim]
    assert found["optimizer"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_shapes_looks_into_containers() -> None:
    value = {"a": [torch.zeros(2, 3), 5], "b": (torch.zeros(1, dtype=torch.bool),)}
    assert list(shapes(value, "m")) == [("m.a[0]", "float32 (2, 3)"), ("m.b[0]", "bool (1,)")]


@pytest.mark.parametrize("lot", [1, 7, 2**26])
def test_lots_and_missing_gradients_change_nothing(lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that had no gradient for some steps has fewer updates behind it; a lot may hold a single tensor."""
    monkeypatch.setattr(optimizer, "LOT", lot)
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, 3, generator=generator, dtype=torch.float64)) for n in (1, 2, 5, 2)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8}
    mine = MasterAdamW([{"params": ours, "weight_decay": 0.2}], **options)
    stock = torch.optim.AdamW(theirs, weight_decay=0.2, **options)
    for step in range(6):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            late = number == 2 and step < 3
            a.grad = None if late else torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = None if late else a.grad.clone()
        mine.step()
        stock.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
