"""Checkpoints that a run killed at any moment continues from.

``checkpoints/step-N`` holds everything after N optimizer steps: trained parameters and buffers, optimizer, generators
and the stage's own state per rank, and ``run.json`` with the settings. It is written as ``.step-N.partial``, synced to
disk, and renamed once complete, so a folder named ``step-N`` is always whole. The schedule needs no state: the learning
rate is a function of the step.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from realvr import __version__
from realvr.data.census import SHOWN
from realvr.errors import UserError, out_of_memory
from realvr.runs.files import Json, publish, read_json, sync
from realvr.runs.hashes import difference, digests
from realvr.training.configuration import differences
from realvr.training.dropping import ReadsData
from realvr.training.engine import Engine
from realvr.training.records import CHECKPOINT, checkpoints, step_of
from realvr.training.sections import VALIDATION_METRICS, CheckpointSettings, LoraSettings
from realvr.training.settings import StageSettings, TrainSettings
from realvr.training.statefile import read_state, write_state, write_text
from realvr.training.task import Task

MAY_CHANGE = (
    "optim.steps",
    "optim.microbatch",
    "optim.gradients",
    "lora.kernels",
    "model.fast_vision",
    "model.fused_layers",
    "data.max_dropped",
    "checkpoint.",
    "validation.",
    "log.",
    "run.out",
    "run.max_bad_steps",
    "engine",
)
"""Settings that a resumed run may change: how long it runs, what it records, and what changes numbers by rounding only.
Such settings of the method are its own (``MethodConfig.may_change``). Another type of engine is refused by its name."""

FROM_MODEL = ("model.min_tokens", "model.max_tokens", "model.tiles", "model.max_tiles")
"""Settings that are None where they are the model's own, which is filled in once it is loaded."""


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    bad_in_a_row: int = 0
    """Skipped steps at the end of them."""
    skipped: int = 0
    """Skipped steps in all."""
    best: dict[str, Any] | None = None
    """The best validation so far, see ``best.py``."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, out: Path, settings: CheckpointSettings, engine: Engine) -> None:
        self.out, self.settings, self.engine = out, settings, engine
        self.root = out / "checkpoints"

    # ------------------------------------------------------------------ writing

    def due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint comes after ``step`` of ``steps``."""
        return step == steps or bool(self.settings.every and step % self.settings.every == 0)

    def save(self, progress: Progress, task: Task, settings: TrainSettings) -> Path:
        """Write a checkpoint; every rank calls it. Where one cannot write, all raise and the previous one stays."""
        name = f"step-{progress.step:06d}"
        partial, final = self.root / f".{name}.partial", self.root / name
        if self.engine.any(final.exists()):
            return final
        self._together(name, lambda: self._begin(partial))
        self._together(name, lambda: self._write(partial, task), partial)
        self._together(name, lambda: self._finish(partial, final, progress, task, settings), partial)
        return final

    def _begin(self, partial: Path) -> None:
        if self.engine.main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write(self, partial: Path, task: Task) -> None:
        self.engine.save(partial)
        state = {"generators": self.engine.rng_state(), "task": task.state_dict()}
        write_state(partial / f"rank-{self.engine.rank}", state)

    def _finish(self, partial: Path, final: Path, progress: Progress, task: Task, settings: TrainSettings) -> None:
        frozen = self.engine.frozen_digest()
        if not self.engine.main:
            return
        if isinstance(task, ReadsData):
            record = task.data.fingerprint
            write_state(partial / "data", {"files": record.files, "images": torch.from_numpy(record.stats)})
        run = {
            "version": __version__,
            "progress": vars(progress),
            "engine": self.engine.name,
            "engine_settings": self.engine.settings.model_dump(mode="json"),
            "world": self.engine.world,
            "frozen": frozen,
            "sha256": digests(partial.iterdir()),
            "method": _method(task),
            "settings": settings.model_dump(mode="json"),
        }
        write_text(partial / "run.json", json.dumps(run, indent=1))
        sync(partial)
        publish(partial, final)
        self._prune(progress)

    def _prune(self, progress: Progress) -> None:
        """Remove all but the newest and the best. A checkpoint is renamed before it is deleted: half of one is never
        read."""
        best = progress.best["step"] if progress.best else None
        for old in self.complete()[: -self.settings.keep]:
            if step_of(old) == best:
                continue
            doomed = old.with_name(f".{old.name}.partial")
            publish(old, doomed)
            shutil.rmtree(doomed)

    def _together(self, name: str, action: Callable[[], None], partial: Path | None = None) -> None:
        """Run one phase on every rank; if it fails on one because of the file system, clean up and raise on all."""
        problem = None
        try:
            action()
        except OSError as error:
            problem = f"{error.strerror or error}"
        self.engine.watchdog.follow_main()
        problems = [text for text in self.engine.gather_objects(problem) if text]
        if not problems:
            return
        if self.engine.main and partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        self.engine.barrier()
        before = self.complete()
        kept = f"{before[-1]} is intact" if before else "there was none before"
        raise UserError(f"checkpoint {name} could not be written to {self.root} ({problems[0]}); {kept}")

    # ------------------------------------------------------------------ reading

    def complete(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return checkpoints(self.out)

    def resume(self, task: Task, settings: TrainSettings, any_step: bool = False) -> Progress:
        """Continue as ``checkpoint.resume`` says; returns where the run stands. Removes leftovers of a killed write.
        ``any_step``: also from a checkpoint that is not the newest, because nothing will be written after it."""
        if self.engine.main and self.root.is_dir():
            for leftover in self.root.glob(".step-*.partial"):
                shutil.rmtree(leftover)
        self.engine.barrier()
        path = self._chosen(any_step)
        if path is None:
            return Progress()
        try:
            run = read_json(path / "run.json")
            progress = _progress(run["progress"], step_of(path))
            self._refuse_other_run(path, run, settings)
            self._note_other_method(path, run, task)
            self._refuse_changed(path, run)
            self._refuse_other_data(path, task)
            self.engine.load(path)
            self._restore(path, run, progress, task, settings)
        except Exception as error:  # a damaged state can raise anything
            if isinstance(error, UserError) or out_of_memory(error):
                raise
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{path}: the checkpoint cannot be read ({what}); remove it to go back one") from error
        return progress

    def _restore(
        self, path: Path, run: dict[str, Any], progress: Progress, task: Task, settings: TrainSettings
    ) -> None:
        """The task's state and the generators; on another number of ranks the states of all of them, shared out."""
        if run["world"] == self.engine.world:
            state = read_state(path / f"rank-{self.engine.rank}")
            task.load_state_dict(state["task"])
            self.engine.set_rng_state(state["generators"])
            return
        states = [read_state(path / f"rank-{rank}")["task"] for rank in range(run["world"])]
        task.load_state_dict(task.redistribute(states))
        self.engine.seed(settings.run.seed + 1_000_033 * progress.step)
        if self.engine.main and _dropout(settings):
            warnings.warn(
                f"{path} was written by {run['world']} processes, this run has {self.engine.world}: the dropout of the "
                "adapters goes on with other random numbers",
                stacklevel=2,
            )

    def _chosen(self, any_step: bool) -> Path | None:
        """The checkpoint to continue from, the same on every rank."""
        wanted, whole = self.settings.resume, self.complete()
        if wanted == "auto":
            newest: Path | None = self.engine.gather_objects(whole[-1] if whole else None)[0]
            return newest
        if wanted == "never":
            if whole or (self.out / "metrics.jsonl").exists():
                raise UserError(f"{self.out} already holds a run: choose another run.out, or checkpoint.resume auto")
            return None
        path = Path(wanted)
        if not (path / "run.json").is_file() or not CHECKPOINT.fullmatch(path.name):
            hint = f"; this run has {', '.join(p.name for p in whole)}" if whole else ""
            raise UserError(f"checkpoint.resume: {path} is not a checkpoint (auto, never, or a step-N folder){hint}")
        newer = [other for other in whole if step_of(other) > step_of(path)]
        if newer and not any_step:
            raise UserError(f"{newer[-1]} is newer than {path}: remove what is newer, or choose another run.out")
        return path

    def _refuse_other_data(self, path: Path, task: Task) -> None:
        """Refuse data files and images that have changed since the checkpoint was written."""
        changes: list[str] = []
        if self.engine.main and isinstance(task, ReadsData) and (path / "data.json").exists():
            before = read_state(path / "data")
            changes = task.data.fingerprint.changes(before["files"], before["images"].numpy())
        self.engine.watchdog.follow_main()
        changes = self.engine.gather_objects(changes)[0]
        if not changes:
            return
        shown = "; ".join(changes[:SHOWN]) + (f"; and {len(changes) - SHOWN:,} more" if len(changes) > SHOWN else "")
        if self.settings.changed_data == "refuse":
            raise UserError(
                f"the data is not what {path} was trained on: {shown}. Restore it, start again with another run.out, "
                "or go on with what is there now: --checkpoint.changed-data accept"
            )
        if self.engine.main:
            warnings.warn(f"the data changed since {path}: {shown}; going on with what is there now", stacklevel=2)

    def _note_other_method(self, path: Path, run: dict[str, Any], task: Task) -> None:
        """A method file that was edited since: it may be the repair of a mistake, so the run goes on."""
        before, now = run.get("method"), _method(task)  # not in checkpoints of earlier versions
        if not before or not now or before["sha256"] == now["sha256"] or not self.engine.main:
            return
        if not Path(now["file"]).is_relative_to(Path(__file__).parent):  # the package's own change with its version
            warnings.warn(
                f"{now['file']} is not the method file that {path} was trained with (its SHA-256 differs); going on "
                "with what is there now",
                stacklevel=2,
            )

    def _refuse_other_run(self, path: Path, run: dict[str, Any], settings: TrainSettings) -> None:
        changed = differences(_with_defaults(run["settings"], settings), settings.model_dump(mode="json"))
        changed = {key: pair for key, pair in changed.items() if key not in FROM_MODEL or None not in pair}
        free: tuple[str, ...] = MAY_CHANGE
        if isinstance(settings, StageSettings):
            free += tuple(f"method.{name}" for name in settings.method.may_change)
        fatal = [f"{key} was {old}, is {new}" for key, (old, new) in changed.items() if not key.startswith(free)]
        if fatal:
            raise UserError(f"{path} belongs to other settings: {'; '.join(fatal)}. Use them, or another run.out")
        if run.get("engine", "ddp") != self.engine.name:  # checkpoints of earlier versions are all DDP's
            raise UserError(
                f"{path} was written by engine {run['engine']}, this run uses {self.engine.name}: continue with "
                f"--engine {run['engine']}, or export the model with it (--engine {run['engine']} --export) and start "
                "a new run from that (--model.path)"
            )
        if run["world"] != self.engine.world and not self.engine.elastic:
            raise UserError(
                f"{path} was written by {run['world']} processes, this run has {self.engine.world}, and the files of "
                f"engine {self.engine.name} are made for one number: continue on {run['world']}, or export the model "
                "there (--export) and start a new run from it (--model.path)"
            )
        if run["frozen"] != self.engine.frozen_digest():
            raise UserError(f"{path}: the frozen weights differ from those the run started with (model.path)")

    def _refuse_changed(self, path: Path, run: dict[str, Any]) -> None:
        """Every file must be the one that was written. One rank reads them and tells the others."""
        changed, written = None, run.get("sha256", {})  # not in those of earlier versions
        if not isinstance(written, dict):
            raise ValueError(f"run.json: sha256 is {written!r}")
        if self.engine.main:
            try:
                changed = difference(written, digests(file for file in path.iterdir() if file.name in written))
            except OSError as error:
                changed = f"{error.filename} cannot be read ({error.strerror})"
        self.engine.watchdog.follow_main()  # it may have read terabytes
        problem = self.engine.gather_objects(changed)[0]
        if problem:
            raise UserError(
                f"{path}: {problem}: it is damaged, was changed, or holds files of another checkpoint; a run cannot "
                "continue from it. Remove the folder to go back one"
            )


def _dropout(settings: TrainSettings) -> bool:
    """Whether the step draws from the generators of the rank."""
    lora = getattr(settings, "lora", None)
    return isinstance(lora, LoraSettings) and lora.rank > 0 and lora.dropout > 0


def _method(task: Task) -> dict[str, Any] | None:
    """Name, file and hash of the method, for ``run.json``."""
    about = task.about()
    return {"name": about["method"], "file": about["file"], "sha256": about["sha256"]} if about else None


def _with_defaults(before: dict[str, Any], settings: TrainSettings) -> dict[str, Any]:
    """Saved settings with the defaults of settings that did not exist when they were saved."""
    try:
        return type(settings).model_validate(before).model_dump(mode="json")
    except ValidationError:
        return before


def _progress(values: dict[str, Any], step: int) -> Progress:
    progress = Progress(**values)
    counts = [progress.bad_in_a_row, progress.skipped, progress.step]
    if any(type(count) is not int for count in counts) or not 0 <= counts[0] <= counts[1] <= counts[2] == step:
        raise ValueError(f"run.json: progress is {values}")
    if progress.best is not None and not _known_best(progress.best, step):
        raise ValueError(f"run.json: best is {progress.best}")
    return progress


def _known_best(best: Json, step: int) -> bool:
    kinds = {"metric": str, "value": float, "step": int, "identity": str}
    typed = isinstance(best, dict) and {name: type(value) for name, value in best.items()} == kinds
    return typed and best["metric"] in VALIDATION_METRICS and 0 < best["step"] <= step
