"""``realvr eval``: checkpoints on benchmarks, with the ablations of the span, resumable."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from realvr.cli.arguments import Policy
from realvr.evaluation import checkpoints, tables
from realvr.evaluation.settings import EvaluateSettings, written_out
from realvr.runs.launching import INTERRUPTED, ProcessFailed

rewrite = written_out


@dataclass(frozen=True)
class EvaluateCommand(EvaluateSettings):
    """Options of ``realvr eval``."""

    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL…", help_behavior_hint="(required)")
    ]
    out: Path
    bench: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=PATH", help_behavior_hint="(required; may be repeated)"),
    ] = ()
    images: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=DIR", help_behavior_hint="(may be repeated)"),
    ] = ()
    tasks: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=SUBTASKS", help_behavior_hint="(may be repeated)"),
    ] = ()
    variant: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=VARIANT", help_behavior_hint="(may be repeated)"),
    ] = ()
    policy: Policy = None


def evaluate(settings: EvaluateCommand) -> int:
    """Evaluate one or more checkpoints on benchmarks.

    Every question is asked with the model's own latents; unless --no-ablation is given also without a span (K = 0),
    with the mean latents of the benchmark, with those of another question, and with noise of the same norms. Answers
    are kept as they come: the same command goes on where a run was stopped. Several checkpoints, for instance of
    several training seeds, are evaluated one after the other, each in a folder of its own under OUT, and summarised as
    mean ± std.

    Examples:
      realvr eval runs/rl/final --bench mmvp=data/MMVP --bench blink=data/BLINK --out runs/eval
      realvr eval runs/rl/final --bench hrbench-4k=hr_bench_4k.tsv --latents 0,2,4,8,12,16,20 --out runs/sweep
      realvr eval runs/seed0/final runs/seed1/final runs/seed2/final --bench mmvp=data/MMVP --out runs/three
      realvr eval Qwen/Qwen2.5-VL-7B-Instruct --latents 0 --bench mine=questions.jsonl --limit 100 --out runs/base
    """
    try:
        done = checkpoints.evaluate(settings)
    except ProcessFailed as failure:
        return failure.code
    except KeyboardInterrupt:
        kept = f"what was answered is kept in {settings.out}, and the same command goes on from there"
        print(f"realvr: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    console = tables.wide_console()
    for name, summary in done.summaries.items():
        if done.together:
            console.print(name, style="bold", markup=False)
        console.print(tables.console(summary))
    if done.together:
        console.print(tables.console(done.together))
    if done.summaries:
        print(settings.out / "summary.md")
    return 0
