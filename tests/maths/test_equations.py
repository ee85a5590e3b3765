"""The table of equations is true: a real step calls its functions, its tests exist, nothing is missing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import equation_trace
import realvr.maths
from equation_trace import METHODS, PAGE, ROOT, disagreements, methods_of, recording, resolve, rows, step, tables
from pair_cases import world_samples
from realvr import cli
from realvr.answers import canonical as answers
from realvr.data.export import write as export
from realvr.diagnostics import DIAGNOSTICS
from realvr.maths import credit, evidence, grpo, objective, reconstruction
from realvr.world.splits import Recipe, samples
from stage_runs import lines, world, write

ROWS = rows()
FUNCTIONS = sorted({function for row in ROWS for function in row.functions})
TESTS = sorted(set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", PAGE)))
PAPER = ROOT.parent / "shared" / "paper" / "realvr.tex"
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Multiple-choice questions of the built-in world, with evidence boxes.

    No free answers: checking those may run into a time limit, whose alarm would end the profile.
    """
    asked = [sample for sample in world(16, size=96) if sample.choices][:4]
    assert len(asked) == 4 and all(sample.boxes for sample in asked)
    return write(asked, tmp_path_factory.mktemp("equations"))


# ---------------------------------------------------------------------- a real step calls what the page says


@pytest.mark.parametrize("method", METHODS)
def test_one_step_calls_the_functions_of_its_equations(method: str, data: Path, tmp_path: Path) -> None:
    missing, unlisted = disagreements(method, step(method, data, tmp_path), ROWS)
    assert not missing, f"docs/equations.md says that {method} calls {missing}"
    assert not unlisted, f"{method} calls {unlisted}, which docs/equations.md does not say"


