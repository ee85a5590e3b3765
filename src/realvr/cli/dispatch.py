"""The command line: a table of verbs, each imported only when it is used.

Adding a verb means adding a line to ``COMMANDS`` and a function of a settings dataclass, whose fields are its options.
Nothing is imported here that needs torch, so help and the data commands answer at once.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from realvr import __version__
from realvr.errors import UserError
from realvr.runs.guard import guarded


class Command(NamedTuple):
    """Where a verb is: imported only when it is called, so that ``--help`` needs no torch."""

    module: str
    function: str
    summary: str
    raw: bool = False
    """The function takes the list of arguments as it is: its options are not known before it has read a file."""
    rewrite: str = ""
    """A function of the module that the arguments pass first."""


COMMANDS: dict[str, Command] = {
    "env": Command("realvr.cli.env", "env", "Versions, devices and engines found on this machine."),
    "new": Command("realvr.cli.new", "new", "Make a small random model of any family, to dry-run everything."),
    "ask": Command("realvr.cli.ask", "ask", "Ask a model a question about one or more images."),
    "data check": Command("realvr.cli.data", "check", "Read everything, open every image, say what is usable."),
    "data show": Command("realvr.cli.data", "show", "Print normalised samples; draw boxes and visual tokens."),
    "data export": Command("realvr.cli.data", "export", "Convert between our JSONL and the training formats."),
    "data import": Command("realvr.cli.data_import", "import_boxes", "COCO or VOC boxes as our JSONL, with questions."),
    "world make": Command("realvr.cli.world", "make", "Draw splits of the synthetic world, in the real layouts."),
    "world show": Command("realvr.cli.world", "show", "A contact sheet of scenes with questions and boxes."),
    "train sft": Command("realvr.cli.train", "sft", "Stage 1: latents reconstruct visual evidence.", raw=True),
    "train rl": Command("realvr.cli.train", "rl", "Stage 2: LVR-RL, ReaLVR and its ablations.", raw=True),
    "train base": Command("realvr.cli.train", "base", "Train all parameters of a small model.", raw=True),
    "plan": Command(
        "realvr.cli.plan", "plan", "Does a training fit, on how many GPUs, and how long is a step?", rewrite="rewrite"
    ),
    "eval": Command(
        "realvr.cli.eval", "evaluate", "Checkpoints on benchmarks, span ablations included.", rewrite="rewrite"
    ),
    "benchmarks": Command("realvr.cli.benchmarks", "benchmarks", "Files, rules and citations of each."),
    "counterfactual": Command("realvr.cli.diagnose", "counterfactual", "Do answers follow edits of the picture?"),
    "exchange": Command("realvr.cli.diagnose", "exchange", "Do answers follow latents swapped in a pair?"),
    "steer": Command("realvr.cli.diagnose", "steer", "Does the model go on from where a latent was moved to?"),
    "diagnose": Command("realvr.cli.diagnose", "diagnose", "Any diagnostic; without a name, the list.", raw=True),
    "score": Command("realvr.cli.score", "score", "Scores with intervals from saved predictions."),
    "compare": Command("realvr.cli.score", "compare", "Two evaluations, question by question."),
    "report": Command("realvr.cli.report", "report", "A page with tables and figures from saved results."),
    "push": Command("realvr.cli.push", "push", "Upload a model with its card to the hub."),
    "demo": Command("realvr.cli.demo", "demo", "Train and compare small models here, and write a report."),
}

_EXAMPLES = """\
examples:
  realvr env
  realvr new --family qwen3-vl --size tiny runs/tiny
  realvr ask runs/tiny photo.png "What colour is the circle?" --latents 4
  realvr ask --help"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. 2 means that the input was wrong, and one line on stderr says what."""
    args = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(args))


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"realvr {__version__}")
        return 0
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            return _run(name, args[words:])
    group = [name for name in COMMANDS if name.startswith(args[0] + " ")]
    if group:
        if len(args) == 1 or args[1] in ("-h", "--help"):
            print(_help(group))
            return 0
        raise UserError(f"'{' '.join(args[:2])}' is not a command; commands: {', '.join(group)}")
    if args[0].startswith("-"):
        raise UserError(f"{args[0]}: options stand after the command (realvr --help lists the commands)")
    close = get_close_matches(args[0], COMMANDS, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise UserError(f"'{args[0]}' is not a command{hint} (realvr --help lists them)")


def _run(name: str, args: list[str]) -> int:
    for flag, value in pairwise([*args, "-"]):
        if flag in ("--out=", "--run.out=") or (flag in ("--out", "--run.out") and not value.strip()):
            # A shell variable that is not set: as a path it would be the folder one happens to be in.
            raise UserError(f"{flag.rstrip('=')} is empty: name a folder (. is the one you are in)")
    args = _plugins(args)
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    function = getattr(module, command.function)
    args = getattr(module, command.rewrite)(args) if command.rewrite else args
    if command.raw:
        return int(function(args) or 0)
    from realvr.runs.options import parse

    text = inspect.getdoc(function) or command.summary  # shown as it stands, examples included
    options = settings_type(function)
    assert options is not None, f"{name} has no settings class"
    settings = parse(options, args, f"realvr {name}", text)
    return int(function(settings) or 0)


def settings_type(function: Callable[..., int]) -> type[Any] | None:
    """The dataclass whose fields are the options of a verb."""
    kinds = [kind for name, kind in get_type_hints(function).items() if name != "return"]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def _plugins(args: list[str]) -> list[str]:
    """Load what ``--plugin FILE.py`` names, for every verb; the other arguments."""
    files, kept, rest = [], [], iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag != "--plugin":
            kept.append(arg)
            continue
        file = value if equals else next(rest, "")
        if not file.strip():
            raise UserError("--plugin needs a Python file with a method, a benchmark or a diagnostic")
        files.append(file)
    if files:
        from realvr.registry import use_plugins

        use_plugins(files)
    return kept


def _help(names: Sequence[str] | None = None) -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names or COMMANDS]
    head = (
        f"realvr {__version__}: latent visual reasoning in vision-language models\n\nusage: realvr COMMAND [options]\n"
    )
    return "\n".join([head, "commands:", *lines, "", _EXAMPLES if names is None else "COMMAND --help explains each."])
