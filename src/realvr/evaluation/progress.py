"""Progress of an evaluation on standard error: time left, answers per second, accuracy so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from realvr.evaluation.records import Prediction
from realvr.runs.progress import Bar


class Meter:
    """Progress over ``total`` answers."""

    def __init__(self, total: int, show: bool = True) -> None:
        self._bar = Bar("answers", total, show)
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
        self._bar.set(self._answers, title=label, note=f"{rate:.1f}/s, {right / asked:.1%} right")

    def __enter__(self) -> Meter:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)


def _label(item: Prediction) -> str:
    return f"{item.bench} {item.condition}, K = {item.latents}"