def copied(function: types.FunctionType) -> types.FunctionType:
    """A function of the same behaviour that is not the function: as if its body stood at the place of the call."""
    code = function.__code__.replace(co_firstlineno=1)
    twin = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def bypass(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a copy wherever a module of the package holds the function."""
    twin = copied(function)
    for name, module in list(sys.modules.items()):
        if name.startswith("realvr."):
            for attribute, value in list(vars(module).items()):
                if value is function:
                    monkeypatch.setattr(module, attribute, twin)


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("lvr-sft", "maths.reconstruction.next_token"),
        ("base", "maths.objective.total"),
        ("realvr", "maths.credit.selective"),
        ("realvr", "latent.recurrence.regenerate"),
    ],
)
def test_a_step_that_stops_calling_its_function_is_noticed(
    method: str, function: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers stay the same; the page no longer says what computes them."""
    for name in ("kept", "bypassed"):
        (tmp_path / name).mkdir()
    assert disagreements(method, step(method, data, tmp_path / "kept"), ROWS) == ([], [])
    bypass(resolve(function), monkeypatch)
    assert disagreements(method, step(method, data, tmp_path / "bypassed"), ROWS) == ([function], [])
    losses = [[line["loss"] for line in lines(tmp_path / name / "run")] for name in ("kept", "bypassed")]
    assert losses[0] == losses[1]


def test_a_call_that_the_page_does_not_list_is_noticed(data: Path, tmp_path: Path) -> None:
    """Off-policy evidence does not regenerate the trajectory: said of it, it is missing; done, it is unlisted."""
    entered = step("off-policy", data, tmp_path)
    missing, _ = disagreements("realvr", entered, ROWS)
    assert missing == ["latent.recurrence.regenerate"]
    entered |= equation_trace.codes(resolve("latent.recurrence.regenerate"))
    assert disagreements("off-policy", entered, ROWS) == ([], ["latent.recurrence.regenerate"])


def test_only_the_undetached_arm_keeps_the_gradient_of_the_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows "with detach=False": by argument, which a profile of functions cannot see."""
    seen: list[bool] = []
    original = evidence.weighted

    def spy(losses_BK: Any, weights_BK: Any, detach: bool = True, **more: Any) -> Any:
        seen.append(detach)
        return original(losses_BK, weights_BK, detach, **more)

    monkeypatch.setattr(evidence, "weighted", spy)
    for method in ("realvr", "undetached"):
        (tmp_path / method).mkdir()
        step(method, data, tmp_path / method)
    assert seen == [True, False]


CALLERS = sorted({name for row in ROWS for name in methods_of(row.called_by) if name.startswith("realvr ")})


BOARDS = {"diagnose question-switch": 4, "diagnose variation": 4, "diagnose steer": 4}
"""Verbs that need trails, or several questions on one picture, and how many."""
BY_EDIT = {"diagnose task-structure": ("--by", "edit", "--limit", "20")}
QUICK = {"exchange", "counterfactual", "diagnose dependence", "diagnose enrichment"}


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (caller.removeprefix("realvr ") for caller in CALLERS)
    ],
)
def test_a_diagnostic_calls_the_functions_of_its_equations(verb: str, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    one_board = samples(Recipe("trails", count=1, kinds=("switch",)))  # two questions in two wordings
    export(one_board if verb in BOARDS else world_samples(5 if verb in BY_EDIT else 1), "jsonl", pairs)
    limit = BY_EDIT.get(verb, ("--limit", str(BOARDS.get(verb, 2))))
    flags = [*limit, "--max-new", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    with recording() as entered:
        assert cli.main([*verb.split(), "mini", str(pairs), *flags]) == 0
    name = f"realvr {verb}"
    assert any(name in methods_of(row.called_by) for row in ROWS)
    assert disagreements(name, entered, ROWS)[0] == []


# ---------------------------------------------------------------------- the page is complete


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_exists(name: str) -> None:
    assert callable(resolve(name))


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def test_every_row_has_a_function_a_caller_and_a_test() -> None:
    """Except gradients, which are autograd's, and diagnostics that do not exist yet."""
    for row in ROWS:
        if "| not implemented" in row.title:
            continue
        assert "::" in row.tests, row.title
        if "| autograd |" not in row.title:
            known = METHODS.keys() | {"realvr counterfactual", "realvr exchange"}
            known |= {f"realvr diagnose {name}" for name in DIAGNOSTICS.names()}
            assert row.functions and methods_of(row.called_by), row.title
            assert methods_of(row.called_by) <= known, row.title


def test_every_method_is_on_the_page() -> None:
    assert methods_of("all") == METHODS.keys()
    assert "group" in next(tables())


def test_every_public_function_of_the_mathematics_is_on_the_page() -> None:
    """A function that no row names is called by nothing that the trace looks at."""
    public = set()
    for found in pkgutil.iter_modules(realvr.maths.__path__):
        if found.name not in ("deprecated", "answers"):
            module = importlib.import_module(f"realvr.maths.{found.name}")
            own = inspect.getmembers(module, lambda f: inspect.isfunction(f) and f.__module__ == module.__name__)  # noqa: B023
            public |= {f"maths.{found.name}.{name}" for name, _ in own if not name.startswith("_")}
    assert len(public) > 25
    assert public == {name for name in FUNCTIONS if name.startswith("maths.")}


@pytest.mark.parametrize("label", LABELS)
def test_every_labelled_equation_is_listed(label: str) -> None:
    assert f"| {label}" in PAGE


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not beside this repository")
def test_every_displayed_equation_of_the_paper_is_listed() -> None:
    """Labelled ones by their label, others by the section they stand in."""
    section, found = "", []
    for line in PAPER.read_text().splitlines():
        if label := re.search(r"\\label\{((?:sec|app):[\w-]+)\}", line):
            section = label[1]
        if label := re.search(r"\\label\{(eq:[\w-]+)\}", line):
            found.append(f"| {label[1]}")
        if line.strip() == r"\[":
            found.append(section)
    assert len(found) > 20 and {label[2:] for label in found if label.startswith("| eq:")} == set(LABELS)
    listed = [f"display in {section}" for section in found] + [f"displays in {section}" for section in found]
    for label in found:
        assert label in PAGE if label.startswith("|") else any(each in PAGE for each in listed if label in each), label


@pytest.mark.parametrize("module", [answers, credit, evidence, grpo, objective, reconstruction])
def test_every_file_names_its_equations_and_departures(module: object) -> None:
    text = inspect.getdoc(module) or ""
    assert "Implements" in text and "Departures" in text
    assert re.search(r"\b(?:eq|sec|app):\w", text)
