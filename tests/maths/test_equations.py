"""The map from equations to functions and tests stays true."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from realvr.answers import canonical as answers
from realvr.maths import credit, evidence, grpo, reconstruction

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "equations.md").read_text()
FUNCTIONS = sorted(set(re.findall(r"`((?:maths|latent|backbone)\.\w+\.\w+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", PAGE)))
LABELS = (
    "eq:lvr_rec",
    "eq:lvr_s2",
    "eq:realvr_batch_evidence",
    "eq:realvr_difference",
    "eq:slot_utility",
    "eq:strict-paired-flip",
    "eq:mass-matched-routing",
    "eq:where-what-losses",
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(f"realvr.{module}"), attribute)


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("label", LABELS)
def test_every_labelled_equation_is_listed(label: str) -> None:
    assert f"| {label}" in PAGE


@pytest.mark.parametrize("module", [answers, credit, evidence, grpo, reconstruction])
def test_every_file_names_its_equations_and_departures(module: object) -> None:
    text = inspect.getdoc(module) or ""
    assert "Implements" in text and "Departures" in text
    assert re.search(r"\b(?:eq|sec|app):\w", text)
