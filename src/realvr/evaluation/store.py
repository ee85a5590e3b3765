"""``predictions.jsonl`` while it grows: a journal (`realvr.runs.journal`) of which only the keys stay in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from realvr.errors import UserError
from realvr.evaluation.records import KIND, PREDICTIONS, Prediction, read_predictions
from realvr.runs import journal

Key = tuple[str, str, str, int, int]
"""(bench, question, condition, latents, seed), see `Prediction.key`."""


def merge(directory: Path, order: Sequence[Key] | None = None) -> int:
    """Make one file of all; returns how many predictions it holds. ``order`` sorts them by key.

    What a killed process left half-written goes.
    """
    path = directory / PREDICTIONS
    if path.exists():
        journal.trim(path)
    places = {key: place for place, key in enumerate(order or ())}

    def place(prediction: Prediction) -> int:
        return places.get(prediction.key, len(places))

    count = journal.merge(path, KIND, None if order is None else place)
    for file in (*directory.glob("predictions*.tmp"), *directory.glob("latents/*/*.safetensors.tmp")):
        file.unlink()
    return count


class Store:
    """The predictions of one directory, seen by process ``rank`` of ``world``. Call `merge` once before opening."""

    def __init__(self, directory: str | Path, rank: int = 0, world: int = 1) -> None:
        self.directory = Path(directory)
        self.done: dict[Key, str | None] = {}
        """Keys that have been answered, with the error where there was one."""
        whole = self.directory / PREDICTIONS
        if whole.exists():
            self._remember(read_predictions(whole))
        self._file = journal.Appender(journal.own_file(whole, rank, world))

    def _remember(self, predictions: Iterable[Prediction]) -> None:
        for prediction in predictions:
            self.done[prediction.key] = prediction.error

    def append(self, predictions: Sequence[Prediction]) -> None:
        """Add predictions whose keys are not there yet; on the disk when this returns."""
        new = [prediction for prediction in predictions if prediction.key not in self.done]
        if not new:
            return
        try:
            self._file.write(prediction.to_json() for prediction in new)
        except OSError as error:
            raise UserError(f"{self._file.path}: cannot be written ({error.strerror or error})") from None
        self._remember(new)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
