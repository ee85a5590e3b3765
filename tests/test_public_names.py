"""Names that code outside the package uses: they exist, mean what they meant, and cost no torch before they need it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import realvr

MATHS = {
    "answers": "parse canonical key same unique wrong",
    "credit": "readout mean_wrong selective raw unassigned weights unassigned_weight mass_matched mass_matched_uniform",
    "evidence": "pool nonzero unit similarity usable defined hardest margin violation weighted loss positive_loss "
    "alignment_loss",
    "grpo": "varied advantages token_objective token_kl normalizer reduce loss clip_fraction",
    "precision": "wide masked ratio",
    "reconstruction": "per_example reconstruction next_token cross_entropy stage1",
}
"""Functions of the equations."""
OUTSIDE = [
    *(f"realvr.maths.{module}.{name}" for module, names in MATHS.items() for name in names.split()),
    "realvr.backbone.Backbone",
    "realvr.backbone.Turn",
    "realvr.latent.rollout",
    "realvr.latent.trajectory",
    "realvr.data.read",
    "realvr.world.splits.samples",
]
"""What was there before the rooms were built."""
DEPRECATED = {
    "realvr.benchmarks.extract.extract_choice": "realvr.answers",
    "realvr.latent.advance": "realvr.latent.decoder_pass",
}
"""Deprecated names, and what the warning names instead."""

PROBE = """
import importlib, json, sys, warnings
import realvr.latent.group_rollout  # whatever was imported before, `rollout` is the function
found = {}
for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, _, attribute = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), attribute)
            kind = "callable" if callable(value) else type(value).__name__
        except (ImportError, AttributeError) as error:
            kind = str(error)
    notes = [str(one.message) for one in caught if issubclass(one.category, DeprecationWarning)]
    found[name] = [kind, [note for note in notes if "realvr" in note]]
print(json.dumps(found))
"""


def fresh(code: str, *args: str) -> str:
    """What a new process prints."""
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_names_from_outside_are_still_there() -> None:
    found = json.loads(fresh(PROBE, *OUTSIDE, *DEPRECATED))
    assert {name: kind for name, (kind, _) in found.items() if kind != "callable"} == {}
    for name, instead in DEPRECATED.items():
        assert any(instead in note for note in found[name][1]), f"{name}: a warning names {instead}"
    assert not any(found[name][1] for name in OUTSIDE if not name.startswith("realvr.maths."))


TENSORS = {"Backbone", "METHODS", "Sampling", "rollout", "train", "trajectory"}
"""Exports that need torch when they are imported; the others import it when they are called."""


def test_neither_the_package_nor_its_exports_without_tensors_load_torch() -> None:
    names = sorted(set(realvr.__all__) - TENSORS)
    code = (
        "import sys, realvr\n"
        "heavy = lambda: [name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules]\n"
        "assert not heavy(), heavy()\n"
        f"for name in {names!r}:\n    getattr(realvr, name)\n    assert 'torch' not in sys.modules, name\n"
        "realvr.Backbone\nassert 'torch' in heavy()\n"
    )
    fresh(code)


def test_every_export_exists_and_is_the_one_that_mypy_sees() -> None:
    source = Path(realvr.__file__).read_text(encoding="utf-8")
    typed = {
        name.name: node.module
        for block in ast.walk(ast.parse(source))
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert {*typed, "__version__"} == set(realvr.__all__)
    assert {*dir(realvr), "__version__"} == set(realvr.__all__)
    for name, module in typed.items():
        assert getattr(realvr, name) is getattr(importlib.import_module(str(module)), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        realvr.nothing  # noqa: B018


GUIDE = Path(__file__).parents[1] / "docs" / "getting_started.md"


def test_the_lines_of_the_guide_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = GUIDE.read_text(encoding="utf-8").split("## 7. From Python")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "<the guide>", "exec"), names)
    assert (tmp_path / "report" / "index.html").is_file() and (tmp_path / "sft" / "final" / "config.json").is_file()
    verbs = set(re.findall(r"^# realvr ([a-z]+(?: make| check)?)", "\n".join(blocks), re.MULTILINE))
    assert verbs >= {"world make", "data check", "ask", "train", "eval", "diagnose", "report"}
    used = set(re.findall(r"\brealvr\.(\w+)", section))
    assert set(realvr.__all__) - used <= {"Sample", "UserError", "__version__", "trajectory"}, "exports are documented"
