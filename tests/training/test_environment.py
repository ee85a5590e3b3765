"""What `realvr env` says about the engines."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from realvr.training import environment


def test_every_engine_names_what_it_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs no further package runs through torch; one whose package is missing is not installed."""
    engines = environment.survey()["engines"]
    assert engines["several processes with FSDP2"] == f"through torch {metadata.version('torch')}"
    assert all(text is None or re.match(r"through \w+ \d", text) for text in engines.values()), engines
    monkeypatch.setattr(environment, "_version", lambda name: None)
    assert environment._engines({"torch": "2.9"})["LoRA"] is None
