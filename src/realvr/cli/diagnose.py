"""``realvr diagnose``, ``counterfactual``, ``exchange`` and ``steer``: questions asked of a latent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.card import HTML
from realvr.diagnostics.counterfactual import Counterfactual, CounterfactualSettings
from realvr.diagnostics.distances import Distances
from realvr.diagnostics.exchange import Exchange, ExchangeSettings
from realvr.diagnostics.run import diagnose as run
from realvr.diagnostics.settings import DiagnoseSettings, settings_of
from realvr.diagnostics.steer import Steer, SteerSettings
from realvr.diagnostics.suite import ALL, Outcome, Suite, SuiteOverview, run_suite
from realvr.errors import UserError
from realvr.evaluation.tables import wide_console
from realvr.runs.launching import INTERRUPTED, ProcessFailed
from realvr.runs.options import parse

_REQUIRED = "(required)"
_EXAMPLES = """\
Examples:
  realvr diagnose mini --against mini-direct --data runs/world/trails-pairs/samples.jsonl --out runs/diagnosed
  realvr diagnose mini --data runs/world/trails/samples.jsonl --tests dependence,controls --out runs/two
  realvr diagnose distances runs/model runs/world/counterfactual/samples.jsonl --out runs/distances
  realvr diagnose grounding mini runs/world/validation/samples.jsonl --out runs/grounding --limit 100"""
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint=_REQUIRED)]
Data = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA", help_behavior_hint=_REQUIRED)]
Repeated = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""An option that takes several values and can be repeated: nothing that was given is lost."""


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


@dataclass(frozen=True)
class SuiteCommand(DiagnoseSettings):
    """Options of ``realvr diagnose MODEL --tests …``.

    Args:
        against: Further models, measured alike and shown side by side.
        data: File or folder with samples. Of counterfactual pairs, tests on samples take the original pictures.
        tests: Names separated by commas, or all.
        limit: At most so many samples for each test; of pairs, so many of each edit. By default what suits the test.
        set: A setting of one test. Several values of one setting are separated by commas.
        card: Also write card.html and card.md of every model: its verdict, numbers and six figures on one page.
    """

    model: Model
    data: Path
    out: Path
    tests: str = ALL
    against: Annotated[Repeated, tyro.conf.arg(metavar="MODEL")] = ()
    set: Annotated[Repeated, tyro.conf.arg(metavar="NAME.SETTING=VALUE")] = ()
    card: bool = False

    def suite(self) -> Suite:
        """As the library takes it."""
        options: dict[str, dict[str, Any]] = {}
        for text in chain(*self.set):
            name, dot, setting = text.partition("=")[0].partition(".")
            if not dot or "=" not in text:
                raise UserError(f"--set {text}: write NAME.SETTING=VALUE, such as steer.at=2,4")
            options.setdefault(name, {})[setting.replace("-", "_")] = text.partition("=")[2]
        tests = tuple(name.strip() for name in self.tests.split(",") if name.strip())
        return Suite(settings_of(self), tests, tuple(chain(*self.against)), options, self.card)


def suite(args: Sequence[str]) -> int:
    """Several tests on one model or several."""
    text = (
        "Ask a model, or several side by side, what its latents do. Each test writes NAME.json, .md, .csv, .svg and "
        ".png; what was skipped and why is in diagnose.json. The same command again continues a run.\n\n"
        f"Tests: {', '.join(DIAGNOSTICS.names())}.\n\n{_EXAMPLES}"
    )
    prog = (
        "realvr diagnose" if args[0].startswith("-") else "realvr diagnose MODEL"
    )  # tyro's usage leaves out a given one
    settings = parse(SuiteCommand, as_suite(args), prog, text)
    return _guarded(lambda: show_overview(run_suite(settings.suite()), settings), settings)


def show_overview(overview: SuiteOverview | None, settings: SuiteCommand) -> None:
    """What became of every test, one column per model."""
    if overview is None:
        return
    console, table = wide_console(), Table(title=f"{settings.data}")
    table.add_column("test", no_wrap=True)
    for name in overview["models"]:
        table.add_column(name, overflow="fold")
    for test, outcomes in overview["tests"].items():
        table.add_row(test, *(_outcome(outcomes.get(name)) for name in overview["models"]))
    console.print(table)
    for name, sentence in overview["verdicts"].items():
        console.print(f"[bold]{name}[/bold]: {sentence}", highlight=False, soft_wrap=True)
    for folder in overview["models"].values() if settings.card else ():
        console.print(f"card of the latents: {Path(folder) / HTML}", highlight=False, soft_wrap=True)
    console.print(
        f"written to {settings.out}; realvr report {settings.out} --out {settings.out}/report makes a page of it",
        highlight=False,
        soft_wrap=True,
    )


