"""Names of a package that are imported on first use: ``import realvr.data`` loads neither pyarrow nor torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    ``homes`` gives the module of each name, in full. ``renamed`` gives deprecated names of the package and what they
    are called today, in full: they work, with a warning.
    """
    renamed = renamed or {}

    def load(name: str) -> object:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if name in renamed:
            warnings.warn(f"{package}.{name} is deprecated: use {renamed[name]}", DeprecationWarning, stacklevel=2)
            module, _, attribute = renamed[name].rpartition(".")
            return getattr(importlib.import_module(module), attribute)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted(homes)

    return load, names
