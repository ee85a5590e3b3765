"""A second engine, without accelerate: one process whose parameters can be read only where the protocol says so.

Between the calls of the loop every parameter is NaN, as it would be in shards on other devices: a method that runs the
model outside ``full_parameters`` and the passes of the step gets numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realvr.training.engine import Engine, EngineSettings
from realvr.training.engine.whole import estimate_whole, load_whole, save_whole
from realvr.training.metrics import Metrics
from realvr.training.optimizer import build_optimizer
from realvr.training.sections import OptimSettings


class PlainEngine(Engine):
    """What DDP is for one process, written down in plain torch."""

    name = "plain"
    title = "plain torch"
    rank, world, device, lockstep, shards = 0, 1, torch.device("cpu"), True, True

    def __init__(self, cpu: bool = True, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings(type=self.name)
        self.frozen: list[nn.Module] = []
        self.rollouts = 0
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def prepare(self, module: nn.Module, optim: OptimSettings) -> None:
        self._module, self._optimizer = module, build_optimizer(module, optim)
        self._hide()

    @property
    def module(self) -> nn.Module:
        return self._module

    def _hide(self) -> None:
        self._hidden = [(parameter, parameter.data) for parameter in self._module.parameters()]
        for parameter, data in self._hidden:
            parameter.data = torch.full_like(data, float("nan"))

    @contextmanager
    def _visible(self) -> Iterator[None]:
        if not self._hidden:  # inside another one
            yield
            return
        hidden, self._hidden = self._hidden, []
        for parameter, data in hidden:
            parameter.data = data
        yield
        self._hide()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        self.rollouts += 1
        with self._visible():
            yield

    def freeze(self, module: nn.Module) -> None:
        self.frozen.append(module.requires_grad_(False))

    def forward(self, microbatch: Any, term: str | None = None) -> tuple[Tensor, Metrics]:
        return self._module(microbatch, term=term)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        with self._visible():
            yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient_norm(self, clip: float = 0.0) -> float:
        return float(nn.utils.clip_grad_norm_(self._module.parameters(), clip or float("inf")))

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with self._visible():
            self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def term_norm(self, microbatches: Sequence[Any], term: str) -> float:
        before = self.rng_state()
        for microbatch in microbatches:
            with self._visible():
                loss, _ = self.forward(microbatch, term)
                if loss.requires_grad:
                    loss.backward()
        norm = self.gradient_norm()
        self.drop_gradients()
        self.set_rng_state(before)
        return norm

    def save(self, directory: Path) -> None:
        with self._visible():
            save_whole(directory, self._module, self._optimizer)

    def load(self, directory: Path) -> None:
        with self._visible():
            load_whole(directory, self._module, self._optimizer)

    def estimate(self, module: nn.Module, optim: OptimSettings) -> dict[str, int]:
        return estimate_whole(module, optim)
