"""One adapter over stock transformers models; image and conversation to inputs; load and save.

Names are imported on first use, so that reading data or printing help does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Backbone": "realvr.backbone.backbone",
    "Markers": "realvr.backbone.backbone",
    "VisualTokens": "realvr.backbone.backbone",
    "Batch": "realvr.backbone.batch",
    "Columns": "realvr.backbone.attention",
    "Matrix": "realvr.backbone.attention",
    "Pass": "realvr.backbone.attention",
    "Probe": "realvr.backbone.attention",
    "FAMILIES": "realvr.families",
    "Grid": "realvr.imaging.types",
    "ImageInput": "realvr.imaging.types",
    "Prompt": "realvr.backbone.types",
    "Turn": "realvr.backbone.types",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
