"""One adapter over stock transformers models; image and conversation to inputs; load and save.

Names are imported on first use, so that reading data or printing help does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Backbone": "backbone",
    "Markers": "backbone",
    "VisualTokens": "backbone",
    "Batch": "batch",
    "Columns": "attention",
    "Matrix": "attention",
    "Pass": "attention",
    "Probe": "attention",
    "FAMILIES": "families",
    "Grid": "types",
    "ImageInput": "types",
    "Prompt": "types",
    "Turn": "types",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"realvr.backbone.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
