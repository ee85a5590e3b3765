"""One adapter over stock transformers models; image and conversation to inputs; load and save.

Names are imported on first use, so that reading data or printing help does not import torch.
"""

from __future__ import annotations

from realvr.lazy import lazy_names

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

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
