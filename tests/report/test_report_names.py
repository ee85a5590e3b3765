"""The code of the report and of the demo names no method, benchmark or diagnostic: registries and results do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import realvr
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.evaluation.effects import TITLES
from realvr.evaluation.published import published

PACKAGE = Path(realvr.__file__).parent
FILES = sorted(path for room in ("report", "demo") for path in (PACKAGE / room).glob("*.py"))


def names() -> set[str]:
    """Names and titles of everything that is registered, and the paper's names of methods."""
    from realvr.training.method import METHODS

    members = [*BENCHMARKS, *DIAGNOSTICS, *METHODS]
    found = {str(member.name) for member in members} | {
        str(getattr(member, "title", member.name)) for member in members
    }
    return found | {row.method for row in published()}


def literals(source: str) -> list[tuple[int, str]]:
    """(line, text) of every string in the code that is no docstring, pieces of f-strings included."""
    tree = ast.parse(source)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    # A string that stands alone documents the line above it.
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(node.lineno, str(node.value)) for node in strings if id(node) not in documents | alone]


def named(text: str, known: set[str]) -> list[str]:
    """Names that a text has as words. Methods that are also words of English or of the command line ("direct", "base",
    "realvr") count where they are the whole text, or in their capitals; so do diagnostics that have the name of an
    effect of the evaluation ("dependence")."""
    effects = {title.partition(":")[0] for title in TITLES.values()}
    found = []
    for name in known:
        member = (name in DIAGNOSTICS and name not in effects) or name in BENCHMARKS
        plain = re.fullmatch("[a-z]+", name) is not None and not member
        whole = text.strip().lower() == name.lower() and text.strip() != "realvr"
        inside = re.search(rf"(?<![\w-])(?:mini-)?{re.escape(name)}(?![\w-])", text) is not None
        if whole or (inside and not plain):
            found.append(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_method_benchmark_or_diagnostic_is_named(file: Path) -> None:
    known = names()
    assert len(known) > 20
    found = [(line, name) for line, text in literals(file.read_text(encoding="utf-8")) for name in named(text, known)]
    assert not found


def test_the_search_finds_what_it_looks_for() -> None:
    known = names()
    seen = {
        'x = arm.diagnostics["exchange"]': ["exchange"],
        'f"{x}: as {y} in the mmvp set"': ["mmvp"],
        'baseline = "lvr-rl"': ["lvr-rl", "LVR-RL"],
        'text = "ReaLVR on Qwen"': ["ReaLVR"],
        'COMMAND = "realvr train rl CONFIG"': [],
        'if kind == "direct": pass': ["direct", "Direct"],
    }
    for code, expected in seen.items():
        found = {name for _, text in literals(code) for name in named(text, known)}
        assert found <= set(expected) and bool(found) == bool(expected), code
