"""Samples from every supported file format, ready for training and evaluation. Imports no torch.

Names are imported on first use, so that reading a TSV does not import pyarrow.
"""

from __future__ import annotations

from realvr.lazy import lazy_names

_HOME = {
    "Box": "realvr.data.sample",
    "ImageCache": "realvr.imaging.cache",
    "ImageRef": "realvr.imaging.reference",
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
__getattr__, __dir__ = lazy_names(__name__, _HOME)
