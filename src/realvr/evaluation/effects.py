"""What the latents do for the answers: help and dependence, from the conditions of an evaluation.

*Help* is own latents minus no span. *Dependence* is own latents minus those of another question, and minus noise of the
same norms. They are different things: a model may answer better with a span and not care what is in it, or follow its
latents and gain nothing. A reply that cannot be read counts as wrong, so a model whose format breaks under foreign
latents loses points without having used its own. Each effect therefore carries the share of readable replies under the
condition, and the same difference over the questions that were answered readably under both. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EFFECTS: dict[str, str] = {"help": "none", "dependence_other": "other", "dependence_noise": "noise"}
"""Effect -> the condition that own latents are compared with."""
TITLES: dict[str, str] = {
    "help": "help: own − no span",
    "dependence_other": "dependence: own − another's",
    "dependence_noise": "dependence: own − noise",
}


def effects(conditions: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The effects that conditions with a ``difference`` from own latents amount to, in points. Keys as in `EFFECTS`."""
    cells = {name: conditions.get(condition) for name, condition in EFFECTS.items()}
    return {name: _effect(cell) for name, cell in cells.items() if cell and "difference" in cell}


def _effect(cell: Mapping[str, Any]) -> dict[str, Any]:
    """``points``, ``ci`` (``std`` over checkpoints), ``read`` (readable replies under the condition, %), ``n``, ``p``
    and ``readable``: the same where the replies under both can be read."""
    difference = cell["difference"]
    if isinstance(difference, Mapping):  # over several checkpoints
        found = {"points": 0.0 - difference["mean"], "std": difference["std"], "n": difference["n"]}
        return found | {"read": cell.get("coverage")}
    found = {**_turned(cell), "read": cell.get("coverage")}
    found |= {"n": cell["common"], "p": cell["p"]} if "common" in cell else {}
    if (readable := cell.get("readable")) is not None:
        both = _turned(readable) if "difference" in readable else {"points": None, "ci": None}
        found["readable"] = both | ({"n": readable["common"]} if "common" in readable else {})
    return found


def _turned(cell: Mapping[str, Any]) -> dict[str, Any]:
    low, high = cell["difference_ci"]
    return {"points": 0.0 - cell["difference"], "ci": [0.0 - high, 0.0 - low]}


def beyond_noise(effect: Mapping[str, Any] | None) -> bool:
    """Whether latents, not lost formats, make a difference: the interval over readable replies leaves out zero."""
    if not effect:
        return False
    ci = effect.get("readable", effect).get("ci")
    return ci is not None and None not in ci and not ci[0] <= 0 <= ci[1]
