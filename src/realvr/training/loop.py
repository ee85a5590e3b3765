"""The training loop: the same for every stage.

One step: the stage collects (reads, rolls out, scores), its microbatches pass forward and backward, and one update
follows. A step whose loss or gradient is NaN or infinite is skipped on all ranks together and counted. All ranks make
the same collective calls in the same order, whatever happens on one of them.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realvr.errors import UserError, explained, out_of_memory
from realvr.runs.files import sync
from realvr.runs.folder import open_run_folder
from realvr.runs.progress import busy
from realvr.training import configuration, memory, metrics
from realvr.training.card import TAG, base_model, card
from realvr.training.checkpoints import Checkpoints, Progress
from realvr.training.dropping import DataRecord
from realvr.training.engine import Engine
from realvr.training.metrics import Metrics
from realvr.training.settings import TrainSettings
from realvr.training.stopping import INTERRUPTED, Stopping
from realvr.training.task import Collected, Task
from realvr.training.tracking import Tracker


def train(task: Task, settings: TrainSettings, engine: Engine) -> int:
    """Train to the end, or until Ctrl-C; returns the exit code. Every rank calls it."""
    with open_run_folder(settings.run.out, f"train {_kind(settings)}") if engine.main else nullcontext():
        return _train(task, settings, engine)


def _train(task: Task, settings: TrainSettings, engine: Engine) -> int:
    out, shown = settings.run.out, engine.main and settings.log.console
    if engine.main:
        _refuse_foreign(out)
    checkpoints = Checkpoints(out, settings.checkpoint, engine)
    with busy(f"train {_kind(settings)}: preparing the run", shown):
        engine.prepare(task.module, settings.optim)
        memory.refuse_too_large(engine, settings.optim)
        engine.seed(settings.run.seed)
        progress = checkpoints.resume(task, settings)
    if engine.main:
        configuration.save_resolved(settings, out / "settings.yaml")
    with (
        closing(task),
        Stopping(engine.main) as stopping,
        Tracker(out, settings.log, settings.optim.steps, progress.step, engine.main) as tracker,
    ):
        if progress.step:
            tracker.note(f"resumed after step {progress.step}")
        run, record = _Run(task, settings, engine, tracker, progress), DataRecord(task, settings, engine)
        record.write(progress.step)
        while progress.step < settings.optim.steps:
            try:
                run.step()
            except UserError:
                record.failed(progress.step)
                raise
            for line in record.after_step(progress.step):
                tracker.note(line)
            stop = engine.any(stopping.wanted)
            every = settings.checkpoint.every
            due = progress.step == settings.optim.steps or (every and progress.step % every == 0)
            if stop or due:
                with busy(f"writing the checkpoint of step {progress.step}", shown):
                    saved = checkpoints.save(progress, task, settings)
                record.write(progress.step)
            if stop:
                tracker.note(f"stopped after step {progress.step}; the same command continues from {saved}")
                return INTERRUPTED
        for line in record.last_words():
            tracker.note(line)
        _refuse_untrained(progress, out)
        with busy(f"writing {out / 'final'}", shown):
            export(task, settings, engine, tracker.last)
        tracker.note(f"done: {out / 'final'}")
    return 0


def _refuse_foreign(out: Path) -> None:
    """The end of a run replaces ``final``: what no run wrote must not go."""
    if (out / "final").exists() and not (out / "settings.yaml").exists():
        raise UserError(f"{out / 'final'} is not of a training run: move it away, or choose another run.out")


def _refuse_untrained(progress: Progress, out: Path) -> None:
    """A run that never updated its model has not trained it, whatever its number of steps."""
    if progress.step and progress.skipped >= progress.step:
        raise UserError(
            f"every one of the {progress.step} steps was skipped, because the loss or its gradient was not finite: "
            f"nothing was trained, and no final model is written. Look at the examples named above (rewards, weights, "
            f"optim.lr), then start again in another run.out or without {out / 'checkpoints'}"
        )


@dataclass
class _Outcome:
    """What became of one step on this rank."""

    metrics: Metrics
    norm: float
    bad: bool
    """The same on every rank."""
    nonfinite_microbatches: list[int]
    """Microbatches of this rank whose loss is not finite."""


class _Run:
    """The state of a run between steps."""

    def __init__(
        self, task: Task, settings: TrainSettings, engine: Engine, tracker: Tracker, progress: Progress
    ) -> None:
        self.task, self.settings, self.engine = task, settings, engine
        self.tracker, self.progress = tracker, progress

    def step(self) -> None:
        """One optimizer step: prepare, update or skip, record."""
        start, engine, index = time.perf_counter(), self.engine, self.progress.step
        log, optim = self.settings.log, self.settings.optim
        try:
            prepared = self.task.collect(index)
            _same_passes(engine, prepared)
            prepare_s = time.perf_counter() - start
            norms = term_norms(engine, self.task, prepared) if _due(index + 1, log.parts_every) else {}
            outcome = update(engine, prepared, optim.lr_at(index), optim.clip)
            if not outcome.bad:
                self.task.after_update()
        except Exception as error:
            if isinstance(error, UserError) or not out_of_memory(error):
                raise
            what = "GPU memory" if engine.device.type == "cuda" else "memory"
            raise UserError(f"step {index + 1} ran out of {what}: {_memory_advice(self.settings)}") from error
        self.progress.step += 1
        summed = metrics.sum_over_ranks(engine, outcome.metrics)
        seconds = time.perf_counter() - start
        peaks = engine.gather_objects(engine.peak_memory())
        values = {name: total / count if count else math.nan for name, (total, count) in summed.items()}
        if "tokens" in summed:
            values["tokens"] = summed["tokens"][0]
            values["tokens_per_s"] = summed["tokens"][0] / seconds
        values |= norms | {"grad_norm": outcome.norm, "lr": optim.lr_at(index), "prepare_s": prepare_s}
        values["peak_memory_gib"] = max(peaks) / memory.GIB
        values["skipped"] = float(self.progress.skipped + outcome.bad)
        self.tracker.log(index + 1, values, seconds)
        if _due(index + 1, log.table_every):
            self.tracker.table(index + 1, prepared.table)
        self.handle_nonfinite(outcome, prepared)

    def handle_nonfinite(self, outcome: _Outcome, prepared: Collected) -> None:
        """Count a skipped step, name its examples, and give up after too many in a row."""
        progress = self.progress
        if not outcome.bad:
            progress.bad_in_a_row = 0
            return
        progress.bad_in_a_row += 1
        progress.skipped += 1
        names = self._names(outcome, prepared)
        if progress.bad_in_a_row <= self.settings.run.max_bad_steps:
            self.tracker.note(f"step {progress.step}: the loss or its gradient is not finite; skipped ({names})")
            return
        raise UserError(
            f"stopped at step {progress.step}: {progress.bad_in_a_row} steps in a row had a loss or gradient that is "
            f"not finite, the last one with {names}; lower optim.lr, or look at these examples"
        )

    def _names(self, outcome: _Outcome, prepared: Collected) -> str:
        """The examples of the microbatches whose loss is not finite, over all ranks; of all where none stands out."""
        own = [str(name) for index in outcome.nonfinite_microbatches for name in _ids(prepared.microbatches[index])]
        every = [str(name) for batch in prepared.microbatches for name in _ids(batch)]
        every = every or [str(row["id"]) for row in prepared.table if "id" in row]
        gathered = self.engine.gather_objects((own, every))
        names = [name for part in gathered for name in part[0]] or [name for part in gathered for name in part[1]]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"examples {shown}" if names else f"{len(prepared.microbatches)} microbatches"


def _ids(batch: Any) -> list[Any]:
    found = batch.get("names") if isinstance(batch, dict) else getattr(batch, "names", None)
    return list(found) if isinstance(found, list | tuple) else []


def _due(step: int, every: int) -> bool:
    return bool(every) and (step % every == 0 or step == 1)


def _same_passes(engine: Engine, prepared: Collected) -> None:
    """Ranks with different numbers of passes would wait for each other for ever."""
    counts = engine.gather_objects(len(prepared.microbatches))
    if len(set(counts)) != 1 or counts[0] == 0:
        raise RuntimeError(f"every rank needs the same number of microbatches, at least one; they have {counts}")


def update(engine: Engine, prepared: Collected, lr: float, clip: float) -> _Outcome:
    """Forward and backward over the microbatches, then one update; or none, where something is not finite.

    The losses are checked on all ranks before the last backward pass, which is the one that synchronises (and, with
    some engines, updates), and the gradient norm after it.
    """
    summed: Metrics = dict(prepared.metrics)
    losses: list[Tensor] = []
    norm, bad = math.nan, False
    for index, microbatch in enumerate(prepared.microbatches):
        last = index == len(prepared.microbatches) - 1
        with engine.accumulate(last):
            loss, found = engine.forward(microbatch)
            losses.append(loss.detach())
            metrics.add(summed, found)
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
    return _Outcome(summed, norm, bad, [index for index, good in enumerate(finite) if not good])


def term_norms(engine: Engine, task: Task, prepared: Collected) -> dict[str, float]:
    """Norm of the gradient of each term of the loss alone."""
    return {f"grad_norm/{term}": engine.term_norm(prepared.microbatches, term) for term in task.term_names}


def export(task: Task, settings: TrainSettings, engine: Engine, values: dict[str, Any]) -> None:
    """Write ``final``, a plain model folder with a card, from the main process. It appears when it is whole."""
    out = settings.run.out
    partial, final, old = out / ".final.partial", out / "final", out / ".final.old"
    if engine.main:
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir(parents=True)
    problem = None
    try:
        engine.export(lambda: task.export(partial))
        if engine.main:
            _publish(partial, final, old, settings, values)
    except Exception as error:
        if explained(error) is None:
            raise
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        shutil.rmtree(partial, ignore_errors=True)
    problems = [text for text in engine.gather_objects(problem) if text]
    if problems:
        raise UserError(f"{final} could not be written ({problems[0]}); the same command tries again")


def _publish(partial: Path, final: Path, old: Path, settings: TrainSettings, metrics: dict[str, Any]) -> None:
    title, base = settings.run.out.name, base_model(settings.model.path)
    text = card(title, base, str(final), configuration.dump(settings), metrics, (TAG, _kind(settings)))
    (partial / "README.md").write_text(text, encoding="utf-8")
    for path in partial.rglob("*"):
        sync(path)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _kind(settings: TrainSettings) -> str:
    return next((kind for kind, model in configuration.KINDS.items() if type(settings) is model), "train")


def dry_run(task: Task, settings: TrainSettings, engine: Engine) -> int:
    """Build the first batch, say what it looks like and what memory the run needs; train nothing, write nothing."""
    engine.prepare(task.module, settings.optim)
    engine.seed(settings.run.seed)
    found = engine.estimate(engine.module, settings.optim)
    prepared = task.collect(0)
    _same_passes(engine, prepared)
    engine.print(configuration.dump(settings))
    engine.print(f"processes: {engine.world}, microbatches per step and rank: {len(prepared.microbatches)}")
    for name, text in memory.shapes(prepared.microbatches[0], "microbatch"):
        engine.print(f"  {name}: {text}")
    for name, size in found.items():
        engine.print(f"{name}: {size / memory.GIB:.3f} GiB")
    memory.refuse_too_large(engine, settings.optim)
    try:
        activations = memory.measured_peak(engine, prepared.microbatches[0])
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"one microbatch does not fit: {_memory_advice(settings)}") from error
    total = sum(found.values()) / memory.GIB
    if activations is None:
        engine.print(f"total without activations: {total:.3f} GiB (activations are measured on a GPU only)")
    else:
        held = (activations - found["gradients"]) / memory.GIB
        engine.print(f"activations (measured): {held:.3f} GiB\ntotal: {total + held:.3f} GiB")
    return 0


def _memory_advice(settings: TrainSettings) -> str:
    advice = ["lower optim.microbatch" if settings.optim.microbatch > 1 else "lower model.max_tokens"]
    if hasattr(settings, "memory") and settings.memory != "checkpointed":
        advice.append("set memory checkpointed")
    if hasattr(settings, "gradient_checkpointing") and not settings.gradient_checkpointing:
        advice.append("set gradient_checkpointing true")
    return ", ".join([*advice, "or set lora.rank"])
