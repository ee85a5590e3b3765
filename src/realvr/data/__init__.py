"""Samples from every supported file format, ready for training and evaluation. Imports no torch.

Names are imported on first use, so that reading a TSV does not import pyarrow.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Box": "realvr.data.sample",
    "ImageCache": "realvr.imaging.cache",
    "ImageRef": "realvr.data.sample",
    "Message": "realvr.data.sample",
    "Sample": "realvr.data.sample",
    "Source": "realvr.data.sample",
    "FORMATS": "realvr.data.detect",
    "Mixture": "realvr.data.mixture",
    "ReadOptions": "realvr.data.readers.base",
    "Report": "realvr.data.reading",
    "read": "realvr.data.reading",
    "Written": "realvr.data.export_common",
    "write": "realvr.data.export",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
