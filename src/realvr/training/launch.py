"""``realvr train … --processes N``: the ranks of one run, started on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from realvr.errors import UserError
from realvr.runs.launching import ProcessFailed, launch
from realvr.training.records import checkpoints
from realvr.training.settings import TrainSettings


def launch_training(kind: str, arguments: Sequence[str], processes: int, settings: TrainSettings) -> int:
    """Start ``realvr train KIND ARGUMENTS`` in so many processes and wait for them; the exit code of the run.

    Ctrl-C and SIGTERM reach all ranks: they finish their step, write a checkpoint and end with 130.
    """
    check_ranks(processes, settings)
    command = ["-m", "realvr", "train", kind, *arguments]
    try:
        return launch(command, processes, forward=True, go_on=lambda: go_on(settings.run.out))
    except ProcessFailed as failure:
        return failure.code


def check_ranks(processes: int, settings: TrainSettings) -> None:
    """Refuse a number of ranks that this machine or the batch has no room for; nothing has been read yet."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and processes > gpus:
        raise UserError(
            f"--processes is {processes}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}, one for each "
            "process: give fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    settings.optim.refuse_uneven(processes)


def go_on(out: Path) -> str:
    """Where the same command continues a run that has ended too early."""
    whole = checkpoints(out)
    if whole:
        return f"the same command goes on from {whole[-1]}"
    return "the same command starts again, there is no checkpoint yet"
