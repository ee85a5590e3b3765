"""AdamW: which parameters decay, and 32-bit master weights for 16-bit models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from realvr.training.sections import OptimSettings


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; norms, biases (fewer than two dimensions) and embedding
    tables do not. An output matrix tied to an embedding counts as the embedding."""
    tables = {id(inner.weight) for inner in module.modules() if isinstance(inner, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim >= 2 and id(parameter) not in tables].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decays[kind]} for kind, params in groups.items() if params]


def build_optimizer(module: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; with master weights where some of them are 16-bit and it is asked for."""
    groups = parameter_groups(module, settings.weight_decay)
    low = any(parameter.dtype.itemsize < 4 for group in groups for parameter in group["params"])
    if low and settings.master_weights:
        return MasterAdamW(groups, settings.lr, settings.betas, settings.eps)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW whose moments and weights are 32-bit, whatever the model's type; the model gets the rounded weights.

    The next weight is computed from the master copy, so that updates far below the rounding of a 16-bit weight add up
    instead of being lost. Twelve bytes per trainable parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        if not state:
            state["step"] = 0
            state["master"] = parameter.detach().to(wide, copy=True)
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
        assert parameter.grad is not None
        gradient = parameter.grad.to(wide)
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = math.sqrt(1 - beta2 ** state["step"])
        denominator = (state["exp_avg_sq"].sqrt() / scale).add_(group["eps"])
        state["master"].mul_(1 - lr * group["weight_decay"])
        state["master"].addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1 ** state["step"]))
        parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As usual, but without torch's cast of every state to the type of its parameter: that would round it."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
