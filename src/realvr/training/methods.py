"""Stage-2 methods and ablations of the paper by name, each as the few settings that define it.

A name fixes what makes the method what it is and leaves every other setting alone: ``realvr`` with another ``eta`` is
still ReaLVR, ``uniform`` with ``eta = 0.5`` is not and is refused. ``custom`` fixes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Method = Literal[
    "realvr",
    "lvr-rl",
    "direct",
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
    "custom",
]
Routing = Literal["selective", "raw", "uniform"]
Objective = Literal["contrast", "hinge-positive", "align"]

ALIASES = {"mass-matched-u+-": "mass-matched-u±", "mass-matched-c+-": "mass-matched-c±"}
"""Spellings without the plus-minus sign."""

_REALVR: dict[str, Any] = {
    "routing": "selective",
    "objective": "contrast",
    "mass_matched": False,
    "detach": True,
    "on_policy": True,
}


def _matched(routing: Routing, objective: Objective) -> dict[str, Any]:
    return _REALVR | {"mass_matched": True, "routing": routing, "objective": objective}


PRESETS: Mapping[str, dict[str, Any]] = {
    "realvr": _REALVR,
    "lvr-rl": {"lambda_ev": 0.0},
    "direct": {"lambda_ev": 0.0, "model.latents": 0},
    "uniform": _REALVR | {"routing": "uniform", "eta": 1.0},
    "selective": _REALVR | {"eta": 0.0},
    "raw-attention": _REALVR | {"routing": "raw"},
    "no-negatives": _REALVR | {"objective": "hinge-positive"},
    "undetached": _REALVR | {"detach": False},
    "off-policy": _REALVR | {"on_policy": False},
    "mass-matched-u+": _matched("uniform", "hinge-positive"),
    "mass-matched-u±": _matched("uniform", "contrast"),
    "mass-matched-c+": _matched("selective", "hinge-positive"),
    "mass-matched-c±": _matched("selective", "contrast"),
    "custom": {},
}
"""Dotted setting to value, for each method."""


def fill(settings: dict[str, Any]) -> dict[str, Any]:
    """Raw Stage-2 settings with those that their ``method`` defines filled in.

    Raises ValueError where a setting is given and contradicts the method.
    """
    name = settings.get("method", "realvr")
    method = ALIASES.get(name, name) if isinstance(name, str) else None
    filled = {**settings, "method": method or name}
    for key, value in PRESETS.get(method or "", {}).items():
        section, _, field = key.rpartition(".")
        home = filled
        if section:
            inner = filled.get(section, {})
            home = filled[section] = dict(inner) if isinstance(inner, Mapping) else inner.model_dump()
        given = home.get(field)
        if given is not None and given != value:
            raise ValueError(
                f"method '{method}' means {key} = {_text(value)}, but {key} is {_text(given)}: "
                f"drop {key}, or choose method 'custom' to combine settings freely"
            )
        home[field] = value
    return filled


def without(settings: dict[str, Any], method: str) -> dict[str, Any]:
    """Raw settings of a file, prepared for a ``method`` chosen on the command line: what it defines is dropped."""
    kept = {**settings, "method": method}
    for key in PRESETS.get(ALIASES.get(method, method), {}):
        section, _, field = key.rpartition(".")
        if section and isinstance(kept.get(section), Mapping):
            kept[section] = {name: value for name, value in kept[section].items() if name != field}
        elif not section:
            kept.pop(field, None)
    return kept


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
