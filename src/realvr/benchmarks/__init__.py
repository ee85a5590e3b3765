"""Deprecated: evaluation lives in `realvr.evaluation`, answers in `realvr.answers`."""
