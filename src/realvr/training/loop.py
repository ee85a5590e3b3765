"""The training loop: the same for every method and engine.

One step: the method collects (reads, rolls out, scores), its microbatches pass forward and backward, and one update
follows. A step whose loss or gradient is NaN or infinite is skipped on all ranks together and counted. All ranks make
the same collective calls in the same order, whatever happens on one of them.
"""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realvr.errors import UserError
from realvr.registry import place_of
from realvr.runs.folder import open_run_folder
from realvr.runs.launching import INTERRUPTED
from realvr.runs.progress import busy
from realvr.training import configuration, memory, metrics
from realvr.training.best import Best
from realvr.training.checkpoints import Checkpoints, Progress
from realvr.training.dropping import DataRecord
from realvr.training.engine import Engine
from realvr.training.final import BEST, FINAL, refuse_foreign, write_model
from realvr.training.metrics import Metrics
from realvr.training.records import ENGINE, ENGINE_FILE, METHOD, METHOD_FILE, EngineUse
from realvr.training.settings import TrainSettings
from realvr.training.stopping import Stopping
from realvr.training.task import Collected, Task
from realvr.training.tracking import Tracker
from realvr.training.validation import Validated, Validation, validation_of


@dataclass
class Run:
    """What a run is made of, between its steps."""

    task: Task
    settings: TrainSettings
    engine: Engine
    tracker: Tracker
    progress: Progress
    validation: Validation | None = None
    validated: Validated | None = None
    """Of the last step, where it was one with a validation."""


def train(task: Task, settings: TrainSettings, engine: Engine) -> int:
    """Train to the end, or until Ctrl-C; returns the exit code. Every rank calls it."""
    out, verb = settings.run.out, f"train {configuration.kind_of(settings)}"
    with open_run_folder(out, verb) if engine.main else nullcontext():
        if engine.main:
            refuse_foreign(out)
        checkpoints = Checkpoints(out, settings.checkpoint, engine)
        with busy(f"{verb}: preparing the run", engine.main and settings.log.console):
            engine.prepare(task.module, settings.optim)
            memory.refuse_too_large(engine, settings)
            engine.seed(settings.run.seed)
            validation = validation_of(task, settings, engine)
            progress = checkpoints.resume(task, settings)
            refuse_fewer_steps(progress, settings)
        ranks = engine.gather_objects(engine.facts())
        if engine.main:
            used = EngineUse(engine=engine.name, settings=engine.settings.model_dump(mode="json"), ranks=ranks)
            ENGINE_FILE.dump(out / ENGINE, used)
            configuration.save_resolved(settings, out / "settings.yaml")
            if (about := task.about()) is not None:
                METHOD_FILE.dump(out / METHOD, about)
        with (
            closing(task),
            Tracker(out, settings.log, settings.optim.steps, progress.step, engine.main) as tracker,
        ):
            return train_steps(Run(task, settings, engine, tracker, progress, validation), checkpoints)


def export(task: Task, settings: TrainSettings, engine: Engine) -> int:
    """Write the model of a checkpoint as a plain model folder beside it, and train nothing. Every rank calls it."""
    out = settings.run.out
    with closing(task):
        engine.prepare(task.module, settings.optim)
        engine.seed(settings.run.seed)
        step = Checkpoints(out, settings.checkpoint, engine).resume(task, settings, any_step=True).step
        if not step:
            raise UserError(f"{out} has no checkpoint, so there is nothing to export")
        name = f"model-{step:06d}"
        engine.watchdog.at(f"writing {out / name}")
        write_model(task, settings, engine, {}, name)
    engine.print(f"the model after step {step}: {out / name}")
    return 0


def train_steps(run: Run, checkpoints: Checkpoints) -> int:
    """The steps that are left, with a checkpoint now and then, and the final model."""
    settings, engine, tracker, progress = run.settings, run.engine, run.tracker, run.progress
    out, steps, shown = settings.run.out, settings.optim.steps, engine.main and settings.log.console
    note_resumed(run)
    best = best_so_far(run)
    data = DataRecord(run.task, settings, engine)
    data.write(progress.step)
    with Stopping(engine.main) as stopping:
        while progress.step < steps:
            try:
                train_step(run)
            except UserError:
                data.failed(progress.step)
                raise
            for line in data.after_step(progress.step):
                tracker.note(line)
            improved = best is not None and keep_if_best(run, best)
            stop = engine.any(stopping.wanted)
            if stop or improved or checkpoints.due(progress.step, steps):
                engine.watchdog.at(f"writing the checkpoint of step {progress.step}")
                with busy(f"writing the checkpoint of step {progress.step}", shown):
                    saved = checkpoints.save(progress, run.task, settings)
                data.write(progress.step)
            if stop:
                tracker.note(f"stopped after step {progress.step}; the same command continues from {saved}")
                return INTERRUPTED
        for line in data.last_words():
            tracker.note(line)
        refuse_untrained(run)
        engine.watchdog.at(f"writing {out / FINAL}")
        with busy(f"writing {out / FINAL}", shown):
            write_model(run.task, settings, engine, tracker.last)
        tracker.note(f"done: {out / FINAL}")
    return 0


