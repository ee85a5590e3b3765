"""What a test needs and an environment may lack: skipped on a machine without it, a failure where all must be there.

``.ci/run`` sets REALVR_COMPLETE=1, so that nothing that could be installed is left out unnoticed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from chromium import chromium


def lacking(what: str) -> None:
    """Skip the test that needs ``what``; fail it in a complete environment."""
    if os.environ.get("REALVR_COMPLETE") == "1":
        pytest.fail(f"REALVR_COMPLETE=1, but {what}")
    pytest.skip(what)


def need_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        lacking(f"{name} is not installed (`make env` installs it)")


def need_browser() -> None:
    if chromium() is None:
        lacking("there is no Chromium on this machine (`make browser` installs it)")
