"""AdamW: which parameters decay, and 32-bit master weights for 16-bit models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from realvr.training.sections import OptimSettings

LOT = 2**26
"""Most elements that are updated at a time: the 32-bit gradients and quotients of a lot are temporary."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; norms, biases (fewer than two dimensions) and embedding
    tables or rows of them do not. An output matrix tied to an embedding counts as the embedding."""
    embeddings = [inner for inner in module.modules() if isinstance(inner, nn.Embedding)]
    tables = {id(parameter) for inner in embeddings for parameter in inner.parameters(recurse=False)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # of the whole one, where DeepSpeed has cut it
            groups[len(shape) >= 2 and id(parameter) not in tables].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decays[kind]} for kind, params in groups.items() if params]


def build_optimizer(
    module: nn.Module, settings: OptimSettings, local: Callable[[nn.Parameter], nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; with master weights where some of them are 16-bit and it is asked for.

    ``local`` gives the part of a parameter that this process updates, where it is not all of it.
    """
    groups = parameter_groups(module, settings.weight_decay)
    if local is not None:
        groups = [group | {"params": [local(parameter) for parameter in group["params"]]} for group in groups]
    low = any(parameter.dtype.itemsize < 4 for group in groups for parameter in group["params"])
    if low and settings.master_weights:
        return MasterAdamW(groups, settings.lr, settings.betas, settings.eps)
    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=on_gpu or None)


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
            for count, parameters in self._alike(group["params"]):
                self._update(parameters, count, group)

    def _alike(self, parameters: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(updates so far, parameters) for those that have a gradient, in lots that fit into little memory."""
        lots: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                state["step"] = 0
                state["master"] = parameter.detach().to(wide, copy=True)
                state["exp_avg"] = torch.zeros_like(state["master"])
                state["exp_avg_sq"] = torch.zeros_like(state["master"])
            lot = lots[state["step"], parameter.device, parameter.dtype]
            if lot and sum(each.numel() for each in lot) + parameter.numel() > LOT:
                yield state["step"], list(lot)
                lot.clear()
            lot.append(parameter)
        for (count, _, _), lot in lots.items():
            yield count, lot

    def _update(self, parameters: list[Tensor], count: int, group: dict[str, Any]) -> None:
        """Many small tensors at a time: one at a time, a GPU would wait for Python."""
        states = [self.state[parameter] for parameter in parameters]
        masters, first, second = ([state[name] for state in states] for name in ("master", "exp_avg", "exp_avg_sq"))
        gradients = [
            p.grad.to(master.dtype) for p, master in zip(parameters, masters, strict=True) if p.grad is not None
        ]
        (beta1, beta2), lr = group["betas"], group["lr"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2 ** (count + 1)))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(masters, first, denominators, value=-lr / (1 - beta1 ** (count + 1)))
        torch._foreach_copy_(parameters, masters)
        for state in states:
            state["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As usual, but without torch's cast of every state to the type of its parameter: that would round it."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
