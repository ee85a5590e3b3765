"""A thin layer over accelerate: one process or several, gradients accumulated by hand, everything collective in one
place.

What an engine must not need: the loop calls ``forward`` on the wrapped module only, every rank makes the same calls in
the same order, and saving goes through ``save`` and ``load``. Sharded engines change the inside of this class.

Weights and computation have the type the model was loaded with; there is no autocast. Gradients have the type of their
parameters and are accumulated in it. ``optim.master_weights`` keeps 32-bit copies in the optimizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realvr.training.optimizer import build_optimizer
from realvr.training.sections import OptimSettings
from realvr.training.statefile import read_state, read_tensors, write_state, write_tensors
from realvr.training.task import Metrics


class Engine:
    """The processes that train together, the wrapped module and its optimizer."""

    def __init__(self, cpu: bool = False) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        # Buffers are constants (rotary frequencies): broadcasting them before every pass would cost time and, with two
        # passes before a backward, change tensors that autograd has saved.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        # Explicitly "no": a launcher's environment must not switch autocast on behind the settings' back.
        cpu = cpu or not torch.cuda.is_available()
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision="no", gradient_accumulation_steps=1, kwargs_handlers=[ddp]
        )
        self._wrapped: nn.Module | None = None
        self._optimizer: Any = None

    # ------------------------------------------------------------------ processes

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def main(self) -> bool:
        """Whether this process writes and talks."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def barrier(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        from accelerate.utils import gather_object

        return [value] if self.world == 1 else gather_object([value])

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return any(self.gather_objects(bool(flag)))

    def sum_metrics(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """(sum, count) of each metric over all ranks; a rank need not have every name."""
        own = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
        summed: dict[str, tuple[float, float]] = {}
        for part in self.gather_objects(own):
            for name, (total, count) in part.items():
                before = summed.get(name, (0.0, 0.0))
                summed[name] = (before[0] + total, before[1] + count)
        return summed

    def seed(self, seed: int) -> None:
        """Seed every generator of this process, differently on every rank."""
        own = (seed * 1_000_003 + self.rank) % 2**32
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)

    def print(self, text: str) -> None:
        """Print once, whatever the number of processes."""
        if self.main:
            print(text, flush=True)

    def exit(self, code: int) -> int:
        """Leave together. Several ranks end without interpreter shutdown, which sometimes aborts under gloo."""
        if self.world == 1:
            return code
        self.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # ------------------------------------------------------------------ one optimizer step

    def prepare(self, module: nn.Module, settings: OptimSettings) -> None:
        """Wrap the module of a stage and make its optimizer."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("no parameter of the module is trainable")
        optimizer = build_optimizer(module, settings)
        with warnings.catch_warnings():
            # accelerate passes the name that older releases of torch know
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            self._wrapped, self._optimizer = self.accelerator.prepare(module, optimizer)

    @property
    def wrapped(self) -> nn.Module:
        """The module as the engine runs it."""
        if self._wrapped is None:
            raise RuntimeError("prepare() comes first")
        return self._wrapped

    @property
    def module(self) -> nn.Module:
        """The module as the stage made it."""
        return self.accelerator.unwrap_model(self.wrapped)

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def forward(self, microbatch: Any, term: str | None = None) -> tuple[Tensor, Metrics]:
        """The stage's forward pass through the wrapped module."""
        return self.wrapped(microbatch) if term is None else self.wrapped(microbatch, term=term)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; only the last one synchronises gradients."""
        self.accelerator.sync_gradients = last
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients. Engines average over ranks and the losses of a stage add up, hence the factor."""
        self.accelerator.backward(loss * self.world)

    def reduce_gradients(self) -> None:
        """Average gradients that were computed without synchronisation; parameters without one count as zero."""
        if self.world == 1:
            return
        for parameter in self.trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.world

    def gradient_norm(self, clip: float = 0.0) -> float:
        """Norm of the whole gradient, which is then scaled down to ``clip`` (0: left as it is)."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), clip or float("inf"))
        return float(norm)

    def step(self, lr: float) -> None:
        """Update the parameters and drop the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.accelerator.sync_gradients = True
        self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        self.accelerator.sync_gradients = True
        self._optimizer.zero_grad(set_to_none=True)

    def trainable(self) -> Iterator[nn.Parameter]:
        """The parameters that are trained."""
        return (parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def peak_memory(self) -> int:
        """Most bytes ever in use on this rank's GPU, or by its process where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    # ------------------------------------------------------------------ saving

    def save(self, directory: Path) -> None:
        """Write the trained parameters, buffers and the optimizer's state. Every rank calls it; frozen parameters are
        not written, they come from where the model was loaded."""
        if not self.main:
            return
        write_tensors(directory / "model.safetensors", dict(self._saved()))
        write_state(directory / "optimizer", self._optimizer.state_dict())

    def load(self, directory: Path) -> None:
        """Read back what ``save`` wrote. Every rank calls it."""
        tensors, own = read_tensors(directory / "model.safetensors"), dict(self._saved())
        shapes = [{(name, tuple(tensor.shape)) for name, tensor in found.items()} for found in (tensors, own)]
        if shapes[0] != shapes[1]:
            odd = sorted(shapes[0] ^ shapes[1])[0][0]
            raise ValueError(f"the model has other parameters than the checkpoint, among them {odd}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self._optimizer.load_state_dict(read_state(directory / "optimizer"))
        for parameter, state in self._optimizer.state.items():
            sizes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.dim()}
            if not sizes <= {tuple(parameter.shape)}:
                raise ValueError(f"the optimizer holds {sizes} for a parameter of {tuple(parameter.shape)}")

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Trained parameters (tied ones once) and the buffers that belong to the state."""
        module = self.module
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach()
        kept = module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)

    def frozen_digest(self) -> str:
        """Short hash of names, shapes and first values of the frozen parameters: tells whether the model that a run
        started from has been exchanged underneath it."""
        digest = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                first = parameter.detach().flatten()[:16].double().cpu().tolist()
                digest.update(f"{name} {tuple(parameter.shape)} {first}".encode())
        return digest.hexdigest()[:16]
