"""The latent span: prefill, latents, extend, score; group rollout; the differentiable trajectory."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "State": "state",
    "advance": "engine",
    "extend": "engine",
    "prefill": "engine",
    "score": "engine",
    "splice": "engine",
    "think": "engine",
    "token_logprobs": "engine",
    "Memory": "recurrence",
    "trajectory": "recurrence",
    "Completion": "rollout",
    "Rollout": "rollout",
    "decode": "rollout",
    "rollout": "rollout",
    "GREEDY": "sampling",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"realvr.latent.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
