"""The latent span: prefill, latents, extend, score; group rollout; the differentiable trajectory."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "State": "state",
    "decoder_pass": "span",
    "extend": "span",
    "prefill": "span",
    "score": "span",
    "splice": "span",
    "think": "span",
    "token_logprobs": "span",
    "Memory": "recurrence",
    "trajectory": "recurrence",
    "Completion": "group_rollout",
    "Rollout": "group_rollout",
    "decode": "group_rollout",
    "rollout": "group_rollout",
    "GREEDY": "sampling",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"realvr.latent.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
