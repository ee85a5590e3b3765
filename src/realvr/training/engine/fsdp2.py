"""Several processes with parameters, gradients and optimizer in shards (``torch.distributed.fsdp.fully_shard``).

A decoder layer is one group: its parameters are gathered for each pass, and its gradients are summed and cut after each
pass of the backward (``passes.py``). All other parameters are one more group, the root: gathered for the whole step.
The last decoder layer belongs to it, because gradients reach the keys and values of a prompt there without passing
through the layer's output, which is where FSDP2 would gather. A frozen vision tower is not cut at all: ranks use it
unequally often.

The optimizer works on the local rows, so that its numbers are those of whole tensors, master weights included.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from typing_extensions import override

from realvr.training.engine.passes import reduce_each_pass
from realvr.training.engine.placing import decoder_layers, fill
from realvr.training.engine.protocol import Engine, alone, trained_of
from realvr.training.engine.rows import RowFiles, export_whole, local_rows, whole_tensor
from realvr.training.engine.settings import EngineSettings, FSDP2Settings
from realvr.training.engine.shards import piece
from realvr.training.engine.stacked import shape_of, stack
from realvr.training.engine.whole import estimate_whole
from realvr.training.estimate.peak import gathers_whole
from realvr.training.metrics import Metrics
from realvr.training.optimizer import build_optimizer
from realvr.training.sections import OptimSettings

OWN = ("language_model.", "lm_head")
"""Names of the parameters that a frozen vision tower does not have."""
SHOWN = 16
"""Values of a parameter that are hashed."""


class FSDP2(Engine):
    """Each rank holds its rows of every parameter; one layer at a time is whole."""

    name = "fsdp2"
    title = "several processes with FSDP2"
    Config = FSDP2Settings
    shards = True
    elastic = True
    launcher_flag = "ACCELERATE_USE_FSDP"

    def __init__(self, cpu: bool = False, settings: EngineSettings | None = None) -> None:
        self.settings = settings or FSDP2Settings()
        self._device = _device(cpu)
        _join(self._device, self.settings.timeout)
        self.mesh = init_device_mesh(self._device.type, (self.world,))
        self._module: nn.Module | None = None
        self._optimizer: Any = None
        self._local: dict[nn.Parameter, nn.Parameter] = {}
        self._gathers = True
        self._gathered = 0

    # ------------------------------------------------------------------ processes

    @property
    @override
    def rank(self) -> int:
        return dist.get_rank()

    @property
    @override
    def world(self) -> int:
        return dist.get_world_size()

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @property
    @override
    def distributed_type(self) -> str:
        return "FSDP"

    # ------------------------------------------------------------------ parameters

    @override
    def prepare(self, module: nn.Module, optim: OptimSettings) -> None:
        widest = max((parameter.dtype for parameter in trained_of(module)), key=lambda kind: kind.itemsize)
        for parameter in trained_of(module):  # a group has one type: rows of 16 bits beside adapters of 32
            if parameter.dtype != widest:
                parameter.data = parameter.data.to(widest)
        self._agree(module)
        layers, last = decoder_layers(module)[:-1], decoder_layers(module)[-1:]
        for layer in layers:
            self._shard(layer)
            reduce_each_pass(layer)
        for layer in last:
            stack(layer)
        inner = {id(parameter) for layer in layers for parameter in layer.parameters()}
        fully_shard(module, mesh=self.mesh, ignored_params=_replicated(module, inner))
        self._module = module
        self._prefetch(layers)
        self._begin(module)
        self._local = {p: nn.Parameter(local_rows(p)) for p in module.parameters() if p.requires_grad}
        self._optimizer = build_optimizer(module, optim, self._local.__getitem__)
        self._gathers = self._fits(optim)

    def _shard(self, layer: nn.Module) -> None:
        """Make a layer a group of its own, unless it is one."""
        if not isinstance(layer, FSDPModule):
            stack(layer)
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=self._reshards)

    @property
    def _reshards(self) -> bool:
        return isinstance(self.settings, FSDP2Settings) and self.settings.reshard_after_forward

    @override
    def place(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        """The layers are cut while they hold nothing; then each parameter gives this rank its rows."""
        for layer in decoder_layers(model)[:-1]:
            self._shard(layer)
            layer.to_empty(device=self.device)
        fill(model, weights, self.device)

    def _agree(self, module: nn.Module) -> None:
        """New parameters (adapters, heads) are drawn by each rank: those of rank 0 count."""
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                dist.broadcast(parameter.detach(), 0)

    def _prefetch(self, layers: Sequence[nn.Module]) -> None:
        """In backward each layer gathers the one before it. Said explicitly: by default FSDP2 goes by the passes since
        the last backward, rollouts included, and those differ between ranks."""
        for layer, before in zip(layers, [layers[-1:], *([each] for each in layers)], strict=False):
            layer.set_modules_to_backward_prefetch(list(before))  # type: ignore[operator]

    def _begin(self, module: nn.Module) -> None:
        """Let FSDP2 know its root before a layer runs alone, in a rollout. On a GPU it wants an argument, to move it
        there."""
        module._realvr_begin = lambda nothing: None  # type: ignore[assignment]
        register_fsdp_forward_method(module, "_realvr_begin")
        module._realvr_begin(0)  # type: ignore[operator]
        self._reshard()

    @property
    @override
    def module(self) -> nn.Module:
        if self._module is None:
            raise RuntimeError("prepare() comes first")
        return self._module

    def _parts(self) -> Iterator[FSDPModule]:
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def _reshard(self) -> None:
        for part in self._parts():
            part.reshard()

    def _fits(self, optim: OptimSettings) -> bool:
        """Whether all parameters of this model can be whole on every rank during a rollout."""
        free = None
        if self.device.type == "cuda":  # less what the optimizer will hold from the first step on
            states = estimate_whole(self.module, optim, self.held_numbers)["optimizer"]
            free = torch.cuda.mem_get_info(self.device)[0] - states
        whole = sum(_bytes(p) for p in self.module.parameters() if isinstance(p, DTensor))
        wanted = getattr(self.settings, "rollout", "auto")
        return not self.any(not gathers_whole("fsdp2", wanted, whole, free))

    @property
    @override
    def lockstep(self) -> bool:
        return not self._gathers and self.world > 1

    @contextmanager
    @override
    def full_parameters(self) -> Iterator[None]:
        self._gathered += 1
        if self._gathered == 1:
            self._gather()
        try:
            yield
        finally:
            self._gathered -= 1
            if not self._gathered:
                self._reshard()
                if self._gathers:
                    self._keep_layers(False)

    def _gather(self) -> None:
        """All parameters; in lockstep those of the root alone, while each layer gathers itself."""
        if not self._gathers:
            self.module.unshard()  # type: ignore[operator]
            return
        self._keep_layers(True)
        for part in self._parts():
            part.unshard()

    def _keep_layers(self, keep: bool) -> None:
        """Whether gathered layers stay whole after a pass, as the root always does."""
        reshard = self._reshards and not keep
        for part in self._parts():
            if part is not self.module:
                part.set_reshard_after_forward(reshard, recurse=False)

    @override
    def freeze(self, module: nn.Module) -> None:
        """Its layers are cut, each for itself; embeddings and vision tower stay whole."""
        module.requires_grad_(False)
        for layer in decoder_layers(module):
            self._shard(layer)
            layer.set_reshard_after_forward(True)  # type: ignore[operator]

    @override
    def held_numbers(self, parameter: nn.Parameter) -> int:
        return local_rows(parameter).numel()

    # ------------------------------------------------------------------ one optimizer step

    @override
    def forward(self, microbatch: object, term: str | None = None) -> tuple[Tensor, Metrics]:
        return self.module(microbatch) if term is None else self.module(microbatch, term=term)

    @override
    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Every backward pass sums over ranks: gradients that wait for the last one would be whole on every rank."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """FSDP2 averages over ranks and the losses of the ranks add up, hence the factor."""
        (loss * self.world).backward()

    def _gradients(self) -> list[Tensor]:
        """Local rows of every gradient, for the optimizer."""
        for parameter, local in self._local.items():
            if isinstance(parameter, DTensor):
                gradient = parameter.grad
                local.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        self._average([(p, local) for p, local in self._local.items() if not isinstance(p, DTensor)])
        return [local.grad for local in self._local.values() if local.grad is not None]

    def _average(self, whole: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Gradients of parameters that are on every rank: adapters in layers that were cut when the model was loaded.
        Once a step; those without one count as zero."""
        alike: dict[torch.dtype, list[tuple[nn.Parameter, nn.Parameter]]] = {}
        for parameter, local in whole:
            if local.grad is None:
                alike.setdefault(parameter.dtype, []).append((parameter, local))
        for pairs in alike.values():
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in pairs]
            flat = torch.cat([gradient.flatten() for gradient in own])
            dist.all_reduce(flat)
            parts = (flat / self.world).split([gradient.numel() for gradient in own])
            for (_, local), part in zip(pairs, parts, strict=True):
                local.grad = part.view_as(local)

    @override
    def gradient_norm(self, clip: float = 0.0) -> float:
        gradients = self._gradients()
        sharded = [isinstance(p, DTensor) for p, local in self._local.items() if local.grad is not None]
        wide = torch.promote_types(gradients[0].dtype, torch.float32) if gradients else torch.float32
        squares = torch.zeros(2, dtype=wide, device=self.device)
        for gradient, cut in zip(gradients, sharded, strict=True):
            squares[int(cut)] += torch.linalg.vector_norm(gradient, dtype=wide).square()
        dist.all_reduce(squares[1])
        norm = squares.sum().sqrt()
        if clip:
            scale = (clip / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        return float(norm)

    @override
    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._gradients()
        self._optimizer.step()
        self.drop_gradients()

    @override
    def drop_gradients(self) -> None:
        for parameter, local in self._local.items():
            parameter.grad = local.grad = None
        self._reshard()  # a forward pass without its backward leaves the root gathered

    # ------------------------------------------------------------------ saving, memory

    def _rows(self) -> RowFiles:
        return RowFiles(self.module, self._local, self._optimizer, self.rank, self.world)

    @override
    def save(self, directory: Path) -> None:
        self._rows().save(directory)

    @override
    def load(self, directory: Path) -> None:
        self._rows().load(directory)

    @override
    def export(self, write: Callable[[], None]) -> None:
        """One parameter at a time comes to the main process, into main memory: no device ever holds the model."""
        self._reshard()
        export_whole(self.module, self.main, write)

    @override
    def frozen_digest(self) -> str:
        """That of the whole model; the first values of a parameter are nearly always rank 0's."""
        digest = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                continue
            held = piece(parameter.shape, self.rank, self.world).rows if isinstance(parameter, DTensor) else None
            per_row = parameter.numel() // max(parameter.shape[0], 1)
            rank_0 = parameter.numel() if held is None else piece(parameter.shape, 0, self.world).rows or 0
            enough = held is None or rank_0 * per_row >= min(SHOWN, parameter.numel())
            tensor = local_rows(parameter) if enough else whole_tensor(parameter)
            first = tensor.flatten()[:SHOWN].double().cpu().tolist()
            path, _, own = name.rpartition(".")
            shape = shape_of(self.module.get_submodule(path), own)
            digest.update(f"{name} {shape} {first}".encode())
        return self.gather_objects(digest.hexdigest()[:16])[0]

    @override
    def estimate(self, module: nn.Module, optim: OptimSettings) -> dict[str, int]:
        return estimate_whole(module, optim, self.held_numbers) | {"gathered weights": self._most_gathered(module)}

    def _most_gathered(self, module: nn.Module) -> int:
        """Bytes of the root group and, beside it, two layers: one that computes, one on its way."""
        layers = decoder_layers(module)[:-1]
        inner = {id(p) for layer in layers for p in layer.parameters()}
        root = sum(_bytes(p) for p in module.parameters() if isinstance(p, DTensor) and id(p) not in inner)
        return root + 2 * max((sum(map(_bytes, layer.parameters())) for layer in layers), default=0)


def _device(cpu: bool) -> torch.device:
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, timeout: float) -> None:
    """The process group of the launcher, or one of this process alone."""
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    own: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone() else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **own)


def _replicated(module: nn.Module, inner: set[int]) -> set[nn.Parameter]:
    """What no group manages: the frozen parameters of the vision tower."""
    return {
        parameter
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and id(parameter) not in inner and not any(own in name for own in OWN)
    }


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
