"""Results and their page, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from realvr.cli import main
from report_cases import make_results


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results as the demo lays them out. Not to be written to."""
    return make_results(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """index.html of the report on these results."""
    out = tmp_path_factory.mktemp("page")
    assert main(["report", str(results), "--out", str(out)]) == 0
    return out / "index.html"
