"""The notebook in examples/: stored without outputs, and every cell runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optional import need_package

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "first_steps.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs() -> None:
    """Outputs would be those of other weights one day, and pictures do not belong into the history."""
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    assert len(cells) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    need_package("nbclient")
    need_package("ipykernel")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = ["".join(out.get("text", "") for out in cell["outputs"] if out.get("name") == "stdout") for cell in cells]
    assert all(printed), "every cell prints something"
    pictures = [out for cell in cells for out in cell["outputs"] if "image/png" in out.get("data", {})]
    assert len(pictures) == 4  # the trail, its walk, the walk with a latent moved, the walk of one's own question
    assert "8 latents" in printed[0] and "16 pairs" in "".join(printed)
