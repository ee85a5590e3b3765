"""``arms.yaml`` as types: the demo's choice of arms, trainings, benchmarks and diagnostics. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from realvr.runs.files import Json

Numbers = Mapping[str, Any]
"""The numbers of ``arms.yaml`` in force, by name."""
Factors = tuple[float | str, ...]
"""Numbers, and names of numbers, to be multiplied."""


class Part(BaseModel):
    """A part of ``arms.yaml``: a key that is not known here is a mistake there."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Split(Part):
    """A split of the embedded world."""

    count: str
    size: int
    format: Literal["all", "jsonl", "real"] = "real"
    easy: bool = False
    """Only the kinds of question that the packaged models know."""
    resize_pixels: int | None = None
    patch: int | None = None
    seconds: float


class Drawing(Part):
    """Splits that are drawn in one step."""

    name: str
    title: str
    splits: dict[str, Split]


class Cost(Part):
    """``start`` seconds and ``each`` times the product of ``times``."""

    start: float
    each: float
    times: Factors

    def seconds(self, numbers: Numbers) -> float:
        """Expected duration, for the progress bar and the order of work."""
        return self.start + self.each * product(self.times, numbers)


class Recipe(Part):
    """A training, as a settings file would say it."""

    command: str
    steps: str
    watch: str
    """The metric that is shown while it runs."""
    ends: tuple[str, ...]
    """Metrics of which summary.json has the first and the last steps."""
    cost: Cost
    settings: dict[str, Any]


class Training(Part):
    """One use of a recipe."""

    recipe: str
    step: str
    title: str
    settings: dict[str, Any] = {}
    """What is special about it."""


class Arm(Part):
    """One row of the comparison. ``model`` is what is evaluated: a packaged one, or what the demo trains."""

    name: str
    folder: str
    model: str = ""
    latents: int = -1
    training: Training | None = None
    ablation: bool = False
    """Whether it is also asked without a span and with latents that are not its own."""
    diagnostics: tuple[str, ...] = ()


class Answering(Part):
    """Seconds for an answer: with a latent span, without one, and with latents that are not the model's own."""

    span: float
    direct: float
    instead: float


class UnitsBySpan(Part):
    """Of an arm with a latent span, and of one that answers directly."""

    span: Factors
    direct: Factors


class Evaluation(Part):
    """Which benchmarks every arm is asked, and what an answer takes."""

    title: str
    batch: int
    benchmarks: dict[str, int]
    """Benchmark -> questions for each of the count of its split."""
    seconds: Answering


class Parts(Part):
    """Questions of a benchmark by the values of a tag, several of which may stand together."""

    tag: str
    groups: dict[str, tuple[str, ...]]


class Comparison(Part):
    """``pairs`` of arms (first, second): second minus first on the same questions. Without ``bench``: in the mean over
    the five tasks."""

    title: str
    bench: str = ""
    group: str = ""
    """One of the benchmark's `Parts`."""
    pairs: tuple[tuple[str, str], ...]


class Measurement(Part):
    """A diagnostic of the registry, and how the demo runs it."""

    title: str
    beside: tuple[str, ...] = ()
    data: str
    run: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    journals: tuple[str, ...] = ()
    units: UnitsBySpan
    rough: bool = False
    """The number of units is only known roughly."""
    seconds: float


class SuiteChoice(Part):
    """Diagnostics that are run together on the model of one arm, with their figures."""

    title: str
    folder: str
    arm: str
    data: str
    limit: str
    """The number that says how many samples each takes; of pairs, how many of each edit."""
    tests: tuple[str, ...]
    settings: dict[str, dict[str, Any]] = {}
    start: float
    """Seconds of each test whatever its samples: what it prepares, its summary and its figures."""
    seconds: float
    """Of each test and sample."""


class Column(Part):
    """A column of a closing table: where its number stands in ``summary.json``, and how it is written."""

    heading: str
    value: tuple[tuple[str, ...], ...]
    key: str
    form: str = "{:.1f}"
    scale: float = 1
    read: str = ""
    """Key of the share of readable replies."""


class TableChoice(Part):
    """A closing table of some arms."""

    title: str
    arms: tuple[str, ...]
    columns: tuple[Column, ...]
    inline: bool = False
    """Intervals beside the numbers instead of below them."""
    legend: str


class EachArm(Part):
    """A closing line with one number of every arm."""

    text: str
    value: tuple[str, ...]
    key: str
    scale: float = 1


class Notes(Part):
    """The closing lines: what the numbers do and do not show."""

    quick: str
    first: tuple[str, ...]
    pairs: Factors
    within: str
    beyond: str
    each: EachArm
    unused: str
    broken: str
    conditions: dict[str, str]
    last: tuple[str, ...]


class Choice(Part):
    """All of ``arms.yaml``."""

    numbers: dict[str, tuple[Any, Any]]
    steps: str
    latents: int
    max_new: int
    drawings: tuple[Drawing, ...]
    data: str
    recipes: dict[str, Recipe]
    arms: tuple[Arm, ...]
    evaluation: Evaluation
    parts: dict[str, Parts]
    """By benchmark."""
    diagnostics: dict[str, Measurement]
    suite: SuiteChoice
    comparisons: tuple[Comparison, ...]
    findings: dict[str, dict[str, tuple[str, ...]]]
    """Numbers that lead: name -> name of a number -> where it stands in summary.json."""
    leading: tuple[str, ...]
    """Templates of the first lines, filled with the findings (`realvr.demo.leading`)."""
    tables: tuple[TableChoice, ...]
    notes: Notes

    def split(self, name: str) -> Split:
        """The split of this name, whichever step draws it."""
        return next(drawing.splits[name] for drawing in self.drawings if name in drawing.splits)


@cache
def choice() -> Choice:
    """The demo's choice."""
    content = yaml.safe_load(files("realvr.demo").joinpath("arms.yaml").read_text(encoding="utf-8"))
    found = Choice.model_validate(content)
    arms = tuple(
        arm.model_copy(
            update={
                "latents": found.latents if arm.latents < 0 else arm.latents,
                "model": f"{arm.folder}/train/final" if arm.training else arm.model,
            }
        )
        for arm in found.arms
    )
    return found.model_copy(update={"arms": arms})


def product(factors: Sequence[float | str], numbers: Numbers) -> float:
    """Numbers, and numbers by name, multiplied."""
    return prod(numbers[one] if isinstance(one, str) else one for one in factors)


def filled(value: Json, numbers: Numbers) -> Json:
    """A setting with ``$name`` replaced by the number of that name, everywhere inside it."""
    if isinstance(value, Mapping):
        return {key: filled(inner, numbers) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, numbers) for inner in value]
    return numbers[value[1:]] if isinstance(value, str) and value.startswith("$") else value
