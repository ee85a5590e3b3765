"""``realvr diagnose``, ``counterfactual``, ``exchange`` and ``steer``: questions asked of a latent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.counterfactual import Counterfactual, CounterfactualSettings
from realvr.diagnostics.distances import Distances
from realvr.diagnostics.exchange import Exchange, ExchangeSettings
from realvr.diagnostics.run import diagnose as run
from realvr.diagnostics.settings import DiagnoseSettings, settings_of
from realvr.diagnostics.steer import Steer, SteerSettings
from realvr.evaluation.processes import ProcessFailed
from realvr.evaluation.tables import wide_console

INTERRUPTED = 130
_REQUIRED = "(required)"
_EXAMPLES = """\
Examples:
  realvr diagnose distances runs/model runs/world/counterfactual/samples.jsonl --out runs/distances
  realvr diagnose grounding mini runs/world/validation/samples.jsonl --out runs/grounding --limit 100"""
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint=_REQUIRED)]
Data = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA", help_behavior_hint=_REQUIRED)]


@dataclass(frozen=True)
class DiagnoseCommand(DiagnoseSettings):
    """Options that every diagnostic has."""

    model: Model
    data: Data
    out: Path


@dataclass(frozen=True)
class CounterfactualCommand(DiagnoseCommand):
    """Options of ``realvr counterfactual``.

    Args:
        distances: Also measure how far the edit moves the latent span.
    """

    own: tyro.conf.OmitArgPrefixes[CounterfactualSettings] = CounterfactualSettings()
    distances: bool = True
    second_model: tyro.conf.Suppress[str | None] = None


def counterfactual(settings: CounterfactualCommand) -> int:
    """Ask a model about original and edited pictures and count how its answers follow the edit.

    Writes counterfactual.jsonl (every answer) and distances.jsonl as it goes, then the tables counterfactual.json, .md
    and .csv. The same command again continues where a run was stopped; another protocol adds to the same folder.

    Examples:
      realvr world make runs/world --split counterfactual
      realvr counterfactual runs/model runs/world/counterfactual/samples.jsonl --out runs/pairs
      realvr counterfactual runs/direct pairs.jsonl --out runs/direct-pairs --latents 0 --protocol separate
    """
    chosen: list[Diagnostic] = [Counterfactual(settings.own), *([Distances()] if settings.distances else [])]
    return _run(chosen, settings, "counterfactual")


@dataclass(frozen=True)
class ExchangeCommand(DiagnoseCommand):
    """Options of ``realvr exchange``."""

    own: tyro.conf.OmitArgPrefixes[ExchangeSettings] = ExchangeSettings()
    second_model: tyro.conf.Suppress[str | None] = None


def exchange(settings: ExchangeCommand) -> int:
    """Swap latents between the two views of a pair and see whether the answer follows them.

    Picture, question and the other latents stay those of the recipient. Writes exchange.jsonl (every answer) as it
    goes, then the tables exchange.json, .md and .csv. The same command again continues where a run was stopped.

    Examples:
      realvr exchange runs/model runs/world/counterfactual/samples.jsonl --out runs/exchange
      realvr exchange runs/model pairs.jsonl --out runs/exchange --k 1,2,4 --seeds 5 --limit 100
      realvr exchange mini runs/world/trails-pairs/samples.jsonl --out runs/exchange --from-step 2,4,6,8
    """
    return _run([Exchange(settings.own)], settings, "exchange")


@dataclass(frozen=True)
class SteerCommand(DiagnoseCommand):
    """Options of ``realvr steer``."""

    own: tyro.conf.OmitArgPrefixes[SteerSettings] = SteerSettings()
    second_model: tyro.conf.Suppress[str | None] = None


def steer(settings: SteerCommand) -> int:
    """Move a latent to another place of the picture and see whether the model goes on from there.

    z_t is replaced by the visual token of an arrow off the question's own trail; the recurrence goes on by itself.
    Writes steer.jsonl (every answer) as it goes, then the tables steer.json, .md and .csv. The same command again
    continues where a run was stopped; other steps add to the same folder.

    Examples:
      realvr world make runs/world --split trails
      realvr steer mini runs/world/trails/samples.jsonl --at 2,4,6 --out runs/steer
      realvr steer runs/model runs/world/trails/samples.jsonl --at 3 --out runs/steer --limit 200
    """
    return _run([Steer(settings.own)], settings, "steer")


def diagnose(args: Sequence[str]) -> int:
    """Run a diagnostic on a model: realvr diagnose NAME MODEL DATA --out DIR. Without a name, list them."""
    if not args or args[0] in ("-h", "--help"):
        print(listed())
        return 0
    kind = DIAGNOSTICS.get(args[0])
    text = f"{kind.question} {kind.reading}\n\nNeeds {kind.needs}. The same command again continues a run."
    prog = f"realvr diagnose {kind.name}"
    settings: Any = tyro.cli(options_of(kind), prog=prog, description=text, args=list(args[1:]))
    return _run([kind(settings.own)], settings, "diagnose")


def options_of(kind: type[Diagnostic]) -> type[DiagnoseCommand]:
    """The options that every diagnostic has, and its own."""
    own = Annotated[kind.Settings, tyro.conf.OmitArgPrefixes]  # type: ignore[name-defined]
    fields = [("own", own, field(default_factory=kind.Settings))]
    return make_dataclass("Options", fields, bases=(DiagnoseCommand,), frozen=True)


def listed() -> str:
    """All diagnostics, as text."""
    lines = ["usage: realvr diagnose NAME MODEL DATA --out DIR [options]", "", "diagnostics:"]
    width = max(len(name) for name in DIAGNOSTICS.names())
    for kind in DIAGNOSTICS:
        paper = "the paper has a value" if kind.paper else "no value in the paper"
        lines.append(f"  {kind.name:<{width}}  {kind.question} Needs {kind.needs}; {paper}.")
    lines += ["", "realvr diagnose NAME --help explains each. --plugin FILE.py adds one of your own."]
    return "\n".join([*lines, "", _EXAMPLES])


def _run(diagnostics: Sequence[Diagnostic], settings: DiagnoseCommand, verb: str) -> int:
    """Run, then print the table of the first."""
    try:
        summaries = run(diagnostics, settings_of(settings), verb)
    except ProcessFailed as failure:
        return failure.code
    except KeyboardInterrupt:
        kept = f"what was measured is kept in {settings.out}, and the same command goes on from there"
        print(f"realvr: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    if diagnostics[0].name in summaries:
        _show(*diagnostics[0].table(summaries[diagnostics[0].name], settings.model), settings)
    return 0


def _show(header: Sequence[str], rows: Sequence[Sequence[str]], settings: DiagnoseCommand) -> None:
    console = wide_console()
    table = Table(title=settings.model)
    for place, name in enumerate(header):
        word = max(map(len, name.split()))
        table.add_column(name, no_wrap=place < 2, overflow="fold", min_width=word)  # words and names of rows stay whole
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"written to {settings.out}", highlight=False, soft_wrap=True)
