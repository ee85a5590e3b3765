"""``realvr benchmarks``: which benchmarks there are, what their files look like, how they are scored."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Annotated

import tyro

from realvr.errors import UserError
from realvr.evaluation import benchmark_tables as tables
from realvr.evaluation.benchmark import BENCHMARKS


@dataclass(frozen=True)
class BenchmarksCommand:
    """Options of ``realvr benchmarks``.

    Args:
        name: Name of one benchmark.
        json: Print JSON: one object, or a list of all.
        markdown: Print the tables of docs/evaluation.md.
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    json: bool = False
    markdown: bool = False


def benchmarks(settings: BenchmarksCommand) -> int:
    """List the benchmarks, or say everything about one: files, rows, scoring rule, licence, citation.

    Nothing is downloaded: fetch the files yourself and hand their path to realvr eval. Any other file that realvr data
    check reads can be evaluated too, under a name of your own. --plugin FILE.py adds a benchmark of your own
    (docs/evaluation.md).

    Examples:
      realvr benchmarks
      realvr benchmarks blink
      realvr benchmarks mmvp --json
    """
    if settings.json and settings.markdown:
        raise UserError("--json and --markdown are two ways to print: choose one")
    one = BENCHMARKS.get(settings.name) if settings.name else None
    if settings.json:
        shown = one.describe() if one else [bench.describe() for bench in BENCHMARKS]
        print(json_module.dumps(shown, indent=2, ensure_ascii=False))
    elif settings.markdown:
        print(tables.markdown())
    else:
        from rich.console import Console

        console = Console(soft_wrap=False, highlight=False)
        console.print(*([tables.everything(one)] if one else tables.overview(BENCHMARKS)), sep="\n")
        console.print(tables.closing(one), soft_wrap=True, markup=False)
    return 0
