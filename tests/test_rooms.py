"""The arrows between the rooms of the package, read from its source: lazy imports and imports for types included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import realvr

PACKAGE = Path(realvr.__file__).parent

LEAVES = {
    "errors": "",
    "lazy": "",
    "families": "errors",
    "runs": "errors",
    "hub": "errors",
    "answers": "errors",
    "maths": "errors",
    "models": "errors",
    "registry": "errors",
    "widgets": "",
}
"""What stands beside the rooms, and what of ours each may import."""

ROOMS = {
    "imaging": "",
    "data": "imaging",
    "world": "imaging data",
    "backbone": "imaging data world",
    "zoo": "imaging data world backbone",
    "latent": "imaging data world backbone",
    "evaluation": "imaging data world backbone latent",
    "training": "imaging data world backbone latent evaluation",
    "planning": "imaging data world backbone zoo latent evaluation training",
    "diagnostics": "imaging data world backbone latent evaluation",
    "integrations": "imaging data backbone latent evaluation",
    "report": "imaging data world backbone latent evaluation training diagnostics",
    "demo": "imaging data world backbone zoo latent evaluation training diagnostics report",
    "cli": "imaging data world backbone zoo latent evaluation training planning diagnostics report demo",
    "benchmarks": "",  # a deprecated name
}
"""Rooms in the order in which data flows, and which of them each may import."""

ARROWS = {name: set(allowed.split()) for name, allowed in LEAVES.items()} | {
    name: set(allowed.split()) | set(LEAVES) for name, allowed in ROOMS.items()
}
DEPRECATED = {("realvr.maths.answers", "answers")}
"""Modules of earlier versions that hold nothing but the way to their new home."""

MODULE = re.compile(r"realvr(\.[a-z_0-9]+)*\.?")


def imported(tree: ast.Module, module: str, package: bool) -> Iterator[str]:
    """Names of ours that a module imports anywhere, and those it spells out in strings for a later import."""
    docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -(node.level - package) or None] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and node not in docs and MODULE.fullmatch(str(node.value)):
            yield str(node.value)


def violations(root: Path) -> set[tuple[str, str]]:
    """(module, room it must not import) of the package in a folder."""
    found = set()
    for file in sorted(root.rglob("*.py")):
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if package else parts)
        room = parts[1]
        if room == "__init__":  # the names a user needs, from any room but the command line
            allowed = set(ARROWS) - {"cli"}
        elif room == "__main__":
            allowed = {"cli"}
        else:
            assert room in ARROWS, f"{module} is in no room of {__file__}"
            allowed = ARROWS[room] | {room}
        for name in imported(ast.parse(file.read_text(encoding="utf-8")), module, package):
            top, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if top == "realvr" and target in ARROWS and target not in allowed:
                found.add((module, target))
    return found


def test_every_room_imports_only_what_stands_before_it() -> None:
    assert violations(PACKAGE) <= DEPRECATED


def test_there_are_no_circles_between_rooms() -> None:
    order = [*LEAVES, *ROOMS]
    for name, allowed in ARROWS.items():
        assert all(order.index(other) < order.index(name) for other in allowed), name


def test_every_room_exists() -> None:
    assert {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} == {
        *ARROWS,
        "__init__",
        "__main__",
    }


FORBIDDEN = {
    "import": "from realvr.backbone.backbone import Backbone",
    "whole module": "import realvr.backbone.backbone",
    "package": "from realvr import backbone",
    "relative": "from ..backbone import Backbone",
    "lazy": "def read():\n    from realvr.backbone import Backbone",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from realvr.backbone import Backbone",
    "import_module": "import importlib\nimportlib.import_module('realvr.backbone.loading')",
    "part of a name": "import importlib\nimportlib.import_module(f'realvr.backbone.{name}')",
    "table of names": "HOME = {'Backbone': 'realvr.backbone.backbone'}",
    "another process": "command = ['python', '-m', 'realvr.backbone.worker']",
}


@pytest.mark.parametrize("how", FORBIDDEN)
def test_a_forbidden_import_is_seen(how: str, tmp_path: Path) -> None:
    room = tmp_path / "realvr" / "data"
    room.mkdir(parents=True)
    (room / "reading.py").write_text(f'"""Reads, unlike realvr.backbone."""\n{FORBIDDEN[how]}\n')
    (room / "sample.py").write_text("from realvr.imaging.types import Grid\nfrom realvr.errors import UserError\n")
    assert violations(tmp_path / "realvr") == {("realvr.data.reading", "backbone")}


@pytest.mark.parametrize(
    ("room", "line", "target"),
    [
        ("training", "from realvr.diagnostics import pairs", "diagnostics"),
        ("diagnostics", "from realvr.training import loop", "training"),
        ("report", "from realvr.cli import main", "cli"),
        ("runs", "from realvr.answers import strict", "answers"),
        ("world", "from realvr.zoo import tiny", "zoo"),
        ("__init__", "HOME = {'main': 'realvr.cli'}", "cli"),
        ("__main__", "from realvr.training import loop", "training"),
    ],
)
def test_arrows_that_are_easily_turned(room: str, line: str, target: str, tmp_path: Path) -> None:
    folder = tmp_path / "realvr" if room.startswith("__") else tmp_path / "realvr" / room
    folder.mkdir(parents=True)
    (folder / (f"{room}.py" if room.startswith("__") else "one.py")).write_text(line + "\n")
    assert {target for _, target in violations(tmp_path / "realvr")} == {target}


# ---------------------------------------------------------------------- one implementation


ONLY = {
    "os.replace": {"runs/files.py", "runs/lock.py"},  # a lock is taken over, not published
    "os.rename": set(),
    "rename": set(),
    "Path.replace": set(),
    "Image.open": {"imaging/processing.py"},
    "open for appending": {"runs/journal.py", "demo/team.py"},  # the log of a process of the demo holds no records
    "os.link": {"runs/lock.py", "data/export_common.py"},  # a lock, and images that are linked into an export
    "rich.progress": {"runs/progress.py"},
    "os.fsync": {"runs/files.py", "runs/journal.py", "training/statefile.py"},
    "RunLock": {"runs/lock.py"},
    "lock.hold": {"runs/folder.py"},
}
"""What only these files do; everybody else calls them."""


def done_in(tree: ast.Module) -> Iterator[str]:
    """Which of the things of `ONLY` a module does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rich.progress":
            yield "rich.progress"
        if isinstance(node, ast.ImportFrom) and any(name.name == "hold" for name in node.names):
            yield "lock.hold"
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        method = call.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        if call in ONLY:
            yield call
        elif method == "rename":
            yield "rename"
        elif method == "replace" and len(node.args) == 1 and not node.keywords:  # that of a text has two
            yield "Path.replace"
        elif method == "hold":
            yield "lock.hold"
        elif method == "open" or call == "open":
            modes = [
                argument.value
                for argument in [*node.args, *(word.value for word in node.keywords)]
                if isinstance(argument, ast.Constant)
            ]
            if any(isinstance(mode, str) and re.fullmatch("[bt+]*a[bt+]*", mode) for mode in modes):
                yield "open for appending"


@pytest.mark.parametrize("what", ONLY)
def test_one_place_does_it(what: str) -> None:
    files = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if what in done_in(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert files == ONLY[what]


ELSEWHERE = {
    "os.replace": "import os\nos.replace(part, path)",
    "rename": "partial.rename(final)",
    "Path.replace": "part.replace(path)",
    "Image.open": "from PIL import Image\nimage = Image.open(path)",
    "open for appending": "with path.open('ab') as file: ...",
    "rich.progress": "from rich.progress import Progress",
    "lock.hold": "from realvr.runs.lock import hold",
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_second_implementation_is_seen(what: str) -> None:
    assert what in done_in(ast.parse(ELSEWHERE[what]))
    assert not list(done_in(ast.parse("text.replace('a', 'b')\nreplace(sample, id='1')\npath.open('rb')\nopen(path)")))
