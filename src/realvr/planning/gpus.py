"""GPUs by name, from ``gpus.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from realvr.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """What one device has; rates are 0 where only its memory is known."""

    name: str
    memory: float
    """GiB."""
    flops: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    per_node: int = 8
    nvidia: bool = True
    source: str = ""


@cache
def known_gpus() -> dict[str, Gpu]:
    """All GPUs of the file."""
    raw = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text(encoding="utf-8"))
    return {name: _gpu(name, one) for name, one in raw.items()}


def _gpu(name: str, raw: dict[str, Any]) -> Gpu:
    rates = {key: float(raw[key]) for key in ("memory", "flops", "bandwidth", "link", "network")}
    return Gpu(name, **rates, per_node=int(raw["per_node"]), nvidia=raw.get("nvidia", True), source=str(raw["source"]))


def find_gpu(name: str | None, memory: float | None) -> Gpu:
    """The named GPU, or one of which nothing is known but its memory."""
    if (name is None) == (memory is None):
        raise UserError(f"give either --gpu NAME or --gpu-memory GIB; named ones: {', '.join(known_gpus())}")
    if memory is not None:
        if not 0 < memory < 1e5:
            raise UserError(f"--gpu-memory is {memory:g}: give the memory of one GPU in GiB, such as 80")
        return Gpu(f"GPU of {memory:g} GiB", memory)
    return known_gpus()[one_of(str(name), known_gpus(), "--gpu")]


def one_of(text: str, names: Iterable[str], option: str) -> str:
    """The name that ``text`` means: itself, or the only one that starts with it. Case does not matter."""
    names = list(names)
    lower = text.strip().lower()
    if exact := [name for name in names if name.lower() == lower]:
        return exact[0]
    found = [name for name in names if lower and name.lower().startswith(lower)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{option} {text}: which of {', '.join(found)}?")
    lowered = {name.lower(): name for name in names}
    close = [lowered[each] for each in get_close_matches(lower, lowered, n=1)]
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"{option} {text}: {hint}known names: {', '.join(names)}")
