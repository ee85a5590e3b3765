"""Draws from a generator that are cheap enough to be made a hundred times a board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def choose(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One element of a sequence, at a tenth of what `realvr.world.sampling.pick` costs."""
    return options[int(rng.random() * len(options))]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included."""
    return low + int(rng.random() * (high + 1 - low))


def shuffled(rng: np.random.Generator, options: Sequence[T]) -> tuple[T, ...]:
    """The options in random order."""
    return tuple(options[k] for k in rng.permutation(len(options)).tolist())
