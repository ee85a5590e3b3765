"""What a recorded step takes for granted is noticed when it changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft.tuners.lora import LoraLayer

from realvr.backbone import Backbone
from realvr.latent.graphs import fingerprint, why_not_modules
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings


def _adapted(backbone: Backbone) -> list[LoraLayer]:
    return [module for module in backbone.decoder.modules() if isinstance(module, LoraLayer)]


def _disabled(backbone: Backbone) -> None:
    for layer in _adapted(backbone):
        layer.enable_adapters(False)


def _merged(backbone: Backbone) -> None:
    layer = _adapted(backbone)[-1]
    layer.merged_adapters.append(layer.active_adapters[0])  # as a merge does, without its change of the weight


def _stronger(backbone: Backbone) -> None:
    _adapted(backbone)[0].scaling["default"] *= 2


def _other_forward(backbone: Backbone) -> None:
    norm = backbone.decoder.norm
    norm.forward = norm.forward


def _other_module(backbone: Backbone) -> None:
    layers = backbone.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]


def _other_buffer(backbone: Backbone) -> None:
    name, buffer = next(iter(backbone.decoder.rotary_emb.named_buffers()))
    setattr(backbone.decoder.rotary_emb, name, buffer.clone())


def _other_head(backbone: Backbone) -> None:
    backbone.model.lm_head.weight = torch.nn.Parameter(backbone.model.lm_head.weight.clone())


CHANGES = (_disabled, _merged, _stronger, _other_forward, _other_module, _other_buffer, _other_head)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(fresh: Backbone, change: Callable[[Backbone], None]) -> None:
    if fresh.family.name != "qwen2.5-vl":
        pytest.skip("one family is enough")
    Adapters(fresh, LoraSettings(rank=2, alpha=4))
    before = fingerprint(fresh)
    with torch.no_grad():
        next(fresh.decoder.parameters()).mul_(2)  # in place: the same step
    assert fingerprint(fresh) == before
    change(fresh)
    assert fingerprint(fresh) != before


def test_hooks_that_transformers_leaves_behind_do_nothing(fresh: Backbone) -> None:
    """A stock call that asks for hidden states leaves hooks on the layers for good; a hook of anybody else counts."""
    if fresh.family.name != "qwen2.5-vl":
        pytest.skip("one family is enough")
    layer = fresh.decoder.layers[0]
    with torch.no_grad():
        fresh.model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert layer._forward_hooks
    assert why_not_modules(fresh, longest=8) is None
    handle = layer.register_forward_hook(lambda *_: None)
    assert "hook" in str(why_not_modules(fresh, longest=8))
    handle.remove()
