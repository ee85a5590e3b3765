"""What a method and the loop may ask of the engine that trains: one process or several, whole or sharded parameters.

`Ranks` is what a method sees, `Engine` what the loop sees; nothing else in ``realvr.training`` knows accelerate or
torch.distributed. Every rank makes the same calls in the same order, whatever happens on one of them.

A new engine is one file in this package with a subclass of `Engine`: an engine file names it (``type``), and ``realvr
env`` lists it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from realvr.runs.launching import processes_here
from realvr.training import statefile
from realvr.training.engine.placing import fill
from realvr.training.engine.settings import EngineSettings
from realvr.training.engine.watchdog import Watchdog
from realvr.training.metrics import Metrics
from realvr.training.sections import OptimSettings

T = TypeVar("T")


def _watched(collective: Callable[..., T]) -> Callable[..., T]:
    @wraps(collective)
    def call(self: Engine, *args: Any, **options: Any) -> T:
        with self.watchdog.waiting("another rank"):
            return collective(self, *args, **options)

    return call


def alone() -> bool:
    """Whether no launcher started this process."""
    return "RANK" not in os.environ


def trained_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an engine is to train. There has to be one."""
    found = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not found:
        raise ValueError("no parameter of the module is trainable")
    return found


class Ranks(Protocol):
    """What a method may ask."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        ...

    @property
    def world(self) -> int:
        """Number of processes."""
        ...

    @property
    def local_world(self) -> int:
        """Number of processes on this machine, which share its cores."""
        ...

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        ...

    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        ...

    def full_parameters(self) -> AbstractContextManager[None]:
        """Around a rollout, or anything else that runs the model many times without gradient."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must pass through the model equally often inside ``full_parameters``, because it leaves
        them sharded. A rollout then goes on until `any` is false: ``rollout(..., go_on=ranks.any)``."""
        ...

    @property
    def shards(self) -> bool:
        """Whether this engine keeps a part of the parameters on each rank. Models are then loaded through `place`."""
        ...

    def place(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Put the weights of a model on the meta device where they belong. ``weights`` gives them one at a time, whole
        and in main memory; at no time are all of them there."""
        ...

    def freeze(self, module: nn.Module) -> None:
        """Take over a module that is never trained, such as the reference of the KL or a teacher. Comes before the
        first pass through it."""
        ...