def _outcome(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome["status"] != "measured":
        return f"skipped: {outcome['reason']}"
    memory = "" if outcome["peak_gib"] is None else f", {outcome['peak_gib']:.1f} GiB"
    return f"{outcome['examples']:,} in {outcome['seconds']:.1f} s{memory}"


def diagnose(args: Sequence[str]) -> int:
    """Run diagnostics on a model: realvr diagnose MODEL --data DATA --out DIR, or one of them with its own options:
    realvr diagnose NAME MODEL DATA --out DIR. Without a name, list them."""
    if not args or list(args) in (["-h"], ["--help"]):
        print(listed())
        return 0
    if is_suite(args):
        return suite(args)
    kind = DIAGNOSTICS.get(args[0])
    text = f"{kind.question} {kind.reading}\n\nNeeds {kind.needs}. The same command again continues a run."
    prog = f"realvr diagnose {kind.name}"
    settings: Any = parse(options_of(kind), as_settings(kind, args[1:]), prog, text)
    return _run([kind(settings.own)], settings, "diagnose")


def as_settings(kind: type[Diagnostic], args: Sequence[str]) -> list[str]:
    """``--latents evidence`` is the setting ``length`` of a diagnostic that has one; every other word stays."""
    return _of_evidence(args, [kind], lambda one: ["--length", "evidence"])


def as_suite(args: Sequence[str]) -> list[str]:
    """The same for several tests: ``--latents evidence`` sets ``length`` of those of ``--tests`` that have it."""
    words = _split(args, "--tests")
    named = [name for place, word in enumerate(words[:-1]) if word == "--tests" for name in words[place + 1].split(",")]
    chosen = {name.strip() for name in named} or {ALL}
    kinds = [kind for kind in DIAGNOSTICS if ALL in chosen or kind.name in chosen]
    if len(kinds) < len(chosen):
        return list(args)  # a name that there is not: the suite says so
    return _of_evidence(args, kinds, lambda one: ["--set", f"{one.name}.length=evidence"])


def _split(args: Sequence[str], option: str) -> list[str]:
    """The words with ``OPTION=VALUE`` as two."""
    return [part for word in args for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]


def _of_evidence(
    args: Sequence[str], kinds: Sequence[type[Diagnostic]], setting: Callable[[type[Diagnostic]], list[str]]
) -> list[str]:
    """The words with a setting of each diagnostic that has such a length instead of ``--latents evidence``."""
    found = _split(args, "--latents")
    places = [place for place in range(len(found) - 1) if found[place : place + 2] == ["--latents", "evidence"]]
    instead = [word for kind in kinds if _has_length(kind) for word in setting(kind)]
    if places and not instead:
        able = ", ".join(kind.name for kind in DIAGNOSTICS if _has_length(kind))
        asked = ", ".join(kind.name for kind in kinds)
        raise UserError(f"--latents evidence: only {able} take as many latents as evidence tokens, not {asked}")
    for place in reversed(places):
        found[place : place + 2] = instead
    return found


def _has_length(kind: type[Diagnostic]) -> bool:
    return "length" in kind.Settings.model_fields


def is_suite(args: Sequence[str]) -> bool:
    """Whether a model comes first and not a diagnostic: only then are data and tests options."""
    if not args or args[0] in DIAGNOSTICS.names():
        return False
    named = any(word.split("=")[0] in ("--data", "--tests", "--against") for word in args)
    return named or any(word.startswith("-") for word in args[1:2])  # a diagnostic has its model as second word


def options_of(kind: type[Diagnostic]) -> type[DiagnoseCommand]:
    """The options that every diagnostic has, and its own."""
    own = Annotated[kind.Settings, tyro.conf.OmitArgPrefixes]  # type: ignore[name-defined]
    fields = [("own", own, field(default_factory=kind.Settings))]
    return make_dataclass("Options", fields, bases=(DiagnoseCommand,), frozen=True)


def listed() -> str:
    """All diagnostics, as text."""
    lines = [
        "usage: realvr diagnose MODEL [--against OTHER ...] --data DATA [--tests NAME,...] --out DIR [options]",
        "       realvr diagnose NAME MODEL DATA --out DIR [options of one diagnostic]",
        "",
        "diagnostics:",
    ]
    width = max(len(name) for name in DIAGNOSTICS.names())
    for kind in DIAGNOSTICS:
        paper = "the paper has a value" if kind.paper else "no value in the paper"
        lines.append(f"  {kind.name:<{width}}  {kind.question} Needs {kind.needs}; {paper}.")
    lines += [
        "",
        "realvr diagnose MODEL --help lists the options of several tests: --limit, --set, --card and others.",
        "realvr diagnose NAME --help explains each test. --plugin FILE.py adds one of your own.",
    ]
    return "\n".join([*lines, "", _EXAMPLES])


def _run(diagnostics: Sequence[Diagnostic], settings: DiagnoseCommand, verb: str) -> int:
    """Run, then print the table of the first."""

    def measure() -> None:
        summaries = run(diagnostics, settings_of(settings), verb)
        if diagnostics[0].name in summaries:
            _show(
                *diagnostics[0].table(summaries[diagnostics[0].name], settings.model), settings, diagnostics[0].legend
            )

    return _guarded(measure, settings)


def _guarded(work: Callable[[], None], settings: DiagnoseSettings) -> int:
    try:
        work()
    except ProcessFailed as failure:
        return failure.code
    except KeyboardInterrupt:
        kept = f"what was measured is kept in {settings.out}, and the same command goes on from there"
        print(f"realvr: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _show(header: Sequence[str], rows: Sequence[Sequence[str]], settings: DiagnoseCommand, legend: str) -> None:
    console = wide_console()
    table = Table(title=settings.model)
    for place, name in enumerate(header):
        word = max(map(len, name.split()))
        table.add_column(name, no_wrap=place < 2, overflow="fold", min_width=word)  # words and names of rows stay whole
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if legend:
        console.print(legend, highlight=False, soft_wrap=True)
    console.print(f"written to {settings.out}", highlight=False, soft_wrap=True)
