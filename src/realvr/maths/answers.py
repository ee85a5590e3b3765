"""Deprecated: `realvr.answers` is the home of these names."""

from __future__ import annotations

import importlib
import warnings

_HOMES = {
    "LETTERS": "realvr.answers.text",
    "canonical": "realvr.answers.options",
    "key": "realvr.answers.text",
    "parse": "realvr.answers.canonical",
    "same": "realvr.answers.judge",
    "unique": "realvr.answers.canonical",
    "wrong": "realvr.answers.canonical",
}
_RENAMED = {"same": "equal"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, now = _HOMES[name], _RENAMED.get(name, name)
    warnings.warn(f"{__name__}.{name} is deprecated: use {home}.{now}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), now)
