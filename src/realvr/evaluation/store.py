"""``predictions.jsonl`` while it grows: safe against a kill at any byte, resumable, shared by several processes.

One process appends to ``predictions.jsonl`` itself. Of several, process r appends to ``predictions.rank{r}.jsonl``; the
files become one when the run ends, and when it starts again, with whatever number of processes. Nothing here imports
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from realvr.errors import UserError
from realvr.evaluation.records import PREDICTIONS, Prediction, read_predictions
from realvr.runs.files import write_atomically
from realvr.runs.journal import trim

Key = tuple[str, str, str, int, int]
"""(bench, question, condition, latents, seed), see `Prediction.key`."""
_PARTS = "predictions.rank*.jsonl"


def merge(directory: Path, order: Sequence[Key] | None = None) -> int:
    """Make one file of all; returns how many predictions it holds. ``order`` sorts them by key.

    Killed in between, the parts are still there, and lines that are in two files count once.
    """
    whole, parts = directory / PREDICTIONS, sorted(directory.glob(_PARTS))
    files = [file for file in (whole, *parts) if file.exists()]
    for file in files:
        trim(file)
    lines: dict[Key, str] = {}
    for file in files:
        for prediction in read_predictions(file):
            lines.setdefault(prediction.key, prediction.to_json() + "\n")
    if order is not None:
        places = {key: place for place, key in enumerate(order)}
        lines = {key: lines[key] for key in sorted(lines, key=lambda key: places.get(key, len(places)))}
    if parts or order is not None:
        write_atomically(whole, "".join(lines.values()))
    for file in (*parts, *directory.glob("predictions*.tmp"), *directory.glob("latents/*/*.safetensors.tmp")):
        file.unlink()
    return len(lines)


class Store:
    """The predictions of one directory, seen by process ``rank`` of ``world``. Call `merge` once before opening."""

    def __init__(self, directory: str | Path, rank: int = 0, world: int = 1) -> None:
        self.directory = Path(directory)
        self.path = self.directory / (PREDICTIONS if world == 1 else f"predictions.rank{rank}.jsonl")
        self.done: dict[Key, str | None] = {}
        """Keys that have been answered, with the error where there was one."""
        whole = self.directory / PREDICTIONS
        if whole.exists():
            self._note(read_predictions(whole))
        self._file: IO[bytes] = self.path.open("ab")

    def _note(self, predictions: Iterable[Prediction]) -> None:
        for prediction in predictions:
            self.done[prediction.key] = prediction.error

    def append(self, predictions: Sequence[Prediction]) -> None:
        """Add predictions whose keys are not there yet; on the disk when this returns."""
        new = [prediction for prediction in predictions if prediction.key not in self.done]
        if not new:
            return
        try:
            self._file.write("".join(prediction.to_json() + "\n" for prediction in new).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from None
        self._note(new)

    def close(self) -> None:
        """Close the file. Everything was synced when it was appended: what fails now failed then."""
        with suppress(OSError):
            self._file.close()
