"""Every verb is a settings dataclass and a few lines over the library, which takes the same settings from Python."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import realvr
from realvr.cli.dispatch import COMMANDS, settings_type

PACKAGE = Path(realvr.__file__).parent
LONGEST = 30
RAW = {"train sft", "train rl", "train base", "diagnose"}
"""Verbs that read their own arguments: their options are those of a settings file, or of the named diagnostic."""
PRINTING = {"env": "survey", "benchmarks": "BENCHMARKS"}
"""Verbs whose options only choose what is printed, and what of the library they print."""


def function_of(name: str) -> Callable[..., int]:
    command = COMMANDS[name]
    function: Callable[..., int] = getattr(importlib.import_module(command.module), command.function)
    return function


def lines_of(function: Callable[..., Any]) -> int:
    """Lines of the body, without the docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def library_settings(settings: type) -> list[type]:
    """The dataclasses outside the command line that a verb's options extend."""
    return [
        kind
        for kind in settings.__mro__
        if is_dataclass(kind) and not kind.__module__.startswith("realvr.cli") and kind.__module__.startswith("realvr")
    ]


def taken() -> set[str]:
    """Names of the types that public functions of the library take."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if "cli" in file.relative_to(PACKAGE).parts:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found |= {ast.unparse(one.annotation) for one in node.args.args if one.annotation is not None}
    return found


def test_the_verbs_that_read_their_own_arguments_are_known() -> None:
    assert {name for name, command in COMMANDS.items() if command.raw} == RAW


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - RAW))
def test_a_verb_is_a_dataclass_and_a_few_lines(name: str) -> None:
    function = function_of(name)
    settings = settings_type(function)
    assert list(inspect.signature(function).parameters) == ["settings"] and is_dataclass(settings)
    assert lines_of(function) <= LONGEST


@pytest.mark.parametrize("name", sorted(RAW))
def test_a_verb_with_arguments_of_its_own_is_short_too(name: str) -> None:
    assert lines_of(function_of(name)) <= LONGEST


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - RAW))
def test_the_library_takes_the_same_settings(name: str) -> None:
    settings = settings_type(function_of(name))
    if name in PRINTING:
        assert {field.name for field in fields(settings)} <= {"name", "json", "markdown"}
        assert PRINTING[name] in Path(inspect.getfile(function_of(name))).read_text(encoding="utf-8")
        return
    kinds = library_settings(settings)
    assert kinds, "the options extend settings of the library"
    assert {kind.__name__ for kind in kinds} & taken()
    extra = {field.name for field in fields(settings)} - {field.name for kind in kinds for field in fields(kind)}
    # What only the command line has: how it prints, and what it chooses before it calls the library.
    assert extra <= {"json", "model", "own", "distances"}


def test_the_checks_see_a_verb_that_does_its_own_work() -> None:
    @dataclass
    class Options:
        pass

    def verb(settings: Options) -> int:
        """Long."""
        total = 0
        total += 1
        return total

    assert lines_of(verb) == 3
    assert library_settings(Options) == []
    assert settings_type(lambda first, second: 0) is None
    assert "EvaluateSettings" in taken() and "EvaluateCommand" not in taken()
