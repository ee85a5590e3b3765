"""One process, or several with the whole model on each (DistributedDataParallel), through accelerate.

Weights and computation have the type the model was loaded with; there is no autocast. Gradients have the type of their
parameters and are accumulated in it. ``optim.master_weights`` keeps 32-bit copies in the optimizer. One process adds
gradients of linear layers straight to ``.grad`` (``optim.gradients``); several hand their sums to DDP.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from realvr.training.engine.accelerated import Accelerated
from realvr.training.engine.protocol import Engine, trained_of
from realvr.training.engine.settings import DDPSettings, EngineSettings
from realvr.training.engine.whole import estimate_whole, load_whole, save_whole
from realvr.training.gradients import Deferral, defer_gradients
from realvr.training.metrics import Metrics
from realvr.training.optimizer import build_optimizer
from realvr.training.sections import OptimSettings


class DDP(Accelerated, Engine):
    """Gradients are accumulated by hand and averaged over ranks by the last backward pass."""

    name = "ddp"
    title = "one process, or several with DDP"
    Config = DDPSettings
    packages = ("accelerate",)
    elastic = True
    lockstep = False

    def __init__(self, cpu: bool = False, settings: EngineSettings | None = None) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs

        self.settings = settings or DDPSettings()

        # Buffers are constants (rotary frequencies): broadcasting them before every pass would cost time and, with two
        # passes before a backward, change tensors that autograd has saved.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        # All explicit: otherwise variables of a launcher could switch on autocast or compilation, or scale the loss.
        self.accelerator = Accelerator(
            cpu=cpu or not torch.cuda.is_available(),
            mixed_precision="no",
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=timedelta(seconds=self.settings.timeout))],
        )
        self._wrapped: nn.Module | None = None
        self._optimizer: Any = None
        self._deferral: Deferral | None = None

    # ------------------------------------------------------------------ parameters

    @override
    def prepare(self, module: nn.Module, optim: OptimSettings) -> None:
        trained_of(module)
        self._deferral = defer_gradients(module) if optim.gradients == "deferred" else None
        optimizer, self._module = build_optimizer(module, optim), module
        with warnings.catch_warnings():
            # accelerate passes the name that older releases of torch know
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            self._wrapped, self._optimizer = self.accelerator.prepare(module, optimizer)

    @property
    @override
    def wrapped(self) -> nn.Module:
        if self._wrapped is None:
            raise RuntimeError("prepare() comes first")
        return self._wrapped

    @property
    @override
    def module(self) -> nn.Module:
        if self._wrapped is None:
            raise RuntimeError("prepare() comes first")
        return self._module  # accelerate's unwrap_model would import deepspeed wherever it is installed

    @override
    def full_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def freeze(self, module: nn.Module) -> None:
        module.requires_grad_(False)

    # ------------------------------------------------------------------ one optimizer step

    @override
    def forward(self, microbatch: object, term: str | None = None) -> tuple[Tensor, Metrics]:
        return self.wrapped(microbatch) if term is None else self.wrapped(microbatch, term=term)

    @contextmanager
    @override
    def accumulate(self, last: bool) -> Iterator[None]:
        self.accelerator.sync_gradients = last
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            yield

    def backward(self, loss: Tensor) -> None:
        """DDP averages over ranks and the losses of the ranks add up, hence the factor."""
        # Of several ranks, DDP has to see every gradient before it is added.
        deferral = self._deferral if self.world == 1 else None
        with nullcontext() if deferral is None else deferral.into_grad():
            self.accelerator.backward(loss * self.world)

    @override
    def gradient_norm(self, clip: float = 0.0) -> float:
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), clip or float("inf"))
        return float(norm)

    @override
    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.accelerator.sync_gradients = True
        self._optimizer.step()
        self.drop_gradients()

    @override
    def drop_gradients(self) -> None:
        self.accelerator.sync_gradients = True
        self._optimizer.zero_grad(set_to_none=True)

    def term_norm(self, microbatches: Sequence[Any], term: str) -> float:
        """Without DDP's synchronisation, which would wait for parameters that the term does not reach."""
        before = self.rng_state()
        for microbatch in microbatches:
            with self.accumulate(last=False):
                loss, _ = self.forward(microbatch, term=term)
                if loss.requires_grad:
                    self.backward(loss)
        self._average_gradients()
        norm = self.gradient_norm()
        self.drop_gradients()
        self.set_rng_state(before)
        return norm

    def _average_gradients(self) -> None:
        """Average gradients that were computed without synchronisation; parameters without one count as zero."""
        if self.world == 1:
            return
        for parameter in self.trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.world

    # ------------------------------------------------------------------ saving, memory

    @override
    def save(self, directory: Path) -> None:
        if self.main:
            save_whole(directory, self.module, self._optimizer)

    @override
    def load(self, directory: Path) -> None:
        load_whole(directory, self.module, self._optimizer)

    @override
    def estimate(self, module: nn.Module, optim: OptimSettings) -> dict[str, int]:
        return estimate_whole(module, optim)
