"""What the verbs work on, made once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verbs import Place, make_place


@pytest.fixture(scope="session")
def place(build_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(build_tiny("qwen2.5-vl"), tmp_path_factory.mktemp("hard-use"))
