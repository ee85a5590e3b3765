"""The section of docs/diagnostics.md that sets the paper's tables beside ours, and the script that makes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import diagnostics_table
    finally:
        sys.path.remove(str(SCRIPTS))
    return diagnostics_table


@pytest.fixture(scope="module")
def stored(script: ModuleType) -> dict:
    return json.loads(script.RESULTS.read_text(encoding="utf-8"))


def test_the_page_ends_with_what_the_script_prints(script: ModuleType, stored: dict) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page.count(script.TITLE) == 1
    assert page[page.index(script.TITLE) :] == script.section(stored)


def test_no_number_is_missing_and_none_is_unused(script: ModuleType, stored: dict) -> None:
    wanted = {ask.key for ask in script.asked()}
    assert wanted == set(stored["numbers"]) and len(wanted) > 400
    assert {number["run"] for number in stored["numbers"].values()} == set(range(len(stored["runs"])))
    for key, number in stored["numbers"].items():
        if number.get("low") is not None:
            assert number["low"] <= number["value"] <= number["high"] and number["n"] > 0, key


def test_every_label_has_a_table(script: ModuleType, stored: dict) -> None:
    labels = script.labels()
    assert len(labels) == len(set(labels)) == 35
    parts = script.section(stored).split("\n### ")[1:]
    assert len(parts) == len(script.parts())
    for part, text in zip(script.parts(), parts, strict=True):
        assert all(label in text for label in part.labels) and "|---|" in text
        assert "published" in text and "measured" in text


def test_the_labels_are_those_of_the_paper(script: ModuleType) -> None:
    named = os.environ.get("REALVR_SHARED")
    file = (Path(named) if named else ROOT.parent / "shared") / "paper" / "realvr.tex"
    if not file.is_file():
        pytest.skip(f"no source of the paper at {file}; set REALVR_SHARED to the folder that holds paper/")
    tex = file.read_text(encoding="utf-8")
    analysis = tex[tex.index("\\label{sec:representation-analysis}") : tex.index("\\label{sec:conclusion}")]
    appendices = tex[tex.index("\\label{app:diagnostics}") :]
    floats = re.findall(r"\\label\{((?:tab|fig):[\w-]+)\}", analysis + appendices)
    assert set(script.labels()) == set(floats)


def test_a_number_comes_from_the_first_folder_that_has_it(script: ModuleType, tmp_path: Path) -> None:
    """Null is no number; another model's results and other settings do not count."""

    def write(folder: str, model: str, by: str, same: float | None, raw: float | None) -> None:
        one = {"low": 0.1, "high": 0.9, "pairs": 7}
        found = {
            "settings": {"diagnostic": "similarity", "data": "/x/trails/samples.jsonl", "limit": 7, "by": by,
                         "model": {"name": model, "dtype": "float32"}},
            "same_task": {"mean": same, **one},
            "residualised": {"mean": raw, **one},
        }  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "similarity.json").write_text(json.dumps(found))

    write("other", "mini-short", "arrows", 0.2, 0.2)
    write("first", "mini", "task", 0.3, None)
    write("second", "mini", "arrows", 0.4, 0.5)
    write("third", "mini", "arrows", 0.6, 0.6)
    folders = [f"{tmp_path / name}=CPU" for name in ("other", "first")]
    folders += [f"{tmp_path / 'second'}=GPU=small --split trails --count 9", f"{tmp_path / 'third'}=CPU"]
    made = script.collect(folders, "")
    numbers = {key.partition(": ")[2]: number["value"] for key, number in made["numbers"].items()}
    assert numbers == {"same_task": 0.4, "residualised": 0.5}
    (run,) = made["runs"]
    assert run["machine"] == "GPU" and run["world"] == "realvr world make runs/small --split trails --count 9"
    assert run["command"].startswith(
        "realvr diagnose similarity mini runs/small/trails/samples.jsonl --limit 7 --by arrows"
    )
    text = script.section(made)
    assert "| residualised adjacent cosine, latents | 0.7760 | 0.500 [0.100, 0.900] |" in text
    assert "| p, k = 8 | 0.59 | not measured | not measured | not measured |" in text


def test_a_command_has_every_setting_that_is_not_the_usual_one(script: ModuleType, tmp_path: Path) -> None:
    settings = {
        "diagnostic": "ranking",
        "data": "/x/trails/samples.jsonl",
        "limit": 9,
        "seeds": 5,
        "wrong": 2,
        "replacement": "noise",
        "model": {"name": "mini", "dtype": "float32"},
        "second_model": {"name": "mini-short"},
    }
    (tmp_path / "ranking.json").write_text(json.dumps({"settings": settings}))
    ((run, _),) = script._results(f"{tmp_path}=CPU")
    assert run["command"] == (
        "realvr diagnose ranking mini runs/world/trails/samples.jsonl --limit 9 --second-model mini-short "
        "--replacement noise --wrong 2 --out runs/mini-trails"
    )


def test_rates_have_their_counts_as_in_the_paper(script: ModuleType, stored: dict) -> None:
    """Every rate of tab:complete-counterfactual, published and measured; the counts make the rates."""
    text = script.section(stored)
    table = text[text.index("### tab:complete-counterfactual") : text.index("### tab:latent-exchange")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith(("| pub", "| meas"))]
    assert len(rows) == 12 + 16 and rows[0][6] == "75.8 (335)" and rows[0][-1] == "99.8 (1,022)"
    for row in rows:
        changed, unchanged = int(row[4]), int(row[5])
        sizes = [changed] * 4 + [unchanged, 2 * (changed + unchanged)]
        for cell, size in zip(row[6:], sizes, strict=True):
            if size:
                found = re.match(r"([\d.]+) \(([\d,]+)\)", cell)
                assert found is not None, cell
                count = int(found[2].replace(",", ""))
                assert float(found[1]) == pytest.approx(100 * count / size, abs=0.0501), (row, cell)
            else:
                assert cell == "no such pair"


def test_numbers_that_no_folder_has_are_kept(script: ModuleType, stored: dict, tmp_path: Path) -> None:
    settings = {
        "diagnostic": "vocabulary",
        "data": "/x/trails/samples.jsonl",
        "model": {"name": "mini", "dtype": "float32"},
    }
    one = {"mean": 0.5, "low": 0.25, "high": 0.75, "pairs": 7}
    found = {"settings": settings, "masked": {"token": "x", "share": one}, "raw": {}, "cosine": {}, "answer": {}}
    (tmp_path / "vocabulary.json").write_text(json.dumps(found))
    made = script.collect([f"{tmp_path}=CPU"], stored["about"], stored)
    assert list(made["numbers"]) == list(stored["numbers"])
    changed = {key for key in made["numbers"] if made["numbers"][key]["value"] != stored["numbers"][key]["value"]}
    assert changed == {"mini, vocabulary: masked > token", "mini, vocabulary: masked > share"}
    for key, number in made["numbers"].items():
        run = made["runs"][number["run"]]
        before = stored["runs"][stored["numbers"][key]["run"]]
        assert run["machine"] == "CPU" if key in changed else run == before


def test_the_script_runs_without_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import diagnostics_table as d; d.main()\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("## The paper's tables beside ours\n")
