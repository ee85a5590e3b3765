"""``realvr score`` and ``realvr compare``: numbers from the predictions of finished runs, without a model."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from realvr.cli.arguments import Policy
from realvr.evaluation import finished, tables


@dataclass(frozen=True)
class ScoreCommand(finished.ScoreSettings):
    """Options of ``realvr score``.

    Args:
        json: Print the summary as JSON instead of tables.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    json: bool = False
    policy: Policy = None


def score(settings: ScoreCommand) -> int:
    """Score a finished or interrupted evaluation again, from its predictions alone.

    Writes summary.json, summary.md and summary.csv into DIR; under another policy than the run's own
    summary.POLICY.json, .md and .csv beside them. A folder whose subfolders hold predictions, one per checkpoint, gets
    a summary in each and their mean and standard deviation in its own.

    Examples:
      realvr score runs/eval
      realvr score runs/eval --policy vlmevalkit
      realvr score runs/eval --beside ReaLVR@Qwen2.5-VL-7B
    """
    done = finished.score(settings)
    if settings.json:
        print(json_module.dumps(done.summary, ensure_ascii=False))
    else:
        tables.wide_console().print(tables.console(done.summary, done.beside))
        print(f"wrote {', '.join(map(str, done.written))}")
    return 0


@dataclass(frozen=True)
class CompareCommand(finished.CompareSettings):
    """Options of ``realvr compare``.

    Args:
        json: Print one JSON object instead of a table.
    """

    run_a: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_A")]
    run_b: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_B")]
    json: bool = False
    policy: Policy = None


def compare(settings: CompareCommand) -> int:
    """Compare two evaluations question by question: difference B - A, its interval, McNemar's exact test.

    Only questions that both runs answered count; the others are counted and said. Each model answers with its own
    latents at its trained K.

    Examples:
      realvr compare runs/lvr runs/realvr
      realvr compare runs/lvr runs/realvr --policy strict --json
    """
    result = finished.compare_runs(settings)
    if settings.json:
        print(json_module.dumps(result, ensure_ascii=False))
    else:
        names = (Path(run).name or run for run in (settings.run_a, settings.run_b))
        tables.wide_console().print(tables.comparison(result, *names))
    return 0
