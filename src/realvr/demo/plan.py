"""What the demo does: its settings and its steps with what each needs, as `choice` (``arms.yaml``) says. No torch.

Every path is relative to the folder of the demo, which may therefore be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realvr.demo.choice import Arm, Training, choice, product
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.evaluation.records import PREDICTIONS
from realvr.evaluation.scoring import ABLATIONS
from realvr.runs.files import Json

WORLD = Path("world")
ARMS = choice().arms
_START = 0.8
"""Seconds until a measurement has read its model and its data."""


@dataclass(frozen=True)
class DemoSettings:
    """Everything that decides the numbers; kept in ``demo_settings.json``."""

    quick: bool = False
    seed: int = 0
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of ``arms.yaml`` that have other values."""

    @property
    def numbers(self) -> dict[str, Any]:
        """Every number of ``arms.yaml`` that is in force."""
        return {name: both[self.quick] for name, both in choice().numbers.items()} | dict(self.changed)

    def __getitem__(self, name: str) -> Json:
        return self.numbers[name]

    def replaced(self, **changes: Any) -> DemoSettings:
        """The same with other numbers."""
        return DemoSettings(self.quick, self.seed, {**self.changed, **changes})

    def as_json(self) -> dict[str, Any]:
        """As ``demo_settings.json`` keeps it."""
        return {"quick": self.quick, "seed": self.seed, **self.numbers}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> DemoSettings:
        """Of an earlier run; only numbers that differ from the usual ones count as changed."""
        quick, seed = bool(stored["quick"]), int(stored["seed"])
        usual = cls(quick, seed).numbers
        return cls(
            quick, seed, {name: stored[name] for name in usual if name in stored and stored[name] != usual[name]}
        )


def quick_settings(seed: int = 0) -> DemoSettings:
    """Every step in seconds, for checking an installation; its numbers mean nothing."""
    return DemoSettings(quick=True, seed=seed)


@dataclass(frozen=True)
class Step:
    """One piece of work of one process. ``journals`` grow by a line per unit; together they reach ``units``."""

    name: str
    """Also the name of its mark in ``done/``, slashes as dashes."""
    title: str
    kind: str
    """The function of `realvr.demo.steps` that does it: draw, train, eval, diagnose or suite."""
    cost: float
    """Seconds on one core, as measured; only ever used to say how long the rest may take."""
    needs: tuple[str, ...] = ()
    arm: Arm | None = None
    journals: tuple[str, ...] = ()
    units: int = 0
    rough: bool = False
    """``units`` is only known roughly."""
    what: str = ""
    """Name of the drawing, or of the diagnostic."""
    training: Training | None = None
    out: str = ""


def steps_of(settings: DemoSettings) -> list[Step]:
    """All steps, in the order in which they are begun when nothing holds them up."""
    chosen, numbers = choice(), settings.numbers
    steps = []
    for drawing in chosen.drawings:
        cost = 0.5 + sum(numbers[split.count] * split.seconds for split in drawing.splits.values())
        steps.append(Step(drawing.name, drawing.title, "draw", cost, what=drawing.name))
    steps += [_training(settings, arm.training, arm) for arm in reversed(ARMS) if arm.training]
    # One long step that waits for no training: begun last, it would run alone.
    return [*steps, _suite(settings), *(step for arm in ARMS for step in _measurements(settings, arm))]


def _training(settings: DemoSettings, training: Training, arm: Arm) -> Step:
    recipe, out = choice().recipes[training.recipe], f"{arm.folder}/train"
    return Step(
        training.step,
        training.title,
        "train",
        recipe.cost.seconds(settings.numbers),
        (_drawn(choice().data),),
        arm,
        (f"{out}/metrics.jsonl",),
        settings[recipe.steps],
        training=training,
        out=out,
    )


def _drawn(split: str) -> str:
    """The step that draws a split."""
    return next(drawing.name for drawing in choice().drawings if split in drawing.splits)


def _measurements(settings: DemoSettings, arm: Arm) -> list[Step]:
    chosen, numbers, span = choice(), settings.numbers, bool(arm.latents)
    trained = (arm.training.step,) if arm.training else ()

    def step(kind: str, what: str, title: str, cost: float, splits: Iterable[str], **counted: Any) -> Step:
        drawn = tuple(dict.fromkeys(_drawn(split) for split in splits))
        out = f"{arm.folder}/{what}"
        journals = tuple(f"{out}/{journal}" for journal in counted.pop("journals"))
        return Step(
            f"{arm.folder}-{what}",
            f"{arm.name}: {title}",
            kind,
            _START + cost,
            (*drawn, *trained),
            arm,
            journals,
            what=what,
            out=out,
            **counted,
        )

    evaluation = chosen.evaluation
    questions, seconds = questions_of(settings), evaluation.seconds
    instead = questions * len(ABLATIONS) if span and arm.ablation else 0
    answers = questions + instead
    cost = questions * (seconds.span if span else seconds.direct) + instead * seconds.instead
    splits = [BENCHMARKS.get(name).stand_in for name in evaluation.benchmarks]
    steps = [step("eval", "eval", evaluation.title, cost, splits, journals=(PREDICTIONS,), units=answers)]
    for name in arm.diagnostics:
        one = chosen.diagnostics[name]
        units = round(product(one.units.span if span else one.units.direct, numbers))
        counted = {"journals": one.journals, "units": units if one.journals else 0, "rough": one.rough}
        steps.append(step("diagnose", name, one.title, one.seconds * units, [one.data], **counted))
    return steps


def _suite(settings: DemoSettings) -> Step:
    """The diagnostics that are run together."""
    suite = choice().suite
    arm = next(arm for arm in ARMS if arm.name == suite.arm)
    trained = (arm.training.step,) if arm.training else ()
    units = len(suite.tests) * settings[suite.limit]
    return Step(
        suite.folder,
        f"{arm.name}: {suite.title}",
        "suite",
        _START + suite.start * len(suite.tests) + suite.seconds * units,
        (_drawn(suite.data), *trained),
        arm,
        tuple(f"{suite.folder}/{test}.jsonl" for test in suite.tests),
        units,
        rough=True,
        out=suite.folder,
    )


def questions_of(settings: DemoSettings) -> int:
    """Questions of all benchmarks, as they are asked."""
    chosen = choice()
    return sum(
        settings[chosen.split(BENCHMARKS.get(name).stand_in).count] * each
        for name, each in chosen.evaluation.benchmarks.items()
    )
