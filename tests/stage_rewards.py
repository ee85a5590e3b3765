"""Rewards of the user's own, as ``path.py:function``, for the tests of Stage 2."""

from __future__ import annotations

import math

from realvr.data.sample import Sample


def vowels(text: str, sample: Sample) -> float:
    """Share of the characters that are vowels."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def always(text: str, sample: Sample) -> float:
    """Everything is right."""
    return 1.0


def never(text: str, sample: Sample) -> float:
    """Everything is wrong."""
    return 0.0


def undefined(text: str, sample: Sample) -> float:
    """Not a number for the samples marked so."""
    return math.nan if sample.meta.get("bad") else float(len(text))
