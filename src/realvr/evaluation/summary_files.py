"""The files of a summary: ``summary.json``, ``summary.md`` and ``summary.csv``, and which policy they belong to.

The run's own policy has the plain names. Scores under another policy stand beside them as ``summary.POLICY.json``, so
that scoring a run again never replaces the numbers it was made for.
"""

from __future__ import annotations

import csv as csv_module
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.evaluation.benchmark import known_policies
from realvr.evaluation.five_tasks import five_title
from realvr.evaluation.published import Row
from realvr.evaluation.results import checked
from realvr.evaluation.tables import PUBLISHED, markdown, published_mean, published_value
from realvr.runs.files import write_atomically

SUMMARY = "summary"
KINDS = ("json", "md", "csv")
_COUNTS = ("n", "replies", "coverage", "parse_failures", "errors", "mean_new_tokens", "status")
_PAIRED = ("difference", "difference_low", "difference_high", "common", "only_first", "only_second", "p")
_CSV = ("benchmark", "condition", "latents", "metric", "policy", "score", "low", "high", "std", *_COUNTS, *_PAIRED)


def summary_path(directory: str | Path, policy: str = "", kind: str = "json") -> Path:
    """A file of the summary under ``policy``; empty: under the run's own."""
    return Path(directory) / f"{SUMMARY}{'.' + policy if policy else ''}.{kind}"


def other_policies(directory: str | Path) -> list[str]:
    """Policies under which a run has been scored beside its own."""
    return [policy for policy in known_policies() if summary_path(directory, policy).is_file()]


def write_summary(
    directory: str | Path, summary: Mapping[str, Any], beside: Row | None = None, policy: str = ""
) -> list[Path]:
    """The three files, each replaced as a whole; ``policy`` names one that is not the run's own."""
    texts = {
        "json": json.dumps(checked(summary), indent=2, ensure_ascii=False) + "\n",
        "md": markdown(summary, beside),
        "csv": csv(summary, beside),
    }
    written = [summary_path(directory, policy, kind) for kind in KINDS]
    for path, text in zip(written, texts.values(), strict=True):
        try:
            write_atomically(path, text)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return written


def csv(summary: Mapping[str, Any], beside: Row | None = None) -> str:
    """One line per benchmark, condition and K, unrounded."""
    target = io.StringIO()
    writer = csv_module.DictWriter(target, _CSV, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_aggregate_lines(summary) if "checkpoints" in summary else _lines(summary))
    if beside:
        found = {name: published_value(beside, name, entry) for name, entry in summary["benches"].items()}
        found["five-task mean"] = published_mean(beside, summary)
        for name, value in found.items():
            if value:
                line = {"benchmark": name, "condition": PUBLISHED, "metric": f"{beside.method}, {beside.table}"}
                writer.writerow({**line, "score": value[0], "std": value[1]})
    return target.getvalue()


def _lines(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, entry in summary["benches"].items():
        yield _line(name, "own", entry["latents"], entry, entry["metric"])
        for condition, cell in entry["ablation"].items():
            yield _line(name, condition, 0 if condition == "none" else entry["latents"], cell, entry["metric"])
        for k, cell in entry.get("sweep", {}).items():
            if int(k) not in (0, entry["latents"]):
                yield _line(name, "own", int(k), cell, entry["metric"])
    five = summary.get("five_task_mean", {})
    for condition, cell in five.items():
        latents = 0 if condition == "none" else summary["trained_latents"]
        yield _line(
            five_title(five["own"]["tasks"]), condition, latents, {**cell, "headline": cell["mean"]}, "mean of the five"
        )


def _line(bench: str, condition: str, latents: int, cell: Mapping[str, Any], metric: str) -> dict[str, Any]:
    low, high = cell["ci"]
    line = {"benchmark": bench, "condition": condition, "latents": latents, "metric": metric, "low": low, "high": high}
    line |= {"score": cell["headline"], **{name: cell.get(name) for name in ("policy", "std", *_COUNTS, *_PAIRED)}}
    if "difference_ci" in cell:
        line["difference_low"], line["difference_high"] = cell["difference_ci"]
    return line


def _aggregate_lines(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, entry in summary["benches"].items():
        for condition, cell in {"own": entry, **entry["ablation"]}.items():
            yield _aggregate_line(name, condition, cell) | {"metric": entry["metric"], "policy": entry["policy"]}
    five = summary.get("five_task_mean", {})
    for condition, cell in five.items():
        yield _aggregate_line(five_title(five["own"]["tasks"]), condition, cell) | {"metric": "mean of the five"}


def _aggregate_line(bench: str, condition: str, cell: Mapping[str, Any]) -> dict[str, Any]:
    line = {"benchmark": bench, "condition": condition, "score": cell["mean"], "std": cell["std"], "n": cell["n"]}
    return line | ({"difference": cell["difference"]["mean"]} if "difference" in cell else {})
