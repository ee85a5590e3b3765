"""``realvr benchmarks``: which benchmarks there are, what their files look like, how they are scored."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Annotated, Any

import tyro

from realvr.evaluation.catalog import CATALOG, Benchmark, benchmark_named


def benchmarks(
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None, json: bool = False
) -> int:
    """List the benchmarks, or say everything about one: files, rows, scoring rule, licence, citation.

    Nothing is downloaded: fetch the files yourself and hand their path to realvr eval. Any other file that realvr data
    check reads can be evaluated too, under a name of your own.

    Examples:
      realvr benchmarks
      realvr benchmarks blink
      realvr benchmarks mmvp --json

    Args:
        name: Name of one benchmark.
        json: Print JSON: one object, or a list of all.
    """
    chosen = [benchmark_named(name)] if name else list(CATALOG.values())
    if json:
        found = [_facts(bench) for bench in chosen]
        print(json_module.dumps(found[0] if name else found, indent=2, ensure_ascii=False))
        return 0
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    if name:
        _print_one(console, chosen[0])
    else:
        _print_all(console, chosen)
    return 0


def _facts(bench: Benchmark) -> dict[str, Any]:
    return asdict(bench) | {"example": bench.example}


def _print_all(console: Any, chosen: list[Benchmark]) -> None:
    from rich.table import Table

    table = Table("name", "questions")
    for title in ("files", "scored by"):
        table.add_column(title, overflow="fold")
    for bench in chosen:
        table.add_row(bench.name, f"{bench.rows:,}", " or ".join(bench.layout), bench.rule)
    console.print(table)
    console.print("realvr benchmarks NAME says more. To evaluate several at once:")
    console.print("  realvr eval MODEL --bench mmvp=PATH --bench blink=PATH --out runs/eval", soft_wrap=True)


def _print_one(console: Any, bench: Benchmark) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=bench.title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("questions", f"{bench.rows:,}")
    table.add_row("files", escape(" or ".join(bench.layout)))
    table.add_row("where", escape(bench.where))
    table.add_row("licence", escape(bench.licence))
    table.add_row("scored by", escape(bench.rule))
    if bench.tasks:
        table.add_row("subtasks", escape(", ".join(bench.tasks)))
    for number, caveat in enumerate(bench.caveats):
        table.add_row("" if number else "mind", escape(caveat))
    console.print(table, "")
    console.print(escape(bench.example), "", escape(bench.citation), sep="\n", soft_wrap=True)
