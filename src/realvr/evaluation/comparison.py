"""Two runs, the same questions: paired differences with intervals and McNemar's test. No model, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from realvr.errors import UserError
from realvr.evaluation.five_tasks import five_tasks
from realvr.evaluation.records import Prediction
from realvr.evaluation.scoring import (
    Bench,
    Rows,
    group,
    infer_latents,
    paired,
    reference_latents,
)
from realvr.evaluation.statistics import Bootstrap, gain, interval


def compare(
    first: Iterable[Prediction],
    second: Iterable[Prediction],
    *,
    first_latents: int | None = None,
    second_latents: int | None = None,
    policy: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """``second - first`` with each model's own latents at its trained K, over the questions that both answered.

    Keys: ``benches`` (per benchmark ``first``, ``second``, ``gain`` (by the paper's rule: of the displayed one-decimal
    scores), ``difference`` (unrounded), ``difference_ci``, ``common``, ``only_first``, ``only_second``, ``p``,
    ``only_in_first``, ``only_in_second``), ``five_task_mean`` where all five are common, ``only_in_first`` and
    ``only_in_second`` (benchmarks), ``warnings``.
    """
    one, two = _own(group(first, policy), first_latents), _own(group(second, policy), second_latents)
    sampling = Bootstrap(resamples, seed)
    warnings: list[str] = []
    benches: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for name in (name for name in one if name in two):
        entry, replicates = _bench(name, one[name], two[name], sampling, warnings)
        if replicates is not None:
            benches[name], drawn[name] = entry, replicates
    if not benches:
        raise UserError(
            f"the runs have no question in common: the first has {_names(one)}, the second {_names(two)}; "
            "compare runs over the same benchmarks and decoding seeds"
        )
    result: dict[str, Any] = {
        "resamples": resamples,
        "seed": seed,
        "benches": benches,
        "only_in_first": [name for name in one if name not in benches],
        "only_in_second": [name for name in two if name not in benches],
        "warnings": warnings,
    }
    if tasks := five_tasks(benches):
        means = {
            key: float(np.mean([benches[name][key] for name in tasks])) for key in ("first", "second", "difference")
        }
        result["five_task_mean"] = {
            **means,
            "gain": gain(means["first"], means["second"]),
            "difference_ci": list(interval(np.mean([drawn[name] for name in tasks], axis=0))),
            "tasks": tasks,
        }
    return result


def _own(benches: Mapping[str, Bench], trained: int | None) -> dict[str, Rows]:
    """Rows with the model's own latents at its K, by benchmark."""
    latents = infer_latents(benches) if trained is None else trained
    references = {name: reference_latents(bench, latents) for name, bench in benches.items()}
    return {name: benches[name].cells["own", k] for name, k in references.items() if k is not None}


def _names(runs: Mapping[str, Rows]) -> str:
    return ", ".join(f"{name} ({len(rows)})" for name, rows in runs.items()) or "none"


def _bench(
    name: str, first: Rows, second: Rows, sampling: Bootstrap, warnings: list[str]
) -> tuple[dict[str, Any], np.ndarray | None]:
    bench = Bench(name, {("first", 0): first, ("second", 0): second})
    result, drawn = paired(bench, first, second, sampling)
    if drawn is None:
        return result, None
    keys_first, keys_second = ({(row.question, row.seed): row for row in rows} for rows in (first, second))
    both = [key for key in keys_first if key in keys_second]
    warnings += _differences(name, [(keys_first[key], keys_second[key]) for key in both])
    one, two = (bench.score([keys[key] for key in both]) for keys in (keys_first, keys_second))
    return {
        "first": one,
        "second": two,
        "gain": gain(one, two),
        **result,
        "metric": bench.rule.metric,
        "policy": _policies([keys_first[key] for key in both]),
        "second_policy": _policies([keys_second[key] for key in both]),
        "latents": first[0].latents,
        "second_latents": second[0].latents,
        "only_in_first": len(keys_first) - len(both),
        "only_in_second": len(keys_second) - len(both),
    }, drawn


def _policies(rows: Rows) -> str:
    return " + ".join(sorted({row.policy for row in rows}))


def _differences(name: str, both: list[tuple[Prediction, Prediction]]) -> list[str]:
    """What makes a comparison unfair. Prompts of different models differ in tokens, so they are only counted."""
    found = []
    for what, differs in {
        "right answer": [a.answer != b.answer for a, b in both],
        "options": [a.choices != b.choices for a, b in both],
        "image list": [a.images != b.images for a, b in both],
        "encoded prompt": [bool(a.prompt and b.prompt) and a.prompt != b.prompt for a, b in both],
        "extraction policy": [a.policy != b.policy for a, b in both],
        "judge of the answers": [a.judge != b.judge for a, b in both],
    }.items():
        if any(differs):
            example = next(a.question for (a, _), different in zip(both, differs, strict=True) if different)
            found.append(f"{name}: the {what} differs in {sum(differs)} of {len(both)} questions, first in {example}")
    return found
