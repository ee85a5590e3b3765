"""Summaries of several checkpoints, for instance training seeds, as mean and standard deviation. No model, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realvr.evaluation.effects import effects
from realvr.evaluation.five_tasks import in_order
from realvr.evaluation.scoring import ABLATIONS, VERSION
from realvr.evaluation.statistics import mean_std


def aggregate(summaries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (ddof = 1) over checkpoints, for instance training seeds. Keys are their names.

    A benchmark or condition counts the checkpoints that have it; ``n`` says how many.
    """
    found = {bench for summary in summaries.values() for bench in summary["benches"]}
    benches: dict[str, Any] = {}
    for bench in in_order(found):
        entries = {name: s["benches"][bench] for name, s in summaries.items() if bench in s["benches"]}
        benches[bench] = {
            **_over(entries, "headline"),
            "coverage": sum(entry["coverage"] for entry in entries.values()) / len(entries),
            "metric": next(iter(entries.values()))["metric"],
            "policy": " + ".join(sorted({entry["policy"] for entry in entries.values()})),
            "complete": all(entry["complete"] is not False for entry in entries.values()),
            "not_published_set": next(filter(None, (e["not_published_set"] for e in entries.values())), ""),
            "ablation": _conditions({name: entry["ablation"] for name, entry in entries.items()}, "headline"),
        }
        benches[bench]["effects"] = effects(benches[bench]["ablation"])
    result: dict[str, Any] = {"version": VERSION, "checkpoints": list(summaries), "benches": benches}
    for key in ("five_task_mean", "task_mean"):
        means = {name: summary[key] for name, summary in summaries.items() if key in summary}
        if means:
            result[key] = _conditions(means, "mean")
            result[key]["own"]["tasks"] = next(iter(means.values()))["own"]["tasks"]
            result.setdefault("effects", effects(result[key]))
    return result


def _conditions(entries: Mapping[str, dict[str, Any]], value: str) -> dict[str, Any]:
    """Per condition: mean and deviation of its value and, beside it, of its difference from the own latents."""
    result: dict[str, Any] = {}
    for condition in ("own", *ABLATIONS):
        there = {name: entry[condition] for name, entry in entries.items() if condition in entry}
        if there:
            result[condition] = _over(there, value)
            read = [entry["coverage"] for entry in there.values() if "coverage" in entry]
            result[condition] |= {"coverage": sum(read) / len(read)} if read else {}
            different = {name: entry for name, entry in there.items() if "difference" in entry}
            if different:
                result[condition]["difference"] = _over(different, "difference")
    return result


def _over(entries: Mapping[str, dict[str, Any]], value: str) -> dict[str, Any]:
    values = {name: entry[value] for name, entry in entries.items()}
    mean, std = mean_std(list(values.values()))
    return {"mean": mean, "std": std, "n": len(values), "values": values}