def note_resumed(run: Run) -> None:
    """Say where a resumed run stands."""
    if done := run.progress.step:
        run.tracker.note(f"resumed after step {done}")


def refuse_fewer_steps(progress: Progress, settings: TrainSettings) -> None:
    """Steps that are done cannot be taken back, and the settings and the card of a run say how it was trained. Comes
    before anything is written."""
    done, steps = progress.step, settings.optim.steps
    if done > steps:
        raise UserError(
            f"optim.steps is {steps}, but {settings.run.out} has done {done} steps: give {done} to write the "
            "final model as it is, more to train on, or another run.out"
        )


def refuse_untrained(run: Run) -> None:
    """A run that never updated its model has not trained it, whatever its number of steps."""
    progress = run.progress
    if progress.step and progress.skipped >= progress.step:
        raise UserError(
            f"every one of the {progress.step} steps was skipped, because the loss or its gradient was not finite: "
            f"nothing was trained, and no final model is written. Look at the examples named above (rewards, weights, "
            f"optim.lr), then start again in another run.out or without {run.settings.run.out / 'checkpoints'}"
        )


def best_so_far(run: Run) -> Best | None:
    """What ``checkpoint.keep_best`` asks for."""
    metric = run.settings.checkpoint.keep_best
    if metric is None or run.validation is None:
        run.progress.best = None  # no longer wanted: its checkpoint is one among the others
        return None
    best = Best(metric, run.validation.identity, run.progress)
    if best.forgotten:
        run.tracker.note(best.forgotten)
    return best


def keep_if_best(run: Run, best: Best) -> bool:
    """After a validation better than all before, write the model to ``best``; its checkpoint comes after it, so that a
    kill in between repeats the validation. Leaves the generators as they were."""
    line = best.better(run.validated.metrics) if run.validated is not None else None
    if line is None:
        return False
    engine, settings, before = run.engine, run.settings, run.engine.rng_state()
    with busy(f"writing {settings.run.out / BEST}", engine.main and settings.log.console):
        write_model(run.task, settings, engine, run.tracker.last, BEST)
    engine.set_rng_state(before)
    run.tracker.note(line)
    return True


# ---------------------------------------------------------------------- one step


def train_step(run: Run) -> None:
    """One optimizer step: collect, update or skip, record."""
    task, engine, progress, optim, log = run.task, run.engine, run.progress, run.settings.optim, run.settings.log
    began, step = time.perf_counter(), progress.step + 1
    place = engine.watchdog.at
    with memory.explain_shortage(engine, run.settings, f"step {step}"):
        place(f"step {step}, preparing the batch")
        collected = task.collect(progress.step)
        refuse_odd_collection(engine, task, collected)
        collect_s = time.perf_counter() - began
        place(f"step {step}, forward and backward")
        norms = term_norms(engine, task, collected) if is_due(step, log.parts_every) else {}
        update = update_or_skip(engine, collected, optim.lr_at(progress.step), optim.clip)
        if not update.skipped:
            task.after_update()
    progress.step = step
    place(f"after step {step}")
    summed = metrics.sum_over_ranks(engine, update.metrics)
    seconds = time.perf_counter() - began
    values = {name: total / count if count else math.nan for name, (total, count) in summed.items()}
    if "tokens" in summed:
        values["tokens"] = summed["tokens"][0]
        values["tokens_per_s"] = summed["tokens"][0] / seconds
    values |= norms | {"grad_norm": update.norm, "lr": optim.lr_at(step - 1), "prepare_s": collect_s}
    values["peak_memory_gib"] = max(engine.gather_objects(engine.peak_memory())) / memory.GIB
    values["skipped"] = float(progress.skipped + update.skipped)
    run.validated = run.validation(step) if run.validation is not None and run.validation.due(step) else None
    if run.validated is not None:
        values |= run.validated.metrics
        run.tracker.validated(step, run.validated.replies)
    run.tracker.log(step, values, seconds)
    if is_due(step, log.table_every):
        run.tracker.table(step, collected.table)
    handle_nonfinite(run, update, collected)


