"""``realvr train sft | rl | base``: CONFIG, then dotted flags. They read their own arguments, because the flags are the
settings of the file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from realvr.errors import UserError
from realvr.runs.launching import check_count
from realvr.training import packaged
from realvr.training.configuration import load_settings, show_help

_EXAMPLES = """\
usage: realvr train {kind} CONFIG [--processes N] [--engine NAME|FILE] [--dry-run]
                                [--export] [--take-over] [--resume auto|never|PATH] [--SETTING VALUE ...]

{summary}

CONFIG is a YAML file, or the name of one that comes with realvr. Every setting can be changed by a dotted flag; all are
listed below. Names for this training (files in {folder}):
{named}
--dry-run builds one batch, prints its shapes and a memory estimate, and trains nothing.
--resume is short for --checkpoint.resume.
--export writes the model of the newest checkpoint, or of --resume PATH, as a plain folder in run.out: a start for
another engine, or for a new run (--model.path). It trains nothing.
--take-over takes run.out from a run on another machine that is gone for certain.
--method NAME chooses the method, --method FILE.py:Class one of yours (docs/training.md); --help --method NAME lists its
settings. They may be written without their section: --eta is --method.eta.
--processes N trains on N GPUs of this machine, or in N processes where there is none: Ctrl-C stops all of them, with a
checkpoint. --engine says how they share the work (docs/engines.md). On several machines start with torchrun instead:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m realvr train {kind} CONFIG

Examples:
  realvr train {kind} my.yaml --dry-run
  realvr train {kind} my.yaml --optim.lr 1e-5 --run.out runs/second
  realvr train {kind} my.yaml --processes 8 --engine fsdp2
  realvr train {kind} my.yaml --validation.path held-out.jsonl --checkpoint.keep-best validation/accuracy
"""


SWITCHES = ("--dry-run", "--take-over", "--export")
"""Flags that are no settings."""


def sft(args: Sequence[str]) -> int:
    """Stage 1: teach latents to reconstruct the visual tokens of the region that matters, and the text after them."""
    return _train("sft", args, str(sft.__doc__))


def rl(args: Sequence[str]) -> int:
    """Stage 2: reinforcement learning on free-running latents, with the evidence loss (ReaLVR) or an ablation of it."""
    return _train("rl", args, str(rl.__doc__))


def base(args: Sequence[str]) -> int:
    """Base training of a small model from scratch: all parameters, vision included."""
    return _train("base", args, str(base.__doc__))


def _train(kind: str, args: Sequence[str], summary: str) -> int:
    rest = list(args)
    if "-h" in rest or "--help" in rest:
        named = packaged.names(kind)
        shown = textwrap.fill(
            ", ".join(named), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        print(_EXAMPLES.format(kind=kind, summary=summary, named=shown, folder=packaged.FOLDER))
        show_help(kind, rest)
        return 0
    if not rest or rest[0].startswith("-"):
        raise UserError(f"give a settings file or its name first: realvr train {kind} CONFIG (--help lists the names)")
    count, rest = processes(rest)
    config, dry, take_over, export = rest[0], *(flag in rest for flag in SWITCHES)
    flags = [_resume(flag) for flag in rest[1:] if flag not in SWITCHES]
    check_count(count)
    settings = load_settings(kind, config, flags)
    if count > 1:
        from realvr.training.launch import launch_training

        return launch_training(kind, rest, count, settings)
    from realvr.training.run import train

    return train(settings, dry=dry, take_over=take_over, export=export)


def processes(args: Sequence[str]) -> tuple[int, list[str]]:
    """The number after ``--processes``, 1 without it; and the other arguments, which every process gets."""
    kept, rest, number = [], iter(args), "1"
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag == "--processes":
            number = value if equals else next(rest, "")
        else:
            kept.append(arg)
    if not number.lstrip("-").isdigit():
        raise UserError(f"--processes needs a number of processes, not '{number}'")
    return int(number), kept


def _resume(flag: str) -> str:
    """``--resume`` is the one setting with a short name."""
    return f"--checkpoint.{flag[2:]}" if flag == "--resume" or flag.startswith("--resume=") else flag
