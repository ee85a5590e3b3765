"""Rows that training cannot use: counted when they are drawn, written to ``data.json``, and bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from realvr.errors import UserError
from realvr.training.engine import Engine
from realvr.training.records import DATA_FILE, DataUse
from realvr.training.settings import StageSettings, TrainSettings
from realvr.training.sources import RECORD, TrainingData, above, check_command
from realvr.training.targets import SEVERAL_IMAGES, TOO_MANY_BOXES
from realvr.training.task import Ranks

TOO_LONG = "too_long"
UNREADABLE_IMAGE = "unreadable_image"
EMPTY_ANSWER = "empty_answer"
ENOUGH = 200
"""Rows drawn before their dropped share is judged."""


@dataclass
class Draws:
    """Rows that were drawn, and why some of them could not be used."""

    drawn: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """Where each reason was met first."""
    what: str = "drawn could not be encoded"

    def reject(self, reason: str, detail: str) -> None:
        """Count a row that was drawn and cannot be used."""
        self.rejected[reason] += 1
        self.first.setdefault(reason, detail)

    def add(self, other: Draws) -> None:
        """Count what another process, or another step, has drawn."""
        self.drawn += other.drawn
        self.rejected += other.rejected
        self.first = other.first | self.first

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run counts on."""
        return {"drawn": self.drawn, "rejected": dict(self.rejected), "first": dict(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting; states of earlier versions hold the rejected rows only."""
        self.drawn = int(state.get("drawn", 0))
        self.rejected, self.first = Counter(state["rejected"]), dict(state.get("first", {}))

    def metrics(self, device: torch.device, world: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows drawn since the start, over all ranks, and rejected, per rank."""
        drawn, each, rejected, one = torch.tensor(
            [float(self.drawn), 1 / world, float(self.rejected.total()), 1.0], device=device
        )
        return {"data/drawn": (drawn, each), "data/rejected_per_rank": (rejected, one)}

    def line(self) -> str:
        """In words."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.rejected.most_common())
        return f"{self.rejected.total():,} of {self.drawn:,} rows {self.what}: {reasons}"


def over(draws: Draws, most: float) -> bool:
    """Whether more rows failed than a share ``most``, judged once enough were drawn."""
    return draws.drawn >= ENOUGH and draws.rejected.total() > most * draws.drawn


def of_all_ranks(ranks: Ranks, draws: Draws) -> Draws:
    """The draws of all ranks, each of which calls this."""
    total = Draws()
    for part in ranks.gather_objects(draws):
        total.add(part)
    return total


def too_many(draws: Draws, settings: TrainSettings, when: str) -> UserError:
    """Why a run stops over rows that cannot be encoded, and the ways out."""
    share, most = draws.rejected.total() / draws.drawn, settings.data.max_dropped
    worst = draws.rejected.most_common(1)[0][0]
    ways = [text for reason, text in _remedies(settings).items() if reason in draws.rejected]
    verdict = "none can be used"
    if share < 1:
        verdict = f"that is {share:.1%}, data.max_dropped allows {most:.1%}"
        ways.append(f"--data.max-dropped {above(share)} trains on the others")
    return UserError(f"stopped {when}: {draws.line()} (first: {draws.first[worst]}); {verdict}. {'; '.join(ways)}")


def _remedies(settings: TrainSettings) -> dict[str, str]:
    own = type(settings.method).model_fields if isinstance(settings, StageSettings) else {}
    limit = next((f"method.{name}" for name in ("pack_tokens", "max_prompt") if name in own), None)
    checks = ", ".join(f"`{check_command(source)}`" for source in settings.data.sources)
    return {
        TOO_LONG: f"raise {limit}, or lower model.max_tokens" if limit else "lower model.max_tokens",
        UNREADABLE_IMAGE: f"{checks} opens every image",
        TOO_MANY_BOXES: "raise model.latents, or set method.too_many_boxes thin",
        SEVERAL_IMAGES: "set ordered: false on a source whose boxes are no trails, for targets in reading order",
        EMPTY_ANSWER: "answers must name one of the options, or hold at least one letter or digit",
    }


@runtime_checkable
class ReadsData(Protocol):
    """A task that draws rows from files."""

    data: TrainingData
    draws: Draws


class DataRecord:
    """``data.json`` of a run, and the limit on rows that turn out unusable when they are encoded.

    Does nothing for a task that reads no files. Every rank calls every method.
    """

    def __init__(self, task: object, settings: TrainSettings, engine: Engine) -> None:
        self.task = task if isinstance(task, ReadsData) else None
        self.settings, self.engine = settings, engine
        self.draws = self._of_all_ranks()
        """Of all ranks, up to the last step."""

    def after_step(self, step: int) -> list[str]:
        """Sum up the draws of all ranks; returns what to print: each reason when it is first met. Raises over the
        limit."""
        if self.task is None:
            return []
        before = set(self.draws.rejected)
        self.draws = self._of_all_ranks()
        new = [reason for reason in self.draws.rejected if reason not in before]
        if over(self.draws, self.settings.data.max_dropped):
            self.write(step)
            raise too_many(self.draws, self.settings, f"after step {step}")
        return [f"step {step}: a row could not be encoded: {reason} ({self.draws.first[reason]})" for reason in new]

    def failed(self, step: int) -> None:
        """Write what is known after a step that failed: the draws of this process, as the others may be gone."""
        if self.task is not None and self.engine.world == 1:
            self.draws = self.task.draws
        self.write(step)

    def _of_all_ranks(self) -> Draws:
        return of_all_ranks(self.engine, self.task.draws) if self.task is not None else Draws()

    def write(self, step: int) -> None:
        """Write ``data.json`` from the main process."""
        if self.task is None or not self.engine.main:
            return
        data = self.task.data
        content: DataUse = {
            "max_dropped": self.settings.data.max_dropped,
            "sources": data.census.to_json(),
            "encoding": {"step": step, **self.draws.state_dict()},
            "images": len(data.fingerprint.images),
            "files": data.fingerprint.files,
        }
        path = self.settings.run.out / RECORD
        try:
            DATA_FILE.dump(path, content)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None

    def last_words(self) -> list[str]:
        """What to print at the end of a run."""
        return [f"data: {self.draws.line()}"] if self.draws.rejected else []
