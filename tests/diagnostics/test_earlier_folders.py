"""Folders of pair evaluations as earlier versions left them: continued, summarised and shown like today's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pair_cases import world_samples
from realvr.cli import main
from realvr.data.export import write
from realvr.diagnostics import DIAGNOSTICS, Shown
from realvr.errors import UserError
from stage_runs import with_markers


@pytest.fixture(scope="module")
def earlier(build_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder as it was before diagnostics had a file each, and the command that made it."""
    root = tmp_path_factory.mktemp("earlier")
    model = with_markers(build_tiny("qwen2.5-vl"), root / "model")
    write(iter(world_samples(1)), "jsonl", root / "pairs.jsonl")
    command = ["counterfactual", str(model), str(root / "pairs.jsonl"), "--out", str(root / "run")]
    command += ["--device", "cpu", "--max-new", "3"]
    assert main(command) == 0
    for file in root.joinpath("run").glob("distances*"):
        if file.suffix != ".jsonl":
            file.unlink()
    settings = root / "run" / "counterfactual_settings.json"
    content = json.loads(settings.read_text())
    del content["diagnostic"]
    settings.write_text(json.dumps(content))
    return root / "run", command


def test_an_earlier_folder_is_read(earlier: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = earlier
    summary = json.loads((folder / "counterfactual.json").read_text())
    distances = DIAGNOSTICS.get("distances")
    read = distances.read(folder)
    assert read is not None and read[0] == folder / "counterfactual.json"
    assert read[1]["distances"] == summary["distances"] is not None
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    sections = {one["id"]: one for one in json.loads((tmp_path / "data.json").read_text())["sections"]}
    (table,) = sections["distances"]["tables"]
    mean = summary["distances"]["color_change"]["latent"]["mean"]
    assert table["rows"][0][2]["value"] == mean and sections["counterfactual"]["tables"]
    widgets = distances().section([Shown("a", summary)]).widgets
    assert "unrelated picture" in str(widgets)


@pytest.mark.slow
def test_an_earlier_folder_is_continued(earlier: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, command = earlier
    before = {name: (folder / name).read_bytes() for name in ("counterfactual.jsonl", "distances.jsonl")}
    summary = json.loads((folder / "counterfactual.json").read_text())
    assert main(command) == 0
    assert before == {name: (folder / name).read_bytes() for name in before}, "nothing is asked again"
    again = json.loads((folder / "counterfactual.json").read_text())
    assert all(again[key] == summary[key] for key in ("protocols", "distances", "controls"))
    assert json.loads((folder / "distances.json").read_text())["distances"] == summary["distances"]
    assert main([*command, "--no-distances"]) == 0  # what was measured stays in the summary
    assert json.loads((folder / "counterfactual.json").read_text())["distances"] == summary["distances"]
    capsys.readouterr()
    assert main([*command, "--limit", "7"]) == 2
    assert "limit was null, now 7" in capsys.readouterr().err


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    (tmp_path / "exchange.json").write_text('{"rows": [{}]}')
    with pytest.raises(UserError, match="exchange.json: .*run realvr exchange again"):
        DIAGNOSTICS.get("exchange").read(tmp_path)
