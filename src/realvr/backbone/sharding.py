"""One model over all GPUs of a machine, for models that none of them holds.

The decoder layers lie on one GPU after the other; vision and embeddings are on the first, the final norm and an output
layer of its own on the last. One process runs them in turn, so only one GPU works at a time: this is for room, not for
speed. Batches, hidden states, masks and what probes record are on the first GPU; each layer keeps its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from realvr.errors import UserError, require
from realvr.families import Stock

if TYPE_CHECKING:
    from realvr.backbone.streaming import Weights

ROOM = 0.8
"""Share of a GPU's free memory that weights may take; the rest is for keys, values and activations."""


@dataclass(frozen=True)
class Spread:
    """Places a model over ``devices``; ``free`` are the bytes that each of them has left."""

    source: str
    devices: tuple[torch.device, ...]
    free: tuple[int, ...]

    @classmethod
    def over_all_gpus(cls, source: str) -> Spread:
        """Over every GPU that this process sees."""
        require(["accelerate"], "train", "--sharded")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UserError(
                "--sharded spreads a model over the GPUs of this machine, and there is none; without it the model is "
                "loaded into main memory"
            )
        free = tuple(torch.cuda.mem_get_info(number)[0] for number in range(count))
        return cls(source, tuple(torch.device("cuda", number) for number in range(count)), free)

    def __call__(self, model: Stock, weights: Weights) -> None:
        """Give every parameter and buffer its value and its place."""
        from realvr.backbone.streaming import set_tensor  # imports transformers

        place = self.plan(model)
        for name, tensor in weights:
            set_tensor(model, name, tensor.to(place[name], copy=True))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.devices[0])
        last = self.devices[-1]
        moved = [*model.model.language_model.layers, model.model.language_model.norm]
        for module in moved:
            _bring_inputs(module, next((p.device for p in module.parameters()), last))

    def plan(self, model: Stock) -> dict[str, torch.device]:
        """Names of parameters and buffers, each with its device."""
        decoder = model.model.language_model
        layers = [_bytes([layer]) for layer in decoder.layers]
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ending = [decoder.norm] if tied else [decoder.norm, model.get_output_embeddings()]
        closing = _bytes(ending)
        opening = _bytes([model]) - sum(layers) - closing
        numbers = self._spread(opening, layers, closing)
        device = {id(p): self.devices[n] for n, one in zip(numbers, decoder.layers, strict=True) for p in _tensors(one)}
        device |= {id(p): self.devices[-1] for one in ending for p in _tensors(one)}
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: device.get(id(tensor), self.devices[0]) for name, tensor in named}

    def _spread(self, opening: int, layers: Sequence[int], closing: int) -> list[int]:
        """Number of the device of each layer: in order, each device filled in proportion to its room."""
        room = [ROOM * bytes_ for bytes_ in self.free]
        total, used = opening + sum(layers) + closing, [0.0] * len(room)
        used[0] += opening
        used[-1] += closing
        numbers, at = [], 0
        for size in layers:
            while at + 1 < len(room) and used[at] + size / 2 > total * room[at] / sum(room):
                at += 1
            used[at] += size
            numbers.append(at)
        if any(taken > limit for taken, limit in zip(used, room, strict=True)):
            self._refuse(total, room, max(opening, closing))
        return numbers

    def _refuse(self, total: int, room: Sequence[float], piece: int) -> None:
        gib = 2**30
        count, least = len(room), min(room)
        enough = count + 1
        while enough * least < total + piece and enough < 10_000:
            enough += 1
        raise UserError(
            f"{self.source} does not fit: its weights take {total / gib:.1f} GiB, and the {count} GPUs of this machine "
            f"have room for {sum(room) / gib:.1f} GiB ({ROOM:.0%} of what is free); {enough} such GPUs would do"
            + (", or --dtype bfloat16" if total * 0.5 < sum(room) else "")
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes(modules: Sequence[nn.Module]) -> int:
    unique = {id(tensor): tensor for module in modules for tensor in _tensors(module)}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    """Move every tensor that a module is called with to its device."""

    def move(value: object) -> Any:  # noqa: ANN401  (whatever it was given)
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, dict):
            return {key: move(each) for key, each in value.items()}
        return type(value)(map(move, value)) if type(value) in (tuple, list) else value  # type: ignore[call-arg, call-overload]

    module.register_forward_pre_hook(lambda _, args, kwargs: (move(args), move(kwargs)), with_kwargs=True)
