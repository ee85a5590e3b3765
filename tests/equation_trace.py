"""The table of docs/equations.md, and which of its functions a real run enters.

A run goes through the command line, in this process, under a profiler that records every Python function entered.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realvr import cli
from stage_runs import config_file, configure

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "equations.md").read_text()
PACKAGES = {path.name for path in (ROOT / "src" / "realvr").iterdir() if (path / "__init__.py").is_file()}

RL: dict[str, Any] = {"group": 2, "max_new": 12}
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lvr-sft": ("sft", "mini-base", {}),
    "direct-sft": ("sft", "mini-base", {"model": {"latents": 0}}),
    "direct-aux": ("sft", "mini-base", {"model": {"latents": 0}, "method": "direct-aux"}),
    "base": ("base", "mini-base", {"model": {"latents": 0}}),
    "direct": ("rl", "mini-base", RL | {"method": "direct", "model": {"latents": 0}}),
    "align": ("rl", "mini", RL | {"method": "custom", "objective": "align"}),
    "kl": ("rl", "mini", RL | {"method": "realvr", "beta": 0.1}),
    "normalised": ("rl", "mini", RL | {"method": "realvr", "credit": "normalised"}),
    "per-slot": ("rl", "mini", RL | {"method": "realvr", "evidence_boxes": "per-slot"}),
} | {
    name: ("rl", "mini", RL | {"method": name})
    for name in (
        "realvr",
        "lvr-rl",
        "uniform",
        "selective",
        "raw-attention",
        "no-negatives",
        "undetached",
        "off-policy",
        "mass-matched-u+",
        "mass-matched-u±",
        "mass-matched-c+",
        "mass-matched-c±",
    )
}
"""Every method and ablation by name: stage, packaged model to start from, settings."""


@dataclass(frozen=True)
class Row:
    """One row of the page: what it computes, the functions that do, and who calls them."""

    title: str
    functions: tuple[str, ...]
    called_by: str
    tests: str


def tables() -> Iterator[dict[str, str]]:
    """Every row of every table of the page, by column."""
    columns: list[str] = []
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = cells
        elif not set(line) <= set("|-: "):
            assert len(cells) == len(columns), f"{len(cells)} cells in a table of {len(columns)} columns: {line}"
            yield dict(zip(columns, cells, strict=True))


def rows() -> list[Row]:
    """The rows that name functions."""
    found = []
    for cells in tables():
        if "function" in cells:
            names = re.findall(rf"`((?:{'|'.join(sorted(PACKAGES))})(?:\.\w+)+)`", cells["function"])
            found.append(Row(" | ".join(cells.values()), tuple(names), cells["called by"], cells["test"]))
    return found


@functools.cache
def methods_of(text: str) -> frozenset[str]:
    """Methods that a cell means: names and groups, "A except B"."""
    groups = {cells["group"]: cells["methods"] for cells in tables() if "group" in cells}
    whole, _, without = text.partition(" except ")
    found: set[str] = set()
    for part in filter(None, (part.strip() for part in whole.split(","))):
        found |= methods_of(groups[part]) if part in groups else {part.strip("`")}
    removed = {part.strip(" `") for part in without.split(",")} - {""}
    assert removed <= found, f"{text}: {sorted(removed - found)} are not part of {whole}"
    return frozenset(found - removed)


def resolve(name: str) -> Any:
    """The function or class of a name of the page."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"realvr.{module}"), attribute)


def codes(thing: Any) -> set[types.CodeType]:
    """Code objects that run when a function is called, or any method of a class."""
    if inspect.isclass(thing):
        return {inspect.unwrap(each).__code__ for each in vars(thing).values() if inspect.isfunction(each)}
    return {inspect.unwrap(thing).__code__}


@contextmanager
def recording() -> Iterator[set[types.CodeType]]:
    """Every Python function entered inside, in any thread started there."""
    entered: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield entered
        assert sys.getprofile() is note, "an exception inside the profiler switched it off: functions may be missing"
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def step(method: str, data: Path, folder: Path) -> set[types.CodeType]:
    """Functions entered by ``realvr train`` for one optimizer step of a method."""
    kind, model, changes = METHODS[method]
    small = {"optim": {"batch": 2, "microbatch": 2}, "data": {"workers": 0}}
    raw = configure(kind, Path(model), data, folder / "run", **small, **changes)
    raw["model"]["path"] = model
    if kind != "base" and method not in ("direct", "direct-sft", "direct-aux"):
        raw["model"].pop("latents")
    path = config_file(raw, folder / "settings.yaml")
    with recording() as entered:
        assert cli.main(["train", kind, str(path)]) == 0
    return entered


def disagreements(name: str, entered: set[types.CodeType], listed: list[Row]) -> tuple[list[str], list[str]]:
    """Functions that the page says ``name`` calls and it does not; and those that it calls and the page does not say.

    Several rows may name a function, each for its own purpose: together they say who calls it.
    """
    said = {function for row in listed if name in methods_of(row.called_by) for function in row.functions}
    traced = {function for row in listed if methods_of(row.called_by) & METHODS.keys() for function in row.functions}
    known = {function: KNOWN.setdefault(function, codes(resolve(function))) for function in said | traced}
    reached = {function for function, own in known.items() if own & entered}
    return sorted(said - reached), sorted(reached & traced - said)


KNOWN: dict[str, set[types.CodeType]] = {}
"""Code of each function as the package defines it, whatever a test puts in its place later."""
