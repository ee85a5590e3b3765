"""Numbers from the predictions of finished or interrupted runs: `score` one, `compare_runs` two. No model, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.evaluation.aggregation import aggregate
from realvr.evaluation.comparison import compare
from realvr.evaluation.identity import record_sets, renamed
from realvr.evaluation.published import Row, benchmark_row
from realvr.evaluation.records import PREDICTIONS, Prediction, read_predictions
from realvr.evaluation.run_folder import RECORD, read_record
from realvr.evaluation.scoring import summarise
from realvr.evaluation.summary_files import write_summary

_PATTERN = f"{Path(PREDICTIONS).stem}*.jsonl"


@dataclass(frozen=True)
class ScoreSettings:
    """What to score, and how.

    Args:
        directory: Folder of a run, with predictions.jsonl (shards predictions*.jsonl are read together).
        policy: Read every answer again under this policy (docs/evaluation.md lists them).
        beside: Set a row of the paper beside the scores, as METHOD@BACKBONE; it is marked as not measured.
        latents: K of the checkpoint; by default as the run recorded it.
        resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.
    """

    directory: str | Path
    policy: str | None = None
    beside: str | None = None
    latents: int | None = None
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Score:
    """The summary of a run, or mean and standard deviation over several; the files it was written to."""

    summary: dict[str, Any]
    written: list[Path]
    beside: Row | None


def score(settings: ScoreSettings) -> Score:
    """Score the predictions in a folder again, and write the summaries."""
    _check(settings.resamples)
    row = benchmark_row(settings.beside) if settings.beside else None
    root = Path(settings.directory)
    runs = run_folders(root)
    summaries = {}
    for run in runs:
        summaries[run.name] = summarise_run(
            run,
            latents=settings.latents,
            policy=settings.policy,
            resamples=settings.resamples,
            seed=settings.seed,
        )
        apart = "" if settings.policy in (None, own_policy(run)) else str(settings.policy)
        written = write_summary(run, summaries[run.name], row, apart)
    summary = summaries[runs[0].name]
    if runs != [root]:
        summary = aggregate(summaries)
        written = write_summary(root, summary, row, apart)
    return Score(summary, list(written), row)


@dataclass(frozen=True)
class CompareSettings:
    """Which two runs to compare, and how.

    Args:
        run_a: Folder of the first run.
        run_b: Folder of the second run.
        policy: Read every answer of both runs again under this policy.
        resamples: Bootstrap resamples.
        seed: Seed of the bootstrap.
    """

    run_a: str | Path
    run_b: str | Path
    policy: str | None = None
    resamples: int = 2000
    seed: int = 0


def compare_runs(settings: CompareSettings) -> dict[str, Any]:
    """`compare` over the folders of two runs, with ``first_run`` and ``second_run``."""
    _check(settings.resamples)
    first, second = Path(settings.run_a), Path(settings.run_b)
    result = compare(
        predictions_of(first),
        predictions_of(second),
        first_latents=record_of(first).get("latents"),
        second_latents=record_of(second).get("latents"),
        policy=settings.policy,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    return {"first_run": str(first), "second_run": str(second), **result}


def _check(resamples: int) -> None:
    if resamples < 1:
        raise UserError(f"--resamples is {resamples}: at least 1 is needed")


def run_folders(root: Path) -> list[Path]:
    """``root`` itself where it holds predictions, else those of its subfolders that do."""
    if not root.is_dir():
        raise UserError(f"{root}: not a folder; give the folder of an evaluation")
    if any(root.glob(_PATTERN)):
        return [root]
    found = sorted(folder for folder in root.iterdir() if folder.is_dir() and any(folder.glob(_PATTERN)))
    if not found:
        raise UserError(f"{root}: no {PREDICTIONS} in it or in its subfolders; run an evaluation first")
    return found


def predictions_of(run: Path) -> Iterator[Prediction]:
    """Predictions of a run, all its shards together."""
    files = sorted(run.glob(_PATTERN)) if run.is_dir() else []
    if not files:
        raise UserError(f"{run}: no {PREDICTIONS} in it; give the folder of one evaluation")
    names = record_of(run).get("renamed") or {}
    for file in files:
        for row in read_predictions(file):
            yield replace(row, bench=names[row.bench]) if row.bench in names else row


def own_policy(run: Path) -> str | None:
    """The policy that the answers of a run were read under when they came; None where there are several."""
    found = {row.policy for row in predictions_of(run)}
    return found.pop() if len(found) == 1 else None


def record_of(run: Path) -> dict[str, Any]:
    """What scoring needs of eval.json; empty where there is no such file.

    ``latents`` and ``expected`` as the run wrote them, ``renamed`` (names of earlier versions to those of today), and
    ``sets`` (name to the reason why its questions are not the published set, or '').
    """
    if not (run / RECORD).is_file():
        return {}
    record = read_record(run)
    benches, sets = record.get("benches", {}), record.get("sets", {})
    names = renamed(benches, sets)
    return {
        "latents": record.get("responder", {}).get("latents"),
        "expected": {names.get(name, name): count for name, count in record.get("expected", {}).items()},
        "renamed": names,
        "sets": record_sets({names.get(name, name): facts for name, facts in benches.items()}, sets),
    }


def summarise_run(
    run: str | Path,
    *,
    latents: int | None = None,
    policy: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """`scoring.summarise` over a run's folder, with what its eval.json says."""
    run = Path(run)
    record = record_of(run)
    summary = summarise(
        predictions_of(run),
        trained_latents=record.get("latents") if latents is None else latents,
        policy=policy,
        resamples=resamples,
        seed=seed,
        expected=record.get("expected"),
        sets=record.get("sets"),
    )
    if not summary["benches"] and not summary["without_own_latents"]:
        raise UserError(f"{run}: its predictions are empty; run the evaluation again, it continues where it stopped")
    return summary
