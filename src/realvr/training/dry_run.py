"""``--dry-run``: what a run would look like and need."""

from __future__ import annotations

from contextlib import closing

from realvr.training import configuration, memory
from realvr.training.engine import Engine
from realvr.training.loop import refuse_odd_collection
from realvr.training.settings import TrainSettings
from realvr.training.task import Task
from realvr.training.validation import validation_of


def dry_run(task: Task, settings: TrainSettings, engine: Engine) -> int:
    """Build the first batch, print its shapes and what memory the run needs; train nothing, write nothing."""
    with closing(task):
        return _described(task, settings, engine)


def _described(task: Task, settings: TrainSettings, engine: Engine) -> int:
    engine.prepare(task.module, settings.optim)
    engine.seed(settings.run.seed)
    held = engine.estimate(engine.module, settings.optim)
    collected = task.collect(0)
    refuse_odd_collection(engine, task, collected)
    engine.print(configuration.dump(settings))
    engine.print(f"processes: {engine.world}, microbatches per step and rank: {len(collected.microbatches)}")
    validation = validation_of(task, settings, engine)
    if validation is not None:
        engine.print(f"validation: {len(validation.questions)} questions every {settings.validation.every} steps")
    for name, text in memory.shapes(collected.microbatches[0], "microbatch"):
        engine.print(f"  {name}: {text}")
    expected = memory.expected(task, settings, engine, collected.microbatches)
    for line in memory.expected_lines(held, expected):
        engine.print(line)
    memory.refuse_too_large(engine, settings)
    kept = held["gradients"] if engine.keeps_gradients else 0
    with memory.explain_shortage(engine, settings, "one microbatch"):
        measured = memory.measured_peak(engine, collected.microbatches[0], kept)
    for line in memory.measured_lines(held, expected, measured, len(collected.microbatches)):
        engine.print(line)
    return 0
