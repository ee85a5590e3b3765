"""Lists of the registered benchmarks: for the console, and for docs/evaluation.md. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from realvr.evaluation.benchmark import BENCHMARKS, Benchmark, eval_command
from realvr.evaluation.rules import PLAIN

if TYPE_CHECKING:
    from rich.console import RenderableType


def overview(benches: Iterable[type[Benchmark]]) -> list[RenderableType]:
    """All benchmarks in one table, as rich renderables."""
    from rich.table import Table

    table = Table("name", "questions")
    for heading in ("files", "scored by"):
        table.add_column(heading, overflow="fold")
    for bench in benches:
        table.add_row(bench.name, f"{bench.facts.rows:,}", " or ".join(bench.facts.layout), bench.facts.scored_by)
    return [table, "realvr benchmarks NAME says more. To evaluate several at once:"]


def everything(bench: type[Benchmark]) -> RenderableType:
    """All facts about one benchmark, as a rich renderable."""
    from rich.markup import escape
    from rich.table import Table

    facts = bench.facts
    lines = [("questions", f"{facts.rows:,}"), ("files", " or ".join(facts.layout)), ("where", facts.where)]
    lines += [("licence", facts.licence), ("scored by", facts.scored_by)]
    official = f"; official: {bench.official_policy}" if bench.official_policy else ""
    lines += [("answers read by", bench.policy + official)]
    lines += [("subtasks", ", ".join(facts.tasks))] if facts.tasks else []
    lines += [("variant", f"{name}: {what}") for name, what in bench.variants.items()]
    lines += [("stand-in", f"realvr world make OUT --split {bench.stand_in}")] if bench.stand_in else []
    lines += [("" if number else "mind", caveat) for number, caveat in enumerate(facts.caveats)]
    table = Table(title=escape(bench.title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, escape(text))
    return table


def closing(bench: type[Benchmark] | None) -> str:
    """What is printed below: a command line, and what to cite."""
    if bench is None:
        return f"  {eval_command(out='runs/eval')}"
    return f"\n{eval_command([bench.name], f'runs/{bench.name}')}\n\n{bench.facts.citation}"


def markdown() -> str:
    """Both tables of docs/evaluation.md, as `realvr benchmarks --markdown` prints them."""
    return f"{files_table()}\n\n{rules_table()}"


def files_table() -> str:
    """Which benchmarks there are and what their files are."""
    rows = [[f"`{b.name}`", " or ".join(b.facts.layout), _questions(b), b.rule.headline] for b in BENCHMARKS]
    rows.append(["`mini-` and one of these", "what `realvr world make` writes in that layout", "", "as that one"])
    rows.append(["any other name", "whatever `realvr data check` reads", "", PLAIN.headline])
    return _table(["name", "files", "questions", "headline"], rows)


def rules_table() -> str:
    """How they are scored."""
    rows = [[f"`{b.name}`", b.rule.metric, b.rule.beside, b.rule.draws, _mean(b)] for b in BENCHMARKS]
    rows.append(["any other name", PLAIN.metric, PLAIN.beside, PLAIN.draws, ""])
    return _table(["benchmark", "metric", "beside it (`metrics`)", "the bootstrap draws", "five-task mean"], rows)


def _mean(bench: type[Benchmark]) -> str:
    """Whether its score enters the mean."""
    if not bench.slot:
        return ""
    first = next(other for other in BENCHMARKS if other.slot == bench.slot)
    return "yes" if first is bench else f"where `{first.name}` is missing"


def _questions(bench: type[Benchmark]) -> str:
    facts = bench.facts
    if not facts.tasks or facts.task_rows is None:
        return f"{facts.rows:,}"
    whole = f"`--tasks {bench.name}=all`: {sum(facts.task_rows.values()):,}"
    return f"{facts.rows:,}: {len(facts.tasks)} of {len(facts.task_rows)} subtasks; {whole}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace(" <", " \\<") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
