"""Full fine-tuning or low-rank adapters (peft), behind one small surface."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realvr.backbone.automatic import is_on
from realvr.backbone.backbone import Backbone
from realvr.backbone.notices import notice_once
from realvr.errors import UserError, require
from realvr.families import Stock
from realvr.training.marker_rows import fold_marker_rows, train_marker_rows
from realvr.training.sections import LoraSettings, settled


class Adapters:
    """With ``rank`` 0 every decoder weight is trained; otherwise adapters on the named linear layers of the decoder
    and, with ``markers``, the embedding rows of the latent markers."""

    def __init__(self, backbone: Backbone, settings: LoraSettings, markers: bool = False) -> None:
        self.rank = int(settings.rank)
        self.peft: Any = None
        backbone.freeze_vision()
        if not self.rank:
            return
        require(["peft"], "train", "lora.rank")
        from peft import LoraConfig, get_peft_model

        from realvr.training.thin_lora import thin

        suffixes = tuple(settings.targets)
        names = [
            name
            for name, _ in backbone.model.named_modules()
            if name.endswith(suffixes) and ".language_model." in f".{name}."
        ]
        if not names:
            raise UserError(f"lora.targets {list(settings.targets)} match no layer of the language model")
        alpha: Any = settings.alpha  # peft declares an int and takes any number
        config = LoraConfig(r=self.rank, lora_alpha=alpha, lora_dropout=settings.dropout, target_modules=names)
        # peft replaces the layers in place: the backbone keeps its model object and its call paths.
        with warnings.catch_warnings():  # peft asks transformers by a name that is on its way out
            warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
            self.peft = get_peft_model(backbone.model, thin(config))
        nvidia = backbone.device.type == "cuda" and torch.version.hip is None
        wanted = is_on(settled(settings, backbone).kernels)
        if wanted and nvidia and backbone.dtype == torch.bfloat16:
            self.use_kernels(backbone.device)
        if markers:
            train_marker_rows(backbone)

    def use_kernels(self, device: torch.device) -> None:
        """Of all layers of whose shape kernels of our own are right on this device; a notice names the others."""
        from realvr.training import adapter_kernels
        from realvr.training.thin_lora import ThinLinear

        layers = [module for module in self.peft.modules() if isinstance(module, ThinLinear)]
        why = {widths: adapter_kernels.wrong(device, self.rank, *widths) for widths in {each.widths for each in layers}}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the comparison, in float64
        for layer in layers:
            layer.kernels = None if why[layer.widths] else device
        for reason in sorted({text for text in why.values() if text}):
            shapes = ", ".join(f"{i} x {o}" for i, o in sorted(widths for widths in why if why[widths] == reason))
            notice_once(f"adapters of layers of {shapes}: operations of torch instead of our kernels ({reason})")

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The policy without its adapters."""
        with self.peft.disable_adapter():
            yield

    @contextmanager
    def still(self) -> Iterator[None]:
        """Without the adapters' dropout: what is sampled is the policy itself."""
        noisy = [m for m in self.peft.modules() if isinstance(m, nn.Dropout) and m.training] if self.peft else []
        for module in noisy:
            module.eval()
        try:
            yield
        finally:
            for module in noisy:
                module.train()

    def export(self, backbone: Backbone, directory: Path) -> None:
        """Write a plain HF directory. Adapters are merged into copies in main memory, so that training can go on."""
        backbone.save(directory, None if self.peft is None else merged_state(backbone.model))


def merged_state(model: Stock) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same, under its names. One layer is merged at a time,
    by peft, in a copy: an engine may have wrapped the modules around it, and those cannot be copied."""
    state: dict[str, Tensor] = {}
    merged: dict[str, dict[str, Tensor]] = {}
    modules = dict(model.named_modules())
    for name, tensor in model.state_dict().items():
        owner, _, inner = name.partition(_BASE)
        if not inner:
            if not any(f".{part}" in name for part in _ADAPTER):
                state[name] = tensor
            continue
        if owner not in merged:
            merged[owner] = _merged(modules[owner])
        state[f"{owner}.{inner}"] = merged[owner].pop(inner)
    fold_marker_rows(model, state)
    return state


_BASE, _ADAPTER = ".base_layer.", ("lora_", "marker_rows")


def _merged(layer: nn.Module) -> dict[str, Tensor]:
    """Weights of a layer with its adapter merged."""
    memo: dict[int, Any] = {id(p): nn.Parameter(_copied(p), requires_grad=False) for p in layer.parameters()}
    memo |= {id(buffer): _copied(buffer) for buffer in layer.buffers()}
    alone: Any = copy.deepcopy(layer, memo)
    alone.merge()
    return dict(alone.get_base_layer().state_dict())


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
