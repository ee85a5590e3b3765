"""Progress of an evaluation on standard error: time left, answers per second, accuracy so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from realvr.benchmarks.records import Prediction


class Meter:
    """A bar over ``total`` answers, gone when finished; silent where nobody watches."""

    def __init__(self, total: int, show: bool = True) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[accuracy]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))
        self._task = self._progress.add_task("answers", total=total, rate="", accuracy="")
        self._begun = time.monotonic()
        self._answers = 0
        self._counts: dict[str, tuple[int, int]] = {}

    def add(self, predictions: Sequence[Prediction]) -> None:
        """Count these answers; the accuracy shown is that of the first one's benchmark and condition."""
        if not predictions:
            return
        for item in predictions:
            right, asked = self._counts.get(_label(item), (0, 0))
            self._counts[_label(item)] = (right + item.correct, asked + 1)
        self._answers += len(predictions)
        rate = self._answers / max(time.monotonic() - self._begun, 1e-9)
        label = _label(predictions[0])
        right, asked = self._counts[label]
        self._progress.update(
            self._task,
            advance=len(predictions),
            description=label,
            rate=f"{rate:.1f}/s",
            accuracy=f"{right / asked:.1%} right",
        )

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _label(item: Prediction) -> str:
    return f"{item.bench} {item.condition}, K = {item.latents}"
