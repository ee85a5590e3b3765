"""Notices that a process gives once, however often there is a reason for them."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def notice_once(text: str) -> None:
    """A warning, at the first time. Python's own rule forgets what was said whenever a filter is set."""
    warnings.warn(text, stacklevel=2)
