"""Fast paths of the package that `speed.py --options` switches on and off, to show what each contributes.

A set is ``plain`` (all off), ``default`` (as the package has them) or ``fast`` (all on), with changes behind a colon:
``fast:decode=static,gradients=autograd``. Options that are ``auto`` are decided once the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from realvr.backbone.automatic import Where
from realvr.backbone.backbone import Backbone
from realvr.latent.fast import FastDecode, fast_decode
from realvr.training.gradients import Deferral, DeferredLinear, defer_gradients
from realvr.training.methods.lvr_sft import LvrSftConfig
from realvr.training.methods.realvr import ReaLVRConfig
from realvr.training.sections import LoraSettings, ModelSettings, OptimSettings

CHOICES = {
    "decode": ("off", "static", "graph", "auto"),
    "rollouts": ("microbatch", "together"),
    "gradients": ("autograd", "deferred"),
    "lora": ("peft", "thin", "auto", "kernels"),
    "packed": ("mask", "auto", "variable"),
    "vision": ("stock", "padded"),
    "layers": ("stock", "auto", "fused"),
    "replay": ("mask", "auto", "split"),
    "span": ("plain", "auto", "recorded"),
}
"""What each can be: the plain way first, all on last."""
SETTINGS = {
    "packed": "variable_length",
    "layers": "fused_layers",
    "replay": "split_attention",
    "span": "recorded_span",
}
"""Settings of the package that may be ``auto``: on or off by the model and its device. So may ``lora``."""


@dataclass(frozen=True)
class Options:
    """``decode``: latent steps and decoding in static shapes, or as CUDA graphs. ``rollouts``: prompts of a step by
    microbatch or together. ``gradients``: of the weights that latent steps share. ``lora``: the forward pass of
    adapters, and whether kernels of our own compute it. ``packed``: attention of Stage 1. ``vision``: weights of the
    frozen tower, and how pixels get there. ``layers``: norms, rotary embeddings and MLP gates of the decoder.
    ``replay``: attention of completions behind their prompt. ``span``: latent steps with gradient, one kernel at a time
    or as CUDA graphs."""

    decode: str = "off"
    rollouts: str = "microbatch"
    gradients: str = "autograd"
    lora: str = "peft"
    packed: str = "mask"
    vision: str = "stock"
    layers: str = "stock"
    replay: str = "mask"
    span: str = "plain"

    def method(self, microbatch: int) -> dict[str, Any]:
        """Settings of a Stage-2 method."""
        together = self.rollouts == "together"
        return {"fast_decode": self.decode, "rollout_batch": None if together else microbatch} | self.passes()

    def passes(self) -> dict[str, Any]:
        """Settings of its passes with gradient."""
        return {"split_attention": self.replay == "split", "recorded_span": self.span == "recorded"}

    def adapters(self, rank: int) -> dict[str, Any]:
        """Settings of LoRA."""
        return {
            "rank": rank,
            "alpha": 2 * max(1, rank),
            "kernels": "auto" if self.lora == "auto" else self.lora == "kernels",
        }

    def settled(self, backbone: Backbone) -> Options:
        """With what ``auto`` stands for with this model."""
        where = Where.of(backbone)
        asked = {key: setting for key, setting in SETTINGS.items() if getattr(self, key) == "auto"}
        found = {key: CHOICES[key][-1 if where.takes(name) else 0] for key, name in asked.items()}
        if self.lora == "auto":  # training never has peft's own
            found["lora"] = "kernels" if where.takes("kernels") else "thin"
        return replace(self, **found)

    def facts(self) -> dict[str, str]:
        return asdict(self)


def _default() -> Options:
    method, model, kernels = ReaLVRConfig(type="realvr"), ModelSettings.model_fields, LoraSettings().kernels

    def chosen(key: str, switch: bool | str) -> str:
        return "auto" if switch == "auto" else CHOICES[key][-1 if switch else 0]

    return Options(
        decode=method.fast_decode,
        rollouts="together",
        gradients=OptimSettings.model_fields["gradients"].default,
        lora="auto" if kernels == "auto" else "kernels" if kernels else "thin",
        packed=chosen("packed", LvrSftConfig().variable_length),
        vision=chosen("vision", model["fast_vision"].default),
        layers=chosen("layers", model["fused_layers"].default),
        replay=chosen("replay", method.split_attention),
        span=chosen("span", method.recorded_span),
    )


def parse_options(text: str, device: torch.device) -> Options:
    """One set; see the top of the file."""
    name, _, changes = text.partition(":")
    graph = "graph" if device.type == "cuda" else "static"
    sets = {
        "plain": Options(),
        "default": _default(),
        "fast": Options(graph, *(choices[-1] for key, choices in CHOICES.items() if key != "decode")),
    }
    if name not in sets:
        raise SystemExit(f"--options {text}: a set is one of {', '.join(sets)}")
    found = sets[name]
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        if value not in CHOICES.get(key, ()):
            known = "; ".join(f"{key}={'|'.join(values)}" for key, values in CHOICES.items())
            raise SystemExit(f"--options {text}: no such change as {change}; there are {known}")
        found = replace(found, **{key: value})
    assert [field.name for field in fields(Options)] == list(CHOICES)
    return found


class Switched:
    """The model of one run with its options: what a pass needs that is not a setting."""

    def __init__(self, backbone: Backbone, options: Options) -> None:
        self.backbone, self.options = backbone, options
        self.fast: FastDecode | None = fast_decode(backbone, options.decode)  # type: ignore[arg-type]
        self.deferral: Deferral | None = None
        backbone.fast_vision = options.vision == "padded"
        backbone.fused_layers = options.layers == "fused"
        if options.gradients == "deferred":
            self.deferral = defer_gradients(backbone.model)
        if options.lora == "peft":
            thick_adapters(backbone)

    def backward(self, loss: torch.Tensor) -> None:
        """As the loop of one process does it."""
        with nullcontext() if self.deferral is None else self.deferral.into_grad():
            loss.backward()


def thick_adapters(backbone: Backbone) -> None:
    """Adapters with peft's own forward pass."""
    for module in backbone.model.modules():
        if type(module).__name__ == "ThinLinear":
            module.__class__ = type(module).__mro__[1]


@contextmanager
def stock_layers(backbone: Backbone) -> Iterator[None]:
    """Linear layers as torch has them and the rest as transformers has it, for the baseline; ours come back afterwards,
    over the same parameters."""
    fused = backbone.fused_layers
    ours = [module for module in backbone.model.modules() if isinstance(module, DeferredLinear)]
    for module in ours:
        module.__class__ = nn.Linear
    backbone.fused_layers = False
    try:
        yield
    finally:
        backbone.fused_layers = fused
        for module in ours:
            module.__class__ = DeferredLinear
