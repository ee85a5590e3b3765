"""The file of results of `speed.py`, which every run of the same workload adds to."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from realvr.runs.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
SAME = ("gpu", "preset", "dtype")
"""Facts in which a file and a run that adds to it must agree."""
SAME_SIZES = ("visual", "text", "group", "latents", "answer", "long_answer", "prompts", "row", "rank", "picture")
"""The same of the sizes; microbatches, memory mode and questions stand in the entries."""
HEAD = ("about", "timings", "beside", "failures")
"""Parts of a file that are no entries."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, and the most memory in use; None off a GPU."""

    each: list[float]
    peak_gib: float | None
    """In the repeats."""
    first_peak_gib: float | None = None
    """In the warm runs before them, in which graphs are recorded and the optimizer makes its states."""
    reserved_gib: float | None = None
    """What the allocator held at most in the repeats."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.each)

    @property
    def spread(self) -> tuple[float, float, float]:
        """The least, the median, the most."""
        return min(self.each), self.seconds, max(self.each)

    def peaks(self) -> dict[str, float | None]:
        return {
            "peak_gib": self.peak_gib,
            "first_peak_gib": self.first_peak_gib,
            "reserved_gib": self.reserved_gib,
        }

    @property
    def most_gib(self) -> float | None:
        """The larger of both peaks."""
        return max((peak for peak in (self.peak_gib, self.first_peak_gib) if peak is not None), default=None)

    def facts(self) -> dict[str, Any]:
        each = [round(value, 6) for value in self.each]
        return {"seconds": round(self.seconds, 6), "each": each, **self.peaks()}


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what something was measured."""
    packages = {}
    for name in ("torch", "transformers", "peft", "accelerate"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "versions": packages, "commit": commit()}


def commit() -> str | None:
    """The commit of the tree, with a mark where files differ from it; ``REALVR_COMMIT`` where git is not there."""
    if given := os.environ.get("REALVR_COMMIT"):
        return given
    try:
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Results:
    """``{name: {"value": …, "inputs": {…}}}``, written after every measurement, with ``about`` and ``timings``.

    A file that is there is kept and added to, if it has the same workload. With ``resume`` only what it lacks is
    measured.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool) -> None:
        self.path, self.resume = path, resume
        self.content: dict[str, Any] = {"about": dict(about), "timings": {}}
        self.failed = False
        """Whether something could not be measured in this run."""
        self.commit, self.torch = about["commit"], about["versions"]["torch"]
        self.options: str | None = None
        """Name of the options in force; every entry has it."""
        self.switches: str | None = None
        """What they switch on."""
        self.beside: str | None = None
        """Name of the options that are measured beside the others; None: results go to the top of the file."""
        self._now: set[tuple[str | None, str]] = set()
        if path.is_file():
            self._add_to(read_json(path))

    def _add_to(self, before: dict[str, Any]) -> None:
        now, then = json.loads(json.dumps(self.content["about"])), before["about"]
        differ = [f"{name} is {then.get(name)} there, {now[name]} here" for name in SAME if then.get(name) != now[name]]
        for name in SAME_SIZES:
            there, here = (_size(about["sizes"], name) for about in (then, now))
            if there != here:
                differ.append(f"{name} is {there} there, {here} here")
        if differ:
            raise SystemExit(f"{self.path}: has results of another workload ({'; '.join(differ)}); give another --out")
        self.content = before
        self.content["about"] = {**then, **now, "options": then.get("options", {})}
        self.content.setdefault("timings", {})

    @property
    def _place(self) -> dict[str, Any]:
        if self.beside is None:
            return self.content
        return self.content.setdefault("beside", {}).setdefault(self.beside, {})

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether one of them has to be measured: with ``resume`` if it is not there, otherwise always."""
        return not self.resume or any(name not in self for name in names)

    def of_this_run(self, name: str) -> bool:
        """Whether it was measured by this process, not by an earlier one."""
        return (self.beside, name) in self._now

    def value(self, name: str) -> float | None:
        return self._place[name]["value"] if name in self else None

    def inputs(self, name: str) -> dict[str, Any]:
        return self._place[name]["inputs"] if name in self else {}

    def note_options(self, name: str, facts: Mapping[str, str]) -> None:
        """What a set of options switches on; from now on entries have it."""
        self.content["about"].setdefault("options", {})[name] = dict(facts)
        self.options, self.switches = name, ", ".join(f"{key}={value}" for key, value in facts.items())

    @property
    def stamp(self) -> dict[str, Any]:
        """What every entry says of the run that it comes from."""
        return {"commit": self.commit, "options": self.options, "switches": self.switches, "torch": self.torch}

    def put(self, name: str, value: object, **inputs: Any) -> None:
        self._now.add((self.beside, name))
        self._place[name] = {"value": _short(value), "inputs": {**self.stamp, **inputs}}
        self.write()

    def put_timing(self, label: str, timing: Timing) -> None:
        self.content["timings"][label] = {**timing.facts(), "commit": self.commit}
        self.write()

    def fail(self, section: str, text: str) -> None:
        """A section that could not be measured, and why."""
        self.failed = True
        self.content.setdefault("failures", {})[self._titled(section)] = {"error": text, **self.stamp}
        self.write()

    def passed(self, section: str) -> None:
        """It was measured: an earlier failure is forgotten."""
        if self.content.get("failures", {}).pop(self._titled(section), None) is not None:
            self.write()

    def _titled(self, section: str) -> str:
        return f"{section} [{self.options}]" if self.options else section

    def write(self) -> None:
        write_json(self.path, self.content)

    def names(self) -> list[str]:
        return [name for name in self.content if name not in HEAD]


def _size(sizes: Mapping[str, Any], name: str) -> object:
    return sizes["grid"][0] * sizes["grid"][1] if name == "visual" else sizes.get(name)


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


LORA_STEPS = ("lora_step_seconds", "lora_step_seconds_cached")
"""In the memory mode of the package, and with nothing recomputed."""


def put_lora_vs_full(results: Results) -> None:
    """A whole step with adapters over one with full parameters, wherever both are known. Of LoRA's memory modes, if one
    run measured them, the faster counts."""
    first, full = results.inputs(LORA_STEPS[0]), results.value("rl_step_seconds")
    known = {name: results.value(name) for name in LORA_STEPS if _run_of(results.inputs(name)) == _run_of(first)}
    times = {name: seconds for name, seconds in known.items() if seconds is not None}
    if not times or full is None:
        return
    name = min(times, key=lambda name: times[name])
    sides = {"lora": results.inputs(name), "full": results.inputs("rl_step_seconds")}
    facts: dict[str, Any] = {"seconds": times[name], "full_seconds": full}
    facts |= {key: sides["lora"].get(key) for key in results.stamp}
    for key in ("microbatch", "memory", "text_tokens"):
        facts |= {f"{side}_{key}": inputs.get(key) for side, inputs in sides.items()}
    if len(times) > 1:
        facts["ratios"] = {results.inputs(each).get("memory"): _short(time / full) for each, time in times.items()}
    ran = {side: _run_of(inputs) for side, inputs in sides.items()}
    if ran["lora"] != ran["full"]:
        told = "; ".join(f"{side}: commit {commit}, options {options}" for side, (commit, options) in ran.items())
        facts["note"] = f"not of one run: {told}"
    if results.inputs("lora_vs_full") != facts:
        results.put("lora_vs_full", times[name] / full, **facts)


def _run_of(inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    return inputs.get("commit"), inputs.get("options")
