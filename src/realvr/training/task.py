"""What the loop needs of the thing it trains, and nothing more. `realvr.training.method.Method` fulfils it.

The loop (``loop.py``) owns the engine, the optimizer, accumulation, checkpoints and logs. A method owns its data, its
rollouts and its loss. A method never calls ``backward``; the loop never looks into a batch.

Scaling contract. ``module(microbatch)`` returns the sum of this microbatch's terms divided by the normaliser of the
*whole optimizer step*: all ranks and all accumulated microbatches together. Adding the losses of all microbatches on
all ranks therefore gives the loss of the step, whatever the split: 2 x B accumulated equals 1 x 2B, and two ranks
equal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from realvr.training.engine import Ranks
from realvr.training.metrics import Metrics
from realvr.training.records import About

__all__ = ["Collected", "Metrics", "Ranks", "Task"]


B = TypeVar("B")


@dataclass
class Collected(Generic[B]):
    """One optimizer step's work on this rank. Every rank returns the same number of microbatches."""

    microbatches: list[B]
    metrics: Metrics = field(default_factory=dict)
    """What is known before the forward passes: rewards, lengths, group statistics."""
    table: list[dict[str, Any]] = field(default_factory=list)
    """A few sampled completions to show, JSON-compatible."""


class Task(Protocol):
    """Something to train."""

    @property
    def module(self) -> nn.Module:
        """The whole differentiable step as one module: ``module(microbatch, term=None) -> (loss, metrics)``. With
        ``term`` set to one of ``term_names`` the loss is that term alone, for gradient norms apart."""
        ...

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the terms of the loss, as metrics and logs call them."""
        ...

    def collect(self, step: int) -> Collected[Any]:
        """Read data, roll out, score, gather across ranks: everything of step ``step`` that needs no gradient."""
        ...

    def after_update(self) -> None:
        """Called after each update of the parameters, not after a step that was skipped."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What must survive a kill beside model, optimizer and RNG: data position, banks. JSON values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...

    def redistribute(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank, from those of all ranks of a checkpoint that another number of them has written."""
        ...

    def export(self, directory: Path) -> None:
        """Write the trained model as a plain HF directory."""
        ...

    def about(self) -> About | None:
        """What the run records about it in ``method.json``; None: nothing."""
        ...

    def close(self) -> None:
        """End what the task has started, such as worker processes."""
        ...
