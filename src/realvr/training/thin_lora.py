"""peft's linear layer with a short way through its forward pass. Needs peft; imported where adapters are made.

peft's own forward asks at every call what could have been configured, looks its parts up through module attributes, and
scales, adds and casts in three operations. A decoding step passes 7 adapted layers per decoder layer, so that this took
most of its time. Everything else is peft's: parameters and their names, merging, export, ``disable_adapter``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraConfig
from torch import Tensor, nn


class ThinLinear(Linear):
    """``base(x) + scaling * B(A(dropout(x)))``, bit for bit what peft computes. Whatever is not one active, unmerged
    adapter of the plain kind goes peft's way."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, in its own type."""
        active = self._active_adapter
        name = active if isinstance(active, str) else active[0] if len(active) == 1 else ""
        parts = self._modules
        down = parts["lora_A"]._modules.get(name)  # type: ignore[union-attr]
        if down is None or args or kwargs or self._disable_adapters or self.merged_adapters or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        shape = x.shape
        # Flat once: each product would fold its rows and unfold them again. In the graph gradients would be added up in
        # another order.
        if not torch.is_grad_enabled() and x.is_contiguous():
            x = x.view(-1, shape[-1])
        # Parts are called as modules: an engine may gather their parameters in hooks.
        result: Tensor = parts["base_layer"](x)  # type: ignore[misc]
        if self.cast_input_dtype_enabled:
            x = x.to(down.weight.dtype)  # type: ignore[arg-type]
        dropout = parts["lora_dropout"]._modules[name]  # type: ignore[union-attr]
        if not isinstance(dropout, nn.Identity):
            x = dropout(x)  # type: ignore[misc]
        update: Tensor = parts["lora_B"]._modules[name](down(x))  # type: ignore[union-attr, misc]
        result = _scaled_sum(result, update, self.scaling[name])
        return result if x.dim() == len(shape) else result.view(*shape[:-1], result.shape[-1])


def _scaled_sum(result: Tensor, update: Tensor, scaling: float) -> Tensor:
    """``(result + update * scaling)`` in the type of ``result``, rounded as in separate operations."""
    if math.frexp(scaling)[0] != 0.5:  # one operation would round once where two round twice
        update, scaling = update * scaling, 1.0
    # Multiplication by a power of two is exact. In place only outside the graph: ``result`` may be a view there.
    if not torch.is_grad_enabled():
        return result.add_(update, alpha=scaling)
    return torch.add(result, update, alpha=scaling).to(result.dtype)


def thin(config: LoraConfig) -> LoraConfig:
    """The configuration, with which peft makes thin layers: its way for layers of one's own."""
    config._register_custom_module({nn.Linear: ThinLinear})
    return config
