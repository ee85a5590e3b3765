"""Names that training no longer calls. They work, warn, and will go away.

Training takes log-probabilities from a language-model head that runs in chunks, so it never holds the logits that
``cross_entropy`` wants; and one function, ``objective.total``, adds the terms of every stage.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from realvr.maths import objective
from realvr.maths.precision import at_least_float32, masked, safe_divide

IGNORE = -100
"""Label of a position that carries no next-token loss."""


def cross_entropy(logits: Tensor, labels: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Next-token loss from logits (..., V) and labels (...): logits i predict label i; ``IGNORE`` is skipped."""
    from realvr.maths import reconstruction

    mask = labels != IGNORE
    # Ignored rows may hold anything: they are cleared before the softmax, not after.
    clean = masked(at_least_float32(logits), mask[..., None])
    logp = clean.log_softmax(-1).gather(-1, masked(labels, mask)[..., None])[..., 0]
    return reconstruction.next_token(logp, mask, denominator)


def stage1(next_token: Tensor, reconstruction: Tensor, weight: float = 0.1) -> Tensor:
    """Stage-1 loss: next-token loss plus ``weight`` times the reconstruction loss."""
    return objective.total({"next_token": (1.0, next_token), "reconstruction": (weight, reconstruction)})


_HOME: dict[str, dict[str, tuple[Any, str]]] = {
    "reconstruction": {
        "IGNORE": (IGNORE, "-100"),
        "cross_entropy": (cross_entropy, "reconstruction.next_token, which takes log-probabilities"),
        "stage1": (stage1, "objective.total"),
    },
    "precision": {
        "wide": (at_least_float32, "precision.at_least_float32"),
        "ratio": (safe_divide, "precision.safe_divide"),
    },
}
"""Module to its deprecated names, each with what to use instead."""


def find(module: str, name: str) -> object:
    """The deprecated ``name`` of a module of ``realvr.maths``, with a warning; AttributeError where there is none."""
    if name not in _HOME[module]:
        raise AttributeError(f"module 'realvr.maths.{module}' has no attribute {name!r}")
    value, instead = _HOME[module][name]
    warnings.warn(f"realvr.maths.{module}.{name} is deprecated: use {instead}", DeprecationWarning, stacklevel=3)
    return value
