"""The command line: a table of verbs, each imported only when it is used.

Adding a verb means adding a line to ``COMMANDS`` and a plain function whose parameters are its options. Nothing is
imported here that needs torch, so help and the data commands answer at once.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import NamedTuple

from realvr import __version__
from realvr.errors import UserError, explained
from realvr.files import naming


class Command(NamedTuple):
    module: str
    function: str
    summary: str
    raw: bool = False
    """The function takes the list of arguments as it is: its options are not known before it has read a file."""


COMMANDS: dict[str, Command] = {
    "env": Command("realvr.commands.env", "env", "Versions, devices and engines found on this machine."),
    "new": Command("realvr.commands.new", "new", "Make a small random model of any family, to dry-run everything."),
    "ask": Command("realvr.commands.ask", "ask", "Ask a model a question about one or more images."),
    "data check": Command("realvr.data.commands", "check", "Read everything, open every image, say what is usable."),
    "data show": Command("realvr.data.commands", "show", "Print normalised samples; draw boxes and visual tokens."),
    "data export": Command("realvr.data.commands", "export", "Convert between our JSONL and the training formats."),
    "data import": Command(
        "realvr.data.import_command", "import_boxes", "COCO or VOC boxes as our JSONL, with questions."
    ),
    "world make": Command("realvr.world.commands", "make", "Draw splits of the synthetic world, in the real layouts."),
    "world show": Command("realvr.world.commands", "show", "A contact sheet of scenes with questions and boxes."),
    "train sft": Command("realvr.training.commands", "sft", "Stage 1: latents reconstruct visual evidence.", raw=True),
    "train rl": Command("realvr.training.commands", "rl", "Stage 2: LVR-RL, ReaLVR and its ablations.", raw=True),
    "train base": Command("realvr.training.commands", "base", "Train all parameters of a small model.", raw=True),
    "eval": Command(
        "realvr.benchmarks.eval_command", "evaluate", "Checkpoints on benchmarks, span ablations included."
    ),
    "benchmarks": Command("realvr.benchmarks.benchmarks_command", "benchmarks", "Files, rules and citations of each."),
    "counterfactual": Command(
        "realvr.benchmarks.pairs_command", "counterfactual", "Do answers follow edits of the picture?"
    ),
    "exchange": Command("realvr.benchmarks.pairs_command", "exchange", "Do answers follow latents swapped in a pair?"),
    "score": Command("realvr.benchmarks.score_command", "score", "Scores with intervals from saved predictions."),
    "compare": Command("realvr.benchmarks.score_command", "compare", "Two evaluations, question by question."),
    "report": Command("realvr.report.command", "report", "A page with tables and figures from saved results."),
    "demo": Command("realvr.demo.command", "demo", "Train and compare small models here, and write a report."),
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


def guarded(action: Callable[[], int]) -> int:
    """Do something for a user: warnings become notes, and what the user or the machine is to blame for one line.

    Anything else is a bug and keeps its traceback. Every process that talks to a user goes through here.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _notice  # type: ignore[assignment]
            code = action()
            if sys.stdout is not None:
                with naming("standard output"):
                    sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return _end("realvr: interrupted", 130)
    except BrokenPipeError:
        # The reader went away (`realvr … | head`): not an error. Keep the interpreter from flushing into the closed
        # pipe.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except Exception as error:
        found = explained(error)
        if found is None:
            raise
        return _end(f"realvr: error: {found}", 2)


def _end(line: str, code: int) -> int:
    """Say the last line, where there is still a place for it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None  # type: ignore[assignment]  # or the interpreter tries again and says so
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # type: ignore[assignment]
    return code


def _notice(message: Warning | str, *where: object) -> None:
    """A warning as a user should meet it: one line, without the source that raised it."""
    print(f"realvr: note: {' '.join(str(message).split())}", file=sys.stderr)


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
    close = get_close_matches(args[0], COMMANDS, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise UserError(f"'{args[0]}' is not a command{hint} (realvr --help lists them)")


def _run(name: str, args: list[str]) -> int:
    for flag, value in pairwise([*args, "-"]):
        if flag in ("--out=", "--run.out=") or (flag in ("--out", "--run.out") and not value.strip()):
            # A shell variable that is not set: as a path it would be the folder one happens to be in.
            raise UserError(f"{flag.rstrip('=')} is empty: name a folder (. is the one you are in)")
    command = COMMANDS[name]
    function = getattr(importlib.import_module(command.module), command.function)
    if command.raw:
        return int(function(args) or 0)
    import tyro

    # The docstring up to its Args section is shown as it stands, examples included.
    text = (inspect.getdoc(function) or command.summary).split("\nArgs:")[0].strip()
    code = tyro.cli(function, prog=f"realvr {name}", description=text, args=args)
    return int(code or 0)


def _help(names: Sequence[str] | None = None) -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names or COMMANDS]
    head = (
        f"realvr {__version__}: latent visual reasoning in vision-language models\n\nusage: realvr COMMAND [options]\n"
    )
    return "\n".join([head, "commands:", *lines, "", _EXAMPLES if names is None else "COMMAND --help explains each."])
