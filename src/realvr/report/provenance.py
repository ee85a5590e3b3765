"""Where every number comes from: weights, data, settings, versions, and the commands that the records amount to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.results import Settings
from realvr.evaluation.results import EvalRecord
from realvr.report.results import Evaluation, Json, Measurement, Result, Results
from realvr.training.records import SETTINGS, TrainingRun
from realvr.widgets import Fold, Section, Table, Text


def provenance(results: Results) -> Section:
    """The section that says what each arm was made from, and with which commands."""
    section = Section("provenance", "Provenance")
    section.widgets.append(
        Text(
            "What the records say about each arm. The commands are put together from the records: options that leave "
            "no trace in a result (batch size, device) are not in them."
        )
    )
    for arm in results.arms:
        widgets = [part for kind, result in arm.results() for part in _result(kind, result)]
        section.widgets.append(Fold(arm.name, widgets))
    return section


_TITLES = {"train": "Training", "eval": "Evaluation", "sweep": "Sweep over K"}


def _result(kind: str, result: Result) -> list[Any]:
    if isinstance(result, Measurement) and not result.alone:
        return []
    title = DIAGNOSTICS.get(kind).title if isinstance(result, Measurement) else _TITLES[kind]
    widgets: list[Any] = [Text(f"{title}: {result.folder}", "heading")]
    if isinstance(result, TrainingRun):
        return [*widgets, *_training(result)]
    settings = result.record if isinstance(result, Evaluation) else result.settings
    widgets += [Text(command(result), "command")] if settings else []
    rows = [*_flat(result.model)] + _settings(result)
    widgets += [Table("Model and settings", ["what", "value"], rows)] if rows else []
    return widgets + (_benches(result.record) if isinstance(result, Evaluation) else [])


def _training(run: TrainingRun) -> list[Any]:
    if not run.settings:
        return [Text("No settings.yaml beside the metrics.")]
    text = yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True)
    words = ["realvr", "train", run.about["stage"], str(run.folder / SETTINGS)]
    return [Text(shlex.join(words), "command"), Text(text, "code")]


def _settings(result: Evaluation | Measurement) -> list[list[str]]:
    if isinstance(result, Measurement):
        return _flat({name: value for name, value in result.settings.items() if name != "model"})
    record = result.record
    return _flat({**record.get("settings", {}), **_under("version", record.get("versions", {}))})


def _under(head: str, found: Mapping[str, Any]) -> Json:
    return {f"{head} {name}": value for name, value in found.items()}


def _flat(found: Mapping[str, Any], head: str = "") -> list[list[str]]:
    rows = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{head}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
            rows.append([f"{head}{name}", text])
    return rows


def _benches(record: EvalRecord) -> list[Table]:
    rows = []
    for name, bench in record.get("benches", {}).items():
        dropped = ", ".join(f"{reason}: {count}" for reason, count in (bench.get("dropped") or {}).items()) or "none"
        limit = bench.get("limit")
        kept = [str(bench.get("rows", "")), str(bench.get("questions", "")), "" if limit is None else str(limit)]
        rows.append([name, str(bench.get("path", "")), *kept, dropped, str(bench.get("sha256", ""))])
    header = ["benchmark", "file", "rows", "questions asked", "limit", "rows dropped", "sha256 of the questions"]
    return [Table("Questions", header, rows)] if rows else []


def command(result: Evaluation | Measurement) -> str:
    """The command line that the record of a result amounts to."""
    model = str(result.model.get("path", "MODEL"))
    if isinstance(result, Evaluation):
        words = ["realvr", "eval", model, *_eval_options(result.record)]
    else:
        kind = DIAGNOSTICS.get(result.name)
        verb = kind.how().partition(" MODEL")[0].split()
        own = ["limit", "latents", *kind.Settings.model_fields]
        words = [*verb, model, str(result.settings.get("data", "DATA")), *_options(result.settings, own)]
    most = (result.model.get("sampling") or {}).get("max_new")
    words += [] if most is None else ["--max-new", str(most)]
    return shlex.join([*words, "--out", str(result.folder)])


def _options(settings: Settings, names: Sequence[str]) -> list[str]:
    """Options of the command line that were recorded."""
    words = []
    for name in names:
        value = {**settings}.get(name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return words


def _eval_options(record: EvalRecord) -> list[str]:
    words = []
    benches = record.get("benches", {})
    for name, bench in benches.items():
        words += ["--bench", f"{name}={bench.get('path') or 'PATH'}"]
    limits = {limit for bench in benches.values() if (limit := bench.get("limit")) is not None}
    words += ["--limit", str(max(limits))] if limits else []
    settings = record.get("settings", {})
    if isinstance(settings.get("latents"), list) and settings["latents"]:
        words += ["--latents", ",".join(map(str, settings["latents"]))]
    if settings.get("ablation") is False:
        words.append("--no-ablation")
    sampling = record.get("responder", {}).get("sampling") or {}
    if sampling.get("temperature"):
        words += ["--temperature", str(sampling["temperature"]), "--seeds", str(_count(settings.get("seeds")))]
    if "stop" in sampling and sampling["stop"] is None:
        words.append("--no-stop-at-answer")
    return [*words, "--policy", str(settings.get("policy", "strict"))]


def _count(seeds: object) -> int:
    return len(seeds) if isinstance(seeds, list) and seeds else 1
