"""peft's linear layer with a shorter forward pass. Needs peft; imported where adapters are made.

At every call peft's own forward checks everything that could have been configured, looks its parts up through module
attributes, and scales, adds and casts in three operations. A decoding step passes 7 adapted layers per decoder layer,
so this took most of its time. In large passes with gradient the two layers of an adapter are one node, which keeps
less, and on a GPU our own kernels compute the layer and its adapter (`realvr.training.low_rank`). Everything else is
peft's: parameters and their names, merging, export, ``disable_adapter``.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear, LoraConfig
from torch import Tensor, nn

from realvr.backbone import small_kernels
from realvr.training import low_rank


class ThinLinear(Linear):
    """``base(x) + scaling * B(A(dropout(x)))``, on a CPU bit for bit what peft computes. Whatever is not one active,
    unmerged adapter of the plain kind goes peft's way."""

    kernels: torch.device | None = None
    """Where kernels of our own may run (`Adapters` sets it): there the numbers are peft's up to rounding."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, in its own type."""
        active = self._active_adapter
        name = active if isinstance(active, str) else active[0] if len(active) == 1 else ""
        parts = self._modules
        down = parts["lora_A"]._modules.get(name)  # type: ignore[union-attr]
        if down is None or args or kwargs or self._disable_adapters or self.merged_adapters or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        up: Any = parts["lora_B"]._modules[name]  # type: ignore[union-attr]
        dropout: Any = parts["lora_dropout"]._modules[name]  # type: ignore[union-attr]
        drops = _drops(dropout)
        narrow = not drops and self._narrow(x, down, up)
        if narrow and self.kernels == x.device and low_rank.frozen(parts["base_layer"]):  # type: ignore[arg-type]
            return low_rank.adapted(x, parts["base_layer"], down.weight, up.weight, self.scaling[name])  # type: ignore[arg-type]
        shape = x.shape
        # Flat once: each product would fold its rows and unfold them again. In the graph gradients would be added up in
        # another order.
        if not torch.is_grad_enabled() and x.is_contiguous():
            x = x.view(-1, shape[-1])
        # Parts are called as modules: an engine may gather their parameters in hooks.
        result: Tensor = parts["base_layer"](x)  # type: ignore[misc]
        if narrow and torch.is_grad_enabled() and x.numel() >= small_kernels.FEW:
            result = low_rank.low_rank(result, x, down.weight, up.weight, self.scaling[name])  # type: ignore[arg-type]
        else:
            if self.cast_input_dtype_enabled:
                x = x.to(down.weight.dtype)  # type: ignore[arg-type]
            if drops:
                x = dropout(x)
            result = _scaled_sum(result, up(down(x)), self.scaling[name])
        return result if x.dim() == len(shape) else result.view(*shape[:-1], result.shape[-1])

    def _narrow(self, x: Tensor, down: nn.Module, up: nn.Module) -> bool:
        """Whether the input has fewer bits than the adapter, so that peft would keep a copy of it, and the two layers
        can be one node."""
        return (
            x.dtype == torch.bfloat16
            and x.numel() > 0
            and down.weight.dtype == torch.float32
            and self.cast_input_dtype_enabled
            and low_rank.in_place(down)
            and low_rank.in_place(up)
            and not torch.is_autocast_enabled(x.device.type)
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return int(self.in_features or 0), int(self.out_features or 0)  # peft declares that they may be unknown

    @property
    def keeps_input(self) -> bool:
        """Whether large passes in 16 bits keep their input and no copy of it: for estimates of memory."""
        layers = [*self.lora_A.values(), *self.lora_B.values()]
        return all(map(low_rank.called_directly, layers)) and not any(map(_drops, self.lora_dropout.values()))


def _drops(dropout: nn.Module) -> bool:
    return not isinstance(dropout, nn.Identity) and dropout.training


def _scaled_sum(result: Tensor, update: Tensor, scaling: float) -> Tensor:
    """``(result + update * scaling)`` in the type of ``result``, rounded as in separate operations."""
    update, scaling = low_rank.scaled(update, scaling)
    # In place only outside the graph: ``result`` may be a view there.
    if not torch.is_grad_enabled():
        return result.add_(update, alpha=scaling)
    return torch.add(result, update, alpha=scaling).to(result.dtype)


def thin(config: LoraConfig) -> LoraConfig:
    """The configuration, with which peft makes thin layers: its way for layers of one's own."""
    config._register_custom_module({nn.Linear: ThinLinear})
    return config
