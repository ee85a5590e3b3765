"""Diagnostics until they have one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realvr.demo.choice import choice
from realvr.diagnostics.results import FILES


def diagnose(name: str, model: str, data: Path, out: Path, options: dict[str, Any]) -> None:
    from realvr.cli import pairs

    if hasattr(pairs, name):
        getattr(pairs, name)(model, data, out, max_new=choice().max_new, device="cpu", **options)
    else:
        from realvr.diagnostics.grounding import measure

        FILES[name].dump(out / f"{name}.json", measure(model, data, choice().latents, **options))


def _rate(found: dict[str, Any]) -> dict[str, Any]:
    return {"rate": found["rate"], "ci": [found["low"], found["high"]]}


def _mean(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return found and {"mean": found["mean"], "ci": [found["low"], found["high"]], "n": found["pairs"]}


def numbers(name: str, summary: Any | None) -> dict[str, Any]:
    if name == "counterfactual":
        assert summary is not None
        both = ("strict_correct_flip", "false_flip")
        return {rate: {k: _rate(one["macro"][rate]) for k, one in summary["protocols"].items()} for rate in both}
    if name == "exchange":
        rows = {row["condition"]: row for row in (summary or {"rows": ()})["rows"] if row["selector"] == "full"}
        swap, other = rows.get("swap", {}), rows.get("unrelated", {})
        return {
            "donor_lift": _mean(swap.get("donor_lift")),
            "unrelated_lift": _mean(other.get("donor_lift")),
            "margin_shift": _mean(swap.get("margin_shift")),
        }
    called = {"evidence_margin": "margin", "cos_positive": "cos_positive", "oracle_margin": "oracle_margin"}
    return {key: _mean((summary or {}).get(value)) for key, value in called.items()}
