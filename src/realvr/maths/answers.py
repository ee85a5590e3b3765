"""Deprecated: ``realvr.answers`` is the home of these names."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_HOME = "realvr.answers.canonical"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME), name)
    warnings.warn(f"{__name__}.{name} is deprecated: use {_HOME}.{name}", DeprecationWarning, stacklevel=2)
    return value
