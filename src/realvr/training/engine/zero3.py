"""DeepSpeed ZeRO stage 3 through accelerate: parameters, gradients and optimizer in slices, one per rank.

Weights and computation have the type the model was loaded with; there is no autocast. DeepSpeed updates 32-bit masters
of each rank's slices with our AdamW and rounds them into the weights. Gradients are summed over ranks in the type of
the trained weights, and over microbatches in 32 bits. Clipping is ours. Frozen vision towers stay whole on every rank,
because ranks pass through them unequally often.

In Stage 2 every rank holds the whole gradient of the trained weights for a moment: a backward pass goes through each
layer several times, autograd sums over them, and DeepSpeed cuts the sum. (FSDP2 cuts after each pass.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from realvr.backbone.backbone import VISION
from realvr.errors import UserError
from realvr.training.engine import slices
from realvr.training.engine.accelerated import Accelerated
from realvr.training.engine.placing import fill
from realvr.training.engine.protocol import Engine, trained_of
from realvr.training.engine.settings import EngineSettings, ZeRO3Settings
from realvr.training.engine.zero3_start import configuration, start
from realvr.training.estimate.peak import bucket_of, bytes_of, gathers_whole
from realvr.training.metrics import Metrics
from realvr.training.optimizer import parameter_groups
from realvr.training.sections import OptimSettings

SHOWN = 16
"""Values of a parameter that are hashed."""


class ZeRO3(Accelerated, Engine):
    """Each layer gathers its parameters in every pass, and every backward pass hands each rank its slice of the summed
    gradients."""

    name = "zero3"
    title = "DeepSpeed ZeRO-3"
    Config = ZeRO3Settings
    packages = ("accelerate", "deepspeed")
    extra = "deepspeed"
    launcher_flag = "ACCELERATE_USE_DEEPSPEED"
    shards = True
    elastic = True
    keeps_gradients = True

    def __init__(self, cpu: bool = False, settings: EngineSettings | None = None) -> None:
        self.settings: ZeRO3Settings = settings if isinstance(settings, ZeRO3Settings) else ZeRO3Settings()
        self.accelerator = start(cpu or not torch.cuda.is_available(), self.settings)
        self._wrapped: Any = None
        self._optimizer: Any = None
        self._gathered = False
        self._lockstep = self.settings.rollout == "lockstep"

    # ------------------------------------------------------------------ parameters

    @override
    def prepare(self, module: nn.Module, optim: OptimSettings) -> None:
        trained = trained_of(module)
        self._refuse(module, trained, optim)
        dtype = max((parameter.dtype for parameter in trained), key=lambda kind: kind.itemsize)
        for parameter in trained:  # DeepSpeed takes one type: rows of 16 bits beside adapters of 32 are rounded at use
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        groups = parameter_groups(module, optim.weight_decay)
        on_gpu = self.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=on_gpu or None)
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        config["communication_data_type"] = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        with whole_towers(module):
            self._wrapped, _ = self.accelerator.prepare(module, self._optimizer)
        self._lockstep = not self._fits()

    def _fits(self) -> bool:
        """Whether all parameters of this model can be whole on every rank during a rollout. Masters, moments and
        gradients are there by now."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        whole = sum(full_size(parameter) for parameter in self.module.parameters() if is_sliced(parameter))
        return not self.any(not gathers_whole("zero3", self.settings.rollout, whole, free))

    def _refuse(self, module: nn.Module, trained: Sequence[nn.Parameter], optim: OptimSettings) -> None:
        wide = next((parameter.dtype for parameter in module.parameters() if parameter.dtype.itemsize > 4), None)
        if wide is not None:
            raise UserError("model.dtype: DeepSpeed trains in bfloat16 or float32, not float64 (--engine ddp does)")
        if not optim.master_weights and any(parameter.dtype.itemsize < 4 for parameter in trained):
            raise UserError(
                "optim.master_weights false: DeepSpeed always keeps 32-bit masters of 16-bit weights; leave it out, or "
                "choose another engine"
            )

    @property
    @override
    def wrapped(self) -> Any:
        if self._wrapped is None:
            raise RuntimeError("prepare() comes first")
        return self._wrapped

    @property
    @override
    def module(self) -> nn.Module:
        found: nn.Module = self.wrapped.module
        return found

    @override
    def parameter_kind(self, parameter: nn.Parameter) -> str:
        return "ZeRO-3 slice" if is_sliced(parameter) else super().parameter_kind(parameter)

    @override
    def held_numbers(self, parameter: nn.Parameter) -> int:
        return own_slice(parameter).numel()

    @property
    @override
    def lockstep(self) -> bool:
        return self._lockstep

    @contextmanager
    @override
    def full_parameters(self) -> Iterator[None]:
        from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

        if self._gathered or self.lockstep or self._wrapped is None:
            yield
            return
        self._gathered = True
        with ExitStack() as gathered:
            # Takes off the hooks that would let a layer's parameters go after its pass, and puts them back in the end.
            gathered.enter_context(unwrap_model_for_generation(self.wrapped))
            yield
            with whole_towers(self.module):
                gathered.close()
        self._gathered = False

    @override
    def place(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
        from deepspeed.runtime.zero import Init

        fill(model, weights, self.device, done=lambda layer: Init(module=layer, config_dict_or_path=self._config))

    @override
    def freeze(self, module: nn.Module) -> None:
        import deepspeed

        module.requires_grad_(False)
        with whole_towers(module):
            deepspeed.initialize(model=module, config=self._config)

    @property
    def _config(self) -> dict[str, Any]:
        """DeepSpeed's configuration; `prepare` adds to that of the accelerator."""
        return configuration(self.settings)

    # ------------------------------------------------------------------ one optimizer step

    @override
    def forward(self, microbatch: object, term: str | None = None) -> tuple[Tensor, Metrics]:
        found: tuple[Tensor, Metrics] = (
            self.wrapped(microbatch) if term is None else self.wrapped(microbatch, term=term)
        )
        return found

    @override
    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """ZeRO-3 keeps no whole gradients: each backward pass is reduced."""
        return nullcontext()

    @override
    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages over ranks and the losses of the ranks add up, hence the factor."""
        self.wrapped.backward(loss * self.world)

    @override
    def gradient_norm(self, clip: float = 0.0) -> float:
        from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

        gradients = {parameter: safe_get_local_grad(parameter) for parameter in self.trainable()}
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        square = norms.double().square().sum()
        torch.distributed.all_reduce(square)
        norm = float(square.sqrt())
        if clip and norm > clip:
            for parameter, gradient in gradients.items():
                safe_set_local_grad(parameter, gradient * (clip / (norm + 1e-6)))  # as torch's clip_grad_norm_
        return norm

    @override
    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with whole_towers(self.module):
            self.wrapped.step()
        self.drop_gradients()

    @override
    def drop_gradients(self) -> None:
        from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

        self.wrapped.optimizer.zero_grad()
        # The slices too: DeepSpeed would use those of the last step for a parameter that the next one does not reach.
        for parameter in self.trainable():
            safe_set_local_grad(parameter, torch.zeros_like(safe_get_local_grad(parameter)))

    # ------------------------------------------------------------------ saving

    @override
    def save(self, directory: Path) -> None:
        slices.save(directory, self.module, self._optimizer)

    @override
    def load(self, directory: Path) -> None:
        flats = self.wrapped.optimizer.fp32_partitioned_groups_flat
        slices.load(directory, self.module, self._optimizer, flats)

    @override
    def export(self, write: Callable[[], None]) -> None:
        """Collected one module at a time into the main memory of rank 0: no GPU holds the whole model."""
        from deepspeed.runtime.zero import GatheredParameters

        whole: dict[nn.Parameter, Tensor] = {}
        for inner in self.module.modules():
            own = [parameter for parameter in inner.parameters(recurse=False) if is_sliced(parameter)]
            with GatheredParameters(own) if own else nullcontext():
                if self.main:
                    whole |= {parameter: parameter.detach().to("cpu", copy=True) for parameter in own}
        kept = {parameter: parameter.data for parameter in whole}
        for parameter, full in whole.items():
            parameter.data = full
        try:
            if self.main:
                write()
        finally:
            for parameter, data in kept.items():
                parameter.data = data

    @override
    def frozen_digest(self) -> str:
        """Of the first rank's slices, which hold the first values; parameters of a few numbers are gathered."""
        from deepspeed.runtime.zero import GatheredParameters

        digest = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                continue
            small = is_sliced(parameter) and own_slice(parameter).numel() < SHOWN
            with GatheredParameters([parameter]) if small else nullcontext():
                values = (parameter.detach() if small else own_slice(parameter)).flatten()[:SHOWN].double().tolist()
            digest.update(f"{name} {full_shape(parameter)} {values}".encode())
        return self.gather_objects(digest.hexdigest()[:16])[0]

    # ------------------------------------------------------------------ memory

    @override
    def estimate(self, module: nn.Module, optim: OptimSettings) -> dict[str, int]:
        found = ((self.held_numbers(p), p.element_size(), p.requires_grad) for p in module.parameters())
        return bytes_of(found, optim.master_weights, bucket_of(self.settings.zero_optimization))


def is_sliced(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed has cut the parameter into slices."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_size(parameter: nn.Parameter) -> int:
    """Bytes of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()


def own_slice(parameter: nn.Parameter) -> Tensor:
    """What this rank keeps of a parameter, padding included."""
    kept: Tensor = getattr(parameter, "ds_tensor", parameter)
    return kept.detach()


@contextmanager
def whole_towers(module: nn.Module) -> Iterator[None]:
    """Hide frozen vision towers from DeepSpeed while it walks through the modules."""
    hidden: list[tuple[nn.Module, str, nn.Module]] = []
    for inner in list(module.modules()):
        for name, child in list(inner.named_children()):
            if name in VISION and not any(parameter.requires_grad for parameter in child.parameters()):
                hidden.append((inner, name, child))
                setattr(inner, name, nn.Identity())
    try:
        yield
    finally:
        for parent, name, child in hidden:
            setattr(parent, name, child)
