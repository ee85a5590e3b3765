"""A model spread over several devices gives the results of one device, and no operation mixes devices.

There may be no second device here: `pretend_devices` has tensors that say where they are and refuse to meet others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ask
from pretend_devices import OnDevice, pretend
from realvr.backbone import FAMILIES, Backbone, Probe
from realvr.backbone.sharding import ROOM, Spread
from realvr.backbone.streaming import Stored, Weights
from realvr.errors import UserError
from realvr.latent import Sampling, prefill, rollout, think

FAST = ("qwen3-vl", "gemma3")
"""Visual features inside the decoder; sliding windows, two-way images and a tied output layer."""
DEVICES = tuple(torch.device("cpu", number) for number in (1, 2))


def spread(directory: Path, free: tuple[int, int] = (2**41, 2**40)) -> Backbone:
    """With more room on the first device, because most of a tiny model is not in its layers."""

    def place(model: Any, weights: Weights) -> None:
        read = list(weights)
        with pretend():
            Spread(str(directory), DEVICES, free)(model, iter(read))

    return Backbone.load(directory, place=place, announce=False)


@torch.no_grad()
def answers(backbone: Backbone) -> tuple[list[Tensor], list[list[int]]]:
    """Hidden states of two prompts with images of different sizes, a span, what probes saw of it, sampled replies."""
    probe = Probe(rows=torch.tensor([[3, 4], [0, 5]]), columns=slice(2, 9))
    pooled = Probe(pool=(torch.ones(2, 1, 1), torch.ones(2, 1, 1)), rows=torch.tensor([[3], [4]]), columns=slice(0, 1))
    prompts = [backbone.prompt(ask(0)), backbone.prompt(ask(1, 2))]
    state, hidden = prefill(backbone, backbone.batch(prompts), probes=[probe, pooled])
    _, latents = think(backbone, state.select(torch.tensor([1, 0], device=backbone.device)), 3)
    found = rollout(backbone, prompts, group=2, latents=2, sampling=Sampling(1.0, max_new=3), seed=3)
    tensors = [hidden, latents, probe.stack(), pooled.mean(), found.latents_BKD]
    return tensors, [one.ids for group in found.completions for one in group]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def test_layers_on_several_devices_give_the_same(
    build_tiny: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    one = Backbone.load(build_tiny(family), device="cpu")
    expected, replies = answers(one)
    backbone = spread(one.save(tmp_path))
    with pretend():
        layers = [next(layer.parameters()).device for layer in backbone.decoder.layers]
        assert sorted(set(layers), key=str) == list(DEVICES)
        assert all(next(module.parameters()).device == DEVICES[0] for module in backbone.vision_modules())
        assert backbone.device == DEVICES[0]
        found, ids = answers(backbone)
        assert {tensor.device for tensor in found} == {DEVICES[0]}
    assert ids == replies
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, OnDevice)
        assert torch.equal(mine.held, theirs)


def test_the_pretended_devices_refuse_to_meet() -> None:
    with pretend():
        a, b = (torch.ones(3, device=device) for device in DEVICES)
        with pytest.raises(RuntimeError, match="cpu:1.*cpu:2"):
            a + b
        with pytest.raises(RuntimeError, match="indices"):
            a[torch.zeros(1, dtype=torch.long, device=DEVICES[1])]
        assert (a + b.to(a.device)).tolist() == [2, 2, 2]


def test_a_plan_follows_the_room_and_refuses_what_does_not_fit(build_tiny: Callable[[str], Path]) -> None:
    model = Stored(str(build_tiny("gemma3")), "auto").model
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    four = tuple(torch.device("cuda", number) for number in range(4))

    def used(*free: int) -> list[int]:
        plan = Spread("model", four[: len(free)], free).plan(model)
        sizes = dict.fromkeys(four[: len(free)], 0)
        for name, parameter in model.named_parameters():
            sizes[plan[name]] += parameter.numel() * parameter.element_size()
        order = [plan[f"model.language_model.layers.{i}.mlp.up_proj.weight"].index for i in range(4)]
        assert order == sorted(order)
        return list(sizes.values())

    taken = used(2 * size, size, size)
    assert sum(taken) == size
    assert taken[0] > max(taken[1:])
    assert used(2 * size) == [size]
    with pytest.raises(UserError, match=r"model does not fit: .* the 2 GPUs .* such GPUs would do"):
        used(size // 2, size // 2)
    with pytest.raises(UserError, match="or --dtype bfloat16"):
        used(int(size / ROOM * 0.6))
