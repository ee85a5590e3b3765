"""Where every number comes from: weights, data, settings, versions, and the commands that the records amount to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from realvr.report.results import Json, Result, Results
from realvr.report.training import stage
from realvr.widgets import Fold, Section, Table, Text


def provenance(results: Results) -> Section:
    section = Section("provenance", "Provenance")
    section.widgets.append(
        Text(
            "What the records say about each arm. The commands are put together from the records: options that leave "
            "no trace in a result (batch size, device) are not in them."
        )
    )
    for arm in results.arms:
        widgets = [part for result in arm.results.values() for part in _result(result)]
        section.widgets.append(Fold(arm.name, widgets))
    return section


def _result(result: Result) -> list[Any]:
    with result.reading():
        widgets: list[Any] = [Text(f"{_TITLES[result.kind]}: {result.folder}", "heading")]
        if result.kind == "train":
            return [*widgets, *_training(result)]
        widgets += [Text(command(result), "command")] if result.settings else []
        rows = [*_flat(result.model)] + _settings(result)
        widgets += [Table("Model and settings", ["what", "value"], rows)] if rows else []
        if result.kind in ("eval", "sweep"):
            widgets += _benches(result.settings)
        return widgets


_TITLES = {
    "train": "Training",
    "eval": "Evaluation",
    "sweep": "Sweep over K",
    "counterfactual": "Counterfactual pairs",
    "exchange": "Latent exchange",
    "grounding": "Latents against the evidence of held-out questions",
}


def _training(result: Result) -> list[Any]:
    if not result.settings:
        return [Text("No settings.yaml beside the metrics.")]
    kind = stage(result.content["steps"])
    text = yaml.safe_dump(result.settings, sort_keys=False, allow_unicode=True)
    file = result.folder / "settings.yaml"
    return [Text(f"realvr train {kind} {shlex.quote(str(file))}", "command"), Text(text, "code")]


def _settings(result: Result) -> list[list[str]]:
    if result.kind in ("eval", "sweep"):
        found = {**(result.settings.get("settings") or {}), **_under("version", result.settings.get("versions"))}
    else:
        found = {name: value for name, value in result.settings.items() if name != "model"}
    return _flat(found)


def _under(head: str, found: Any) -> Json:
    return {f"{head} {name}": value for name, value in (found or {}).items()}


def _flat(found: Mapping[str, Any], head: str = "") -> list[list[str]]:
    rows = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{head}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
            rows.append([f"{head}{name}", text])
    return rows


def _benches(record: Json) -> list[Table]:
    rows = []
    for name, bench in (record.get("benches") or {}).items():
        dropped = ", ".join(f"{reason}: {count}" for reason, count in (bench.get("dropped") or {}).items()) or "none"
        limit = bench.get("limit")
        kept = [str(bench.get("rows", "")), str(bench.get("questions", "")), "" if limit is None else str(limit)]
        rows.append([name, str(bench.get("path", "")), *kept, dropped, str(bench.get("sha256", ""))])
    header = ["benchmark", "file", "rows", "questions asked", "limit", "rows dropped", "sha256 of the questions"]
    return [Table("Questions", header, rows)] if rows else []


def command(result: Result) -> str:
    """The command line that the record of an evaluation amounts to."""
    words = [
        "realvr",
        "eval" if result.kind in ("eval", "sweep") else result.kind,
        str(result.model.get("path", "MODEL")),
    ]
    if result.kind in ("eval", "sweep"):
        words += _eval_options(result.settings)
    else:
        words.append(str(result.settings.get("data", "PAIRS")))
        for name in ("limit", "latents", "seeds"):
            if result.settings.get(name) is not None:
                words += [f"--{name}", str(result.settings[name])]
        if result.kind == "exchange" and result.settings.get("k"):
            words += ["--k", ",".join(map(str, result.settings["k"]))]
        words += ["--policy", str(result.settings.get("policy", "strict"))]
    most = (result.model.get("sampling") or {}).get("max_new")
    words += [] if most is None else ["--max-new", str(most)]
    return shlex.join([*words, "--out", str(result.folder)])


def _eval_options(record: Json) -> list[str]:
    words = []
    benches = record.get("benches") or {}
    for name, bench in benches.items():
        words += ["--bench", f"{name}={bench.get('path', Path('PATH'))}"]
    limits = {bench.get("limit") for bench in benches.values()} - {None}
    words += ["--limit", str(max(limits))] if limits else []
    settings = record.get("settings") or {}
    if settings.get("latents"):
        words += ["--latents", ",".join(map(str, settings["latents"]))]
    if settings.get("ablation") is False:
        words.append("--no-ablation")
    sampling = (record.get("responder") or {}).get("sampling") or {}
    if sampling.get("temperature"):
        words += ["--temperature", str(sampling["temperature"]), "--seeds", str(len(settings.get("seeds") or [0]))]
    if "stop" in sampling and sampling["stop"] is None:
        words.append("--no-stop-at-answer")
    return [*words, "--policy", str(settings.get("policy", "strict"))]
