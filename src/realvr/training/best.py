"""The best model of a run by one metric: which step it was, over resumes too."""

from __future__ import annotations

import math
from collections.abc import Mapping

from realvr.errors import UserError
from realvr.training.checkpoints import Progress
from realvr.training.sections import VALIDATION_METRICS


class Best:
    """The best value of ``checkpoint.keep_best`` so far, kept in the progress of the run and thus in checkpoints.

    ``identity`` says what the values were measured on: a value of other questions is no rival and is forgotten.
    """

    def __init__(self, metric: str, identity: str, progress: Progress) -> None:
        self.metric, self.identity, self.progress = metric, identity, progress
        self.forgotten = ""
        """What to print where a value of an earlier start does not count any more."""
        found = progress.best
        if found is not None and (found["metric"], found["identity"]) != (metric, identity):
            self.forgotten = (
                f"the best {found['metric']} so far, {found['value']:.4g} at step {found['step']}, was measured "
                "otherwise: it does not count any more"
            )
            progress.best = None

    def better(self, metrics: Mapping[str, float]) -> str | None:
        """Note a value that is better than all before, and return a line about it; of equal values the first stays."""
        if self.metric not in metrics:  # all questions about one picture: there are no other latents to put in
            raise UserError(
                f"checkpoint.keep_best: {self.metric} cannot be measured on the questions of validation.path"
            )
        value, found = metrics[self.metric], self.progress.best
        if not math.isfinite(value):
            return None
        if found is not None and not self._beats(value, found["value"]):
            return None
        before = f", was {found['value']:.4g} at step {found['step']}" if found else ""
        step = self.progress.step
        self.progress.best = {"metric": self.metric, "value": value, "step": step, "identity": self.identity}
        return f"step {step}: best {self.metric} so far, {value:.4g}{before}"

    def _beats(self, value: float, other: float) -> bool:
        return value > other if VALIDATION_METRICS[self.metric] == "higher" else value < other
