"""``realvr train sft | rl | base``: CONFIG, then dotted flags. They read their own arguments, because the flags are the
settings of the file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from realvr.errors import UserError
from realvr.training import packaged
from realvr.training.configuration import load_settings, show_help

_EXAMPLES = """\
usage: realvr train {kind} CONFIG [--dry-run] [--take-over] [--resume auto|never|PATH] [--SETTING VALUE ...]

{summary}

CONFIG is a YAML file, or the name of one that comes with realvr. Every setting can be changed by a dotted flag; all are
listed below. Names for this training (files in {folder}):
{named}
--dry-run builds one batch, prints its shapes and a memory estimate, and trains nothing.
--resume is short for --checkpoint.resume.
--take-over takes run.out from a run on another machine that is gone for certain.
--method NAME chooses the method, --method FILE.py:Class one of yours (docs/training.md); --help --method NAME lists its
settings. They may be written without their section: --eta is --method.eta.
Several processes: torchrun --standalone --nproc-per-node 2 -m realvr train {kind} CONFIG

Examples:
  realvr train {kind} my.yaml --dry-run
  realvr train {kind} my.yaml --optim.lr 1e-5 --run.out runs/second
  realvr train {kind} my.yaml --validation.path held-out.jsonl --checkpoint.keep-best validation/accuracy
"""


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
    config, dry, take_over = rest[0], "--dry-run" in rest, "--take-over" in rest
    flags = [_resume(flag) for flag in rest[1:] if flag not in ("--dry-run", "--take-over")]
    settings = load_settings(kind, config, flags)
    from realvr.training.run import train

    return train(settings, dry=dry, take_over=take_over)


def _resume(flag: str) -> str:
    """``--resume`` is the one setting with a short name."""
    return f"--checkpoint.{flag[2:]}" if flag == "--resume" or flag.startswith("--resume=") else flag
