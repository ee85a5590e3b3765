"""What this machine offers: versions, devices, training engines (``realvr env``)."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pillow",
    "pyarrow",
    "accelerate",
    "peft",
    "math-verify",
    "tensorboard",
    "wandb",
    "trackio",
)


def survey() -> dict[str, dict[str, Any]]:
    """Versions, devices, engines; a broken package is reported, never fatal."""
    versions: dict[str, Any] = {"python": platform.python_version(), "realvr": _version("realvr")}
    versions |= {name: _version(name) for name in PACKAGES}
    return {"versions": versions, "devices": _devices(), "engines": _engines(versions)}


def _version(name: str) -> str | None:
    if name == "realvr":
        from realvr import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    devices: dict[str, Any] = {"cpu": f"{os.cpu_count()} cores ({platform.machine()})"}
    try:
        import torch

        if not torch.cuda.is_available():
            devices["cuda"] = "none seen by torch"
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    except Exception as error:  # whatever a broken driver or install raises belongs in the report
        devices["torch"] = f"cannot be imported: {error}"
    return devices


def _engines(versions: dict[str, Any]) -> dict[str, Any]:
    """Training engines and the packages they need, whether or not this machine has several devices."""
    try:
        from realvr.training.engine import ENGINES

        needs = {engine.title: engine.packages for engine in ENGINES}
    except Exception as error:  # a broken torch belongs in the report
        return {"engines": f"cannot be imported: {error}"}
    return {title: _through(packages, versions) for title, packages in (needs | {"LoRA": ("peft",)}).items()}


def _through(packages: tuple[str, ...], versions: dict[str, Any]) -> str | None:
    """The packages with their versions, torch where it alone is enough; None where one is missing."""
    installed = {name: versions.get(name) or _version(name) for name in packages or ("torch",)}
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    return f"through {listed}" if all(installed.values()) else None
