"""Decoder layers under gradient checkpointing for one pass, whatever the model itself is set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from realvr.backbone.backbone import Backbone
from realvr.errors import UserError
from realvr.latent.modes import recomputed_layers


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
    switches: list[Any] = [m for m in backbone.decoder.modules() if hasattr(m, "gradient_checkpointing")]
    # Also where the model has it on already: its own function may be the reentrant one, which runs a layer outside the
    # graph, so that the keys and values kept from it would carry no gradient.
    before = [(m, m.gradient_checkpointing, m.training, vars(m).get("_gradient_checkpointing_func")) for m in switches]
    backbone.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # That also hangs a hook on the embedding, one more with every call, which only the reentrant kind needs.
    backbone.decoder.disable_input_require_grads()
    count = recomputed_layers(wanted, len(layers))
    for layer in layers[:count]:
        layer.training = True  # the layer's own switch only: its submodules (dropout) keep their mode
    for layer in layers[count:]:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, flag, training, function in before:
            module.gradient_checkpointing, module.training = flag, training
            if function is not None:
                module._gradient_checkpointing_func = function