class Engine(ABC):
    """What the loop may ask: the processes that train together, the wrapped module and its optimizer."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What ``realvr env`` calls it."""
    Config: ClassVar[type[EngineSettings]] = EngineSettings
    """Settings of an engine file."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs beside torch."""
    extra: ClassVar[str] = "train"
    """Extra of this package that brings them."""
    settings: EngineSettings
    elastic: ClassVar[bool] = False
    """Whether another number of processes may continue from a checkpoint: `load` reads one of any number."""
    launcher_flag: ClassVar[str | None] = None
    """Variable by which ``accelerate launch`` asks for this engine, if there is one."""

    @abstractmethod
    def __init__(self, cpu: bool = False, settings: EngineSettings | None = None) -> None:
        """Join the processes that the launcher has started."""

    # ------------------------------------------------------------------ processes

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process."""
        ...

    @property
    @abstractmethod
    def world(self) -> int:
        """Number of processes."""

    @property
    def local_world(self) -> int:
        """Number of processes on this machine; of all where the launcher does not say it."""
        return processes_here(self.world)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where batches have to be."""
        ...

    @_watched
    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return any(self.gather_objects(bool(flag)))

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather_objects(None)

    def print(self, text: str) -> None:
        """Print once, whatever the number of processes."""
        if self.main:
            print(text, flush=True)

    def exit(self, code: int) -> int:
        """Leave together, after everything is done. Ranks that a launcher has started end without interpreter shutdown,
        which sometimes aborts under gloo."""
        if not dist.is_initialized():
            return code
        self.barrier()
        dist.destroy_process_group()
        if alone():
            return code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def abort(self, message: str) -> NoReturn:
        """Leave without the other ranks, which may be waiting for this one; the launcher ends them."""
        print(f"realvr: error: {message}" if self.main else f"rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    @cached_property
    def watchdog(self) -> Watchdog:
        """Ends the run where ranks wait for each other in vain. `Watchdog.waiting` stands around collectives."""
        return Watchdog(self.rank, self.world, self.settings.timeout)

    def __init_subclass__(cls, **options: Any) -> None:
        """Every engine's collectives of these names are watched."""
        super().__init_subclass__(**options)
        for name in ("gather_objects", "barrier", "gradient_norm"):
            if name in vars(cls):
                setattr(cls, name, _watched(vars(cls)[name]))

    # ------------------------------------------------------------------ random numbers

    def seed(self, seed: int) -> None:
        """Seed every generator of this process, differently on every rank."""
        own = (seed * 1_000_003 + self.rank) % 2**32
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)

    def rng_state(self) -> dict[str, Any]:
        """State of every generator of this process."""
        return statefile.generator_state()

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `rng_state` returned."""
        statefile.set_generator_state(state)

    # ------------------------------------------------------------------ parameters

    @abstractmethod
    def prepare(self, module: nn.Module, optim: OptimSettings) -> None:
        """Wrap the module of a method and make its optimizer."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module as the method made it."""

    @property
    def wrapped(self) -> nn.Module:
        """The module as the engine runs it."""
        return self.module

    @property
    def distributed_type(self) -> str:
        """How the processes train together, in accelerate's words: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED."""
        return "NO"

    def facts(self) -> dict[str, Any]:
        """What this rank is and holds, for ``engine.json``: shows whether the engine that was asked for trains."""
        kinds: dict[str, Counter[str]] = {"trained": Counter(), "frozen": Counter()}
        held = 0
        for parameter in self.module.parameters():
            kinds["trained" if parameter.requires_grad else "frozen"][self.parameter_kind(parameter)] += 1
            held += self.held_numbers(parameter)
        return {
            "rank": self.rank,
            "world": self.world,
            "device": str(self.device),
            "distributed_type": self.distributed_type,
            "wrapped": type(self.wrapped).__name__,
            "parameters": {name: dict(each) for name, each in kinds.items()},
            "numbers": held,
        }

    def parameter_kind(self, parameter: nn.Parameter) -> str:
        """The type of a parameter, as `facts` counts it."""
        return type(parameter).__name__

    def held_numbers(self, parameter: nn.Parameter) -> int:
        """How many numbers of a parameter this rank keeps between two passes."""
        return parameter.numel()

    @abstractmethod
    def full_parameters(self) -> AbstractContextManager[None]:
        """Around a rollout: where there is room, gathers sharded parameters."""

    @property
    @abstractmethod
    def lockstep(self) -> bool:
        """Whether all ranks must pass through the model equally often inside ``full_parameters``."""

    keeps_gradients: ClassVar[bool] = False
    """Whether the bytes of gradients are taken from `prepare` on, not from pass to pass."""
    shards: bool = False
    """Whether each rank keeps a part of the parameters only, so that models are loaded through `place`."""

    def place(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Put the weights of a model on the meta device where they belong: the decoder layers in shards, the rest whole
        on this rank's device. ``prepare`` and ``freeze`` shard what is left."""
        fill(model, weights, self.device)

    @abstractmethod
    def freeze(self, module: nn.Module) -> None:
        """Take over a module that is never trained; sharded as the trained one is."""

    def trainable(self) -> Iterator[nn.Parameter]:
        """The parameters that are trained."""
        return (parameter for parameter in self.module.parameters() if parameter.requires_grad)

    # ------------------------------------------------------------------ one optimizer step

    @abstractmethod
    def forward(self, microbatch: object, term: str | None = None) -> tuple[Tensor, Metrics]:
        """The method's forward pass through the wrapped module; with ``term``, that term of the loss alone."""

    @abstractmethod
    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch; only the last one synchronises gradients."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to the gradients. The losses of all microbatches and ranks add up."""

    @abstractmethod
    def gradient_norm(self, clip: float = 0.0) -> float:
        """Norm of the whole gradient, the same on every rank; the gradient is then scaled down to ``clip`` (0: left as
        it is)."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update the parameters and drop the gradients."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients: nothing is left of this step, optimizer state included."""

    def term_norm(self, microbatches: Sequence[Any], term: str) -> float:
        """Norm of the gradient of one term of the loss alone, over all microbatches and ranks. Comes before the passes
        of the step and leaves gradients, parameters and generators as they were."""
        before = self.rng_state()
        for microbatch in microbatches:
            loss, _ = self.forward(microbatch, term=term)
            if loss.requires_grad:
                self.backward(loss)
        norm = self.gradient_norm()
        self.drop_gradients()
        self.set_rng_state(before)
        return norm

    # ------------------------------------------------------------------ saving

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write trained parameters, buffers and the optimizer's state. Every rank calls it; frozen parameters are not
        written, they come from where the model was loaded."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read back what ``save`` wrote. Every rank calls it."""

    def export(self, write: Callable[[], None]) -> None:
        """Run ``write`` on the main process, where it finds the whole model. Every rank calls this. Adapters are
        merged by ``write``, in main memory."""
        with self.full_parameters():
            if self.main:
                write()

    def frozen_digest(self) -> str:
        """Short hash of names, shapes and first values of the frozen parameters: shows whether the model that a run
        started from has been replaced. Every rank calls it."""
        digest = hashlib.sha256()
        with self.full_parameters():
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    first = parameter.detach().flatten()[:16].double().cpu().tolist()
                    digest.update(f"{name} {tuple(parameter.shape)} {first}".encode())
        return digest.hexdigest()[:16]

    # ------------------------------------------------------------------ memory

    @abstractmethod
    def estimate(self, module: nn.Module, optim: OptimSettings) -> dict[str, int]:
        """Bytes per rank that do not depend on the batch, by what holds them: "frozen weights", "trained weights",
        "gradients", "optimizer"."""

    def peak_memory(self) -> int:
        """Most bytes ever in use on this rank's GPU, or by its process where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
