"""Deprecated: `realvr.answers` is the home of these names."""

from __future__ import annotations

from realvr.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {},
    {name: f"realvr.answers.{name}" for name in ("POLICIES", "extract_answer", "extract_choice")},
)
