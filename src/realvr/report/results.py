"""What a report is made of: the results of one model after the other, as the other commands left them on the disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from realvr.diagnostics.results import Settings
from realvr.evaluation.results import AnySummary, EvalRecord
from realvr.runs.records import ResultFile, Text
from realvr.training.records import TrainingRun

Json = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """A folder of ``realvr eval``."""

    folder: Path
    file: Path
    """summary.json, or summary.POLICY.json."""
    summary: AnySummary
    record: EvalRecord
    """eval.json; empty where there is none."""

    @property
    def model(self) -> Json:
        """What answered: name, path, weights (a hash), family, latents and so on."""
        return dict(self.record.get("responder", {}))


@dataclass(frozen=True)
class Measurement:
    """What one diagnostic left in a folder."""

    name: str
    folder: Path
    file: Path
    summary: Any
    """Of the diagnostic's own type."""
    settings: Settings
    """Empty where there are none."""

    @property
    def model(self) -> Json:
        """What the records say about the model."""
        return dict(self.settings.get("model", {}))

    @property
    def alone(self) -> bool:
        """Whether it has a file of its own, and is no part of another diagnostic's."""
        return self.file.stem == self.name


Result = TrainingRun | Evaluation | Measurement


@dataclass
class Arm:
    """One model of the comparison and what is known about it."""

    name: str
    main: bool = True
    """Part of the headline comparison; the others are shown as further arms."""
    train: TrainingRun | None = None
    eval: Evaluation | None = None
    sweep: Evaluation | None = None
    """An evaluation that was only made for other numbers of latents."""
    diagnostics: dict[str, Measurement] = field(default_factory=dict)
    number: int = 0
    """Place in the report, which decides its colour."""

    def results(self) -> list[tuple[str, Result]]:
        """(kind, result) of everything there is, training first."""
        own: list[tuple[str, Result | None]] = [("train", self.train), ("eval", self.eval), ("sweep", self.sweep)]
        return [(kind, one) for kind, one in own if one is not None] + list(self.diagnostics.items())

    def has(self, result: Result) -> bool:
        """Whether there is a result of that kind."""
        if isinstance(result, Measurement):
            return result.name in self.diagnostics
        return (self.train if isinstance(result, TrainingRun) else self.eval) is not None

    def add(self, result: Result) -> None:
        """Take a result in the place of its kind."""
        if isinstance(result, Measurement):
            self.diagnostics[result.name] = result
        elif isinstance(result, TrainingRun):
            self.train = result
        else:
            self.eval = result


@dataclass
class Results:
    """Everything found, arms in display order."""

    arms: list[Arm]
    leading: list[str] = field(default_factory=list)
    """What the demo found, in a few lines."""
    notes: list[str] = field(default_factory=list)
    """What the demo has to say about its numbers."""
    demo: bool = False
    unfinished: list[Path] = field(default_factory=list)
    """Folders of evaluations without a summary."""
    foreign: list[tuple[Path, str]] = field(default_factory=list)
    """Folders with results of diagnostics that are not registered, and their names."""
    policy: str | None = None
    """The policy that was asked for; None: each run's own."""


class ArmEntry(TypedDict):
    """An arm in ``demo.json``: folders relative to the file, by kind; further keys are names of diagnostics."""

    name: Text
    train: NotRequired[Text | None]
    eval: NotRequired[Text | None]
    sweep: NotRequired[Text | None]


class ArmList(TypedDict):
    """``demo.json``: names and order of arms, what was found, and what to say about their numbers."""

    arms: list[ArmEntry]
    leading: NotRequired[list[Text] | None]
    notes: NotRequired[list[Text] | None]


def _paths(content: ArmList) -> None:
    for place, entry in enumerate(content["arms"]):
        odd = [key for key, value in entry.items() if value is not None and not isinstance(value, str)]
        if odd:
            raise ValueError(f"arms.{place}.{odd[0]}: no path")


ARMS_FILE = ResultFile(ArmList, "realvr demo", "run realvr demo again", check=_paths, author="realvr demo")
