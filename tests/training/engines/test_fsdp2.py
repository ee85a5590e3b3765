"""What FSDP2 alone has: gradients that leave after each pass, stacked experts, checkpoints in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realvr.training.engine import Engine, start_engine
from realvr.training.engine.shards import Piece, Shards, piece, rows_of, write_shard
from realvr.training.sections import OptimSettings

# ---------------------------------------------------------------------- shard files


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_are_those_of_chunk(size: int, world: int) -> None:
    whole = torch.arange(size)
    parts = [*whole.chunk(world), *[whole[:0]] * world][:world]
    for rank, part in enumerate(parts):
        start, rows = rows_of(size, rank, world)
        assert torch.equal(whole[start : start + rows], part)


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_shards_of_some_ranks_are_read_by_others(writers: int, readers: int, tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in (("a", (7, 3)), ("b", (1,)), ("c", (2, 2, 2)))}
    count = torch.tensor(5)
    for rank in range(writers):
        held = {}
        for name, tensor in tensors.items():
            place = piece(tensor.shape, rank, writers)
            held[name] = (tensor[place.start : place.start + place.rows], place)
        held["count"] = (count, Piece(()))
        write_shard(tmp_path, rank, held, {"states": {"a": {"step": 3}}})
    shards = Shards(tmp_path)
    assert set(shards) == {*tensors, "count"} and torch.equal(shards.whole("count"), count)
    assert shards.values == {"states": {"a": {"step": 3}}}
    for name, tensor in tensors.items():
        assert torch.equal(shards.whole(name), tensor)
        for rank in range(readers):
            start, rows = rows_of(len(tensor), rank, readers)
            assert torch.equal(shards.read(name, start, rows), tensor[start : start + rows])


def test_shards_with_a_gap_are_refused(tmp_path: Path) -> None:
    tensor = torch.randn(6, 2)
    for rank in range(3):
        place = piece(tensor.shape, rank, 3)
        write_shard(tmp_path, rank, {"a": (tensor[place.start : place.start + 2], place)}, {})
    (tmp_path / "shard-00001.json").unlink()
    with pytest.raises(ValueError, match="the shards of a do not fit together"):
        Shards(tmp_path)
    (tmp_path / "shard-00002.json").unlink()
    with pytest.raises(ValueError, match="rows 2 to 6 of a are in no shard"):
        Shards(tmp_path)


# ---------------------------------------------------------------------- one rank, in this process


@pytest.fixture
def one_rank() -> Iterator[Engine]:
    engine = start_engine(cpu=True, engine="fsdp2")
    yield engine
    assert engine.exit(0) == 0


class Twice(nn.Module):
    """Layers that one step passes through twice; notes which have a gradient once the second pass is done."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.language_model = nn.Module()
        self.language_model.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.reduced: list[bool] = []

    def forward(self, x: Tensor, term: str | None = None) -> tuple[Tensor, dict[str, Any]]:
        for number in range(2):
            if number:
                x.register_hook(lambda gradient: self.reduced.extend(p.grad is not None for p in self.sharded))
            for layer in self.language_model.layers:
                x = layer(x).tanh()
        return x.square().sum(), {}


def test_gradients_leave_after_each_pass(one_rank: Engine) -> None:
    """Otherwise autograd keeps the whole gradient of every layer until the first pass is done."""
    engine, module, x = one_rank, Twice(), torch.randn(3, 4, dtype=torch.float64)
    plain = Twice()
    plain.sharded = []
    engine.prepare(module, OptimSettings())
    module.sharded = [p for layer in module.language_model.layers[:-1] for p in layer.parameters()]
    engine.backward(engine.forward(x.clone().requires_grad_())[0])
    assert module.reduced == [True] * 6
    plain(x.clone().requires_grad_())[0].backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad, rtol=1e-12, atol=1e-12)
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    assert engine.gradient_norm() == pytest.approx(float(norm), rel=1e-12)


class Experts(nn.Module):
    """Three experts in one tensor, as stock mixtures keep them. Each token takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError
        return torch.stack([self.weight[number % 3] @ row for number, row in enumerate(x)]).tanh()


class Mixture(Twice):
    """The same model with experts for layers."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model.layers = nn.ModuleList(nn.Sequential(Experts()) for _ in range(3))
        self.sharded: list[nn.Parameter] = []


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_experts_are_cut_by_rows(one_rank: Engine) -> None:
    """All of them one below the other, so that ranks may be more than experts; whole again in passes and in exports."""
    engine, module, x = one_rank, Mixture(), torch.randn(5, 4, dtype=torch.float64)
    plain = Mixture()
    plain.load_state_dict(module.state_dict())
    engine.prepare(module, OptimSettings())
    assert {tuple(parameter.shape) for parameter in module.parameters()} == {(12, 4)}
    for model, backward in ((module, engine.backward), (plain, Tensor.backward)):
        backward(model(x.clone().requires_grad_())[0])
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local().view(3, 4, 4), theirs.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(ArithmeticError):
        module(x * torch.nan)
    for layer in module.language_model.layers:
        assert layer[0].weight is layer[0]._parameters["weight"]  # nothing is left of the pass
    engine.drop_gradients()
    exported: dict[str, Tensor] = {}
    engine.export(lambda: exported.update(tensors(module)))
    assert exported.keys() == tensors(plain).keys()
    assert all(torch.equal(exported[name], each) for name, each in tensors(plain).items())


def test_checkpoints_with_experts_cut_along_their_number_are_read(one_rank: Engine, tmp_path: Path) -> None:
    """Files of two ranks, as versions wrote them that did not cut experts by rows."""
    module, x = Mixture(), torch.randn(5, 4, dtype=torch.float64)
    one_rank.prepare(module, OptimSettings(lr=0.1))
    one_rank.backward(module(x.clone().requires_grad_())[0])
    one_rank.step(0.1)
    (tmp_path / "new").mkdir()
    one_rank.save(tmp_path / "new")
    kept = Shards(tmp_path / "new")
    saved = {key: kept.whole(key) for key in kept}
    for rank in range(2):
        held = {}
        for key, each in saved.items():
            whole = each.view(3, 4, 4)
            place = piece(whole.shape, rank, 2)
            held[key] = (whole[place.start : place.start + place.rows], place)
        write_shard(tmp_path, rank, held, kept.values)
    before = [parameter.to_local().clone() for parameter in module.parameters()]
    one_rank.backward(module(x.clone().requires_grad_())[0])
    one_rank.step(0.1)
    one_rank.load(tmp_path)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(module.parameters(), before, strict=True))
    one_rank.save(tmp_path / "new")
    again = Shards(tmp_path / "new")
    assert set(again) == set(saved) and any("#exp_avg" in key for key in saved)
    assert all(torch.equal(again.whole(key), each) for key, each in saved.items())


@pytest.mark.parametrize(("start", "rows"), [(0, 12), (3, 2), (5, 6), (11, 1), (4, 4), (12, 0)])
def test_rows_of_stacked_experts(start: int, rows: int, tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, 2)
    for rank in range(2):
        place = piece(tensor.shape, rank, 2)
        write_shard(tmp_path, rank, {"a": (tensor[place.start : place.start + place.rows], place)}, {})
    shards = Shards(tmp_path)
    shards.stack("a")
    assert torch.equal(shards.read("a", start, rows), tensor.flatten(0, 1)[start : start + rows])