def is_due(step: int, every: int) -> bool:
    """Whether something that comes every so many steps comes after this one; always after the first."""
    return bool(every) and (step % every == 0 or step == 1)


def refuse_odd_collection(engine: Engine, task: Task, collected: Collected[Any]) -> None:
    """What no step can be made of. Ranks with different numbers of passes would wait for each other for ever."""
    place = f"{place_of(type(task))}: collect()"
    if not isinstance(collected, Collected):
        raise UserError(f"{place} returns {type(collected).__name__}, not Collected(microbatches, metrics, table)")
    if name := metrics.odd_metric(collected.metrics):
        raise UserError(f"{place}: metric '{name}' is no pair of tensors (sum, count)")
    counts = engine.gather_objects(len(collected.microbatches))
    if len(set(counts)) != 1 or counts[0] == 0:
        raise RuntimeError(
            f"{place}: every rank needs the same number of microbatches, at least one; they have {counts}"
        )


def term_norms(engine: Engine, task: Task, collected: Collected[Any]) -> dict[str, float]:
    """Norm of the gradient of each term of the loss alone."""
    return {f"grad_norm/{term}": engine.term_norm(collected.microbatches, term) for term in task.term_names}


@dataclass
class Update:
    """What became of one step on this rank."""

    metrics: Metrics
    norm: float
    """Of the whole gradient before clipping; NaN where it was not computed."""
    skipped: bool
    """The same on every rank."""
    nonfinite_microbatches: list[int]
    """Microbatches of this rank whose loss is not finite."""


def update_or_skip(engine: Engine, collected: Collected[Any], lr: float, clip: float) -> Update:
    """Forward and backward over the microbatches, then one update; or none, where something is not finite.

    The losses are checked on all ranks before the last backward pass, which is the one that synchronises, and the
    gradient norm after it.
    """
    summed: Metrics = dict(collected.metrics)
    losses: list[Tensor] = []
    norm, bad = math.nan, False
    for index, microbatch in enumerate(collected.microbatches):
        last = index == len(collected.microbatches) - 1
        with engine.accumulate(last):
            loss, measured = engine.forward(microbatch)
            losses.append(loss.detach())
            metrics.add(summed, measured)
            if last:
                finite = torch.stack(losses).isfinite().tolist()
                bad = engine.any(not all(finite))
            if not bad:
                engine.backward(loss)
    if not bad:
        norm = engine.gradient_norm(clip)
        bad = engine.any(not math.isfinite(norm))
    if bad:
        engine.drop_gradients()
    else:
        engine.step(lr)
    # The losses of all microbatches and ranks add up to that of the step: the count is 1 on one rank only.
    summed["loss"] = (torch.stack(losses).sum(), torch.tensor(1.0 if engine.main else 0.0))
    return Update(summed, norm, bad, [index for index, good in enumerate(finite) if not good])


# ---------------------------------------------------------------------- steps that are not finite


def handle_nonfinite(run: Run, update: Update, collected: Collected[Any]) -> None:
    """Count a skipped step, name its examples, and give up after too many in a row."""
    progress = run.progress
    if not update.skipped:
        progress.bad_in_a_row = 0
        return
    progress.bad_in_a_row += 1
    progress.skipped += 1
    names = nonfinite_examples(run.engine, update, collected)
    if progress.bad_in_a_row <= run.settings.run.max_bad_steps:
        run.tracker.note(f"step {progress.step}: the loss or its gradient is not finite; skipped ({names})")
        return
    raise UserError(
        f"stopped at step {progress.step}: {progress.bad_in_a_row} steps in a row had a loss or gradient that is "
        f"not finite, the last one with {names}; lower optim.lr, or look at these examples"
    )


def nonfinite_examples(engine: Engine, update: Update, collected: Collected[Any]) -> str:
    """The examples of the microbatches whose loss is not finite, over all ranks; all where none stands out."""
    batches = collected.microbatches
    own = [name for index in update.nonfinite_microbatches for name in example_names(batches[index])]
    every = [name for batch in batches for name in example_names(batch)]
    every = every or [str(row["id"]) for row in collected.table if "id" in row]
    gathered = engine.gather_objects((own, every))
    names = [name for bad, _ in gathered for name in bad] or [name for _, each in gathered for name in each]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"examples {shown}" if names else f"{len(batches)} microbatches"


def example_names(batch: object) -> list[str]:
    """The names of a microbatch's examples, where it has any: a dict or an object with ``names``."""
    names = batch.get("names") if isinstance(batch, dict) else getattr(batch, "names", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else []
