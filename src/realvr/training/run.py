"""A whole training from its settings: what ``realvr train`` runs, on as many processes as the launcher has started."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import NoReturn

from realvr.errors import UserError, explained
from realvr.runs.folder import open_run_folder
from realvr.runs.launching import end_with_launcher, launched
from realvr.runs.progress import busy
from realvr.runs.quiet import quiet_transformers
from realvr.training import loop, method
from realvr.training.agreement import RanksDiffer, refuse_differences, setting_facts
from realvr.training.boards import check_installed
from realvr.training.dry_run import dry_run
from realvr.training.engine import Engine, start_engine
from realvr.training.launch import go_on
from realvr.training.settings import StageSettings


def train(
    settings: StageSettings, *, dry: bool = False, take_over: bool = False, cpu: bool = False, export: bool = False
) -> int:
    """Train as the settings say; returns 0, or 130 where the run was stopped and can be continued.

    ``dry`` builds one batch, prints its shapes and a memory estimate, and trains nothing. ``take_over`` takes
    ``run.out`` from a run on another machine that is gone for certain. ``cpu`` uses no GPU. ``export`` writes the model
    of the newest checkpoint, or of ``checkpoint.resume``, as a plain folder, and trains nothing. With several processes
    each calls this, and none returns: they end together.
    """
    quiet_transformers()
    if launched():
        end_with_launcher()
    engine = start_engine(cpu, settings.engine)
    verb = f"train {settings.stage}"
    engine.watchdog.go_on = lambda: go_on(settings.run.out)
    engine.watchdog.start(engine.gather_objects)
    try:
        with ExitStack() as held:
            refuse_differences(engine, setting_facts(settings, engine.settings))
            settings.optim.refuse_uneven(engine.world)
            if not dry:  # before the model is read: a folder that another run writes should not cost minutes
                _claim(held, engine, settings, verb, take_over)
            check_installed(settings.log.to)
            engine.seed(settings.run.seed)
            with busy(f"{verb}: reading model and data", engine.main and settings.log.console):
                made = method.build(settings, engine, dry)
            work = dry_run if dry else loop.export if export else loop.train
            code = work(made, settings, engine)
    except Exception as error:
        engine.watchdog.failed(error)
        message = explained(error)
        if engine.world == 1 or message is None:
            raise
        if isinstance(error, RanksDiffer):
            _end_together(engine, message)
        engine.abort(str(message))
    engine.watchdog.stop()
    return engine.exit(code)


def _claim(held: ExitStack, engine: Engine, settings: StageSettings, verb: str, take_over: bool) -> None:
    """Rank 0 opens the run's folder for all. Where it may not, all end: a rank that went on would wait for rank 0."""
    refused: UserError | None = None
    if engine.main:
        try:
            held.enter_context(open_run_folder(settings.run.out, verb, take_over))
        except UserError as error:
            if engine.world == 1:
                raise
            refused = error
    if engine.any(refused is not None):
        _end_together(engine, refused)


def _end_together(engine: Engine, error: UserError | None) -> NoReturn:
    """End all ranks; the first one says why."""
    if engine.main:
        print(f"realvr: error: {error}", file=sys.stderr, flush=True)
    engine.barrier()
    os._exit(2)
