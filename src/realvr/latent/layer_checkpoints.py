"""Decoder layers under gradient checkpointing for one pass, whatever the model itself is set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from realvr.backbone.backbone import Backbone
from realvr.errors import UserError
from realvr.latent.modes import recomputed_layers

_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")
_recomputed = partial(checkpoint, use_reentrant=False)


@contextmanager
def layers_checkpointed(backbone: Backbone, wanted: float) -> Iterator[None]:
    """Run the first ``wanted`` share of the decoder layers (1: all) under HF gradient checkpointing; refuse a model
    that does so unasked."""
    layers: list[Any] = list(backbone.decoder.layers)
    active = any(layer.gradient_checkpointing and layer.training for layer in layers)
    if not torch.is_grad_enabled() or not (active or wanted):
        # Without a graph there is nothing to checkpoint; HF's own switch must not drop anything either way.
        yield
        return
    if not wanted:
        raise UserError(
            "gradient checkpointing is enabled on the model, but this pass asked for cached memory: transformers drops "
            "its key/value cache there with only a warning. Call model.gradient_checkpointing_disable() and choose "
            "memory='checkpointed-prefill' or memory='checkpointed' instead; both are exact"
        )
    # By the layers' own switches: the model's method also hangs a hook on the embedding, and releases of transformers
    # name it differently. Also where the model has it on already: its own function may be the reentrant one, which
    # runs a layer outside the graph, so that the keys and values kept from it would carry no gradient.
    before = [{name: vars(layer)[name] for name in _SWITCHES if name in vars(layer)} for layer in layers]
    count = recomputed_layers(wanted, len(layers))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < count
        if number < count:
            layer._gradient_checkpointing_func = _recomputed
            layer.training = True  # the layer's own switch only: its submodules (dropout) keep their mode
    try:
        yield
    finally:
        for layer, found in zip(layers, before, strict=True):
            for name in _SWITCHES:
                vars(layer).pop(name, None)
            vars(layer).update(found)
