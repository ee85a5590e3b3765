"""Deprecated: `realvr.answers.extract` is the home of these names."""

from __future__ import annotations

from realvr.answers.extract import extract_choice

__all__ = ["extract_choice"]
