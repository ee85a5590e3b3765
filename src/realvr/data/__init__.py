"""Samples from every supported file format, ready for training and evaluation. Imports no torch.

Names are imported on first use, so that reading a TSV does not import pyarrow.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Box": "sample",
    "ImageCache": "image_cache",
    "ImageRef": "sample",
    "Message": "sample",
    "Sample": "sample",
    "Source": "sample",
    "FORMATS": "detect",
    "Mixture": "mixture",
    "ReadOptions": "readers.base",
    "Report": "reading",
    "read": "reading",
    "Written": "export_common",
    "write": "export",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"realvr.data.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
