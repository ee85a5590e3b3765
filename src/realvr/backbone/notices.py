"""Notices that a process prints once, however often their reason occurs."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def notice_once(text: str) -> None:
    """A warning, at the first time. Python's own rule forgets what was said whenever a filter is set."""
    warnings.warn(text, stacklevel=2)
