"""What the seam of diagnostics is made of beside `Diagnostic` itself: needs, settings, batches, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_origin, overload

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from realvr.diagnostics.states import Rows, StateFiles
from realvr.errors import UserError
from realvr.widgets import Cell
from realvr.widgets.browser import Measured

Item = Any
"""A `realvr.data.sample.Sample`, or a `realvr.diagnostics.pairs.Pair` where the diagnostic needs pairs."""
Summary = dict[str, Any]
"""Numbers with their n and intervals; JSON values. `numbers` has the usual ones: `rate`, `mean`, `macro`."""
OwnSummary = Any
"""A `Summary` in the shape that one diagnostic gives it: a dict, typed where that diagnostic is written."""


DETAILED = 12
"""Samples whose records hold detail for the case browser, where a run has not chosen its cases."""


class Skip(UserError):
    """A diagnostic cannot say anything about this model or data, and why. A suite of tests shows the reason and goes
    on; a run of this one ends with it."""


@dataclass(frozen=True)
class Needs:
    """What a diagnostic cannot do without. The run refuses data or a model that lacks it, with what to do."""

    pairs: bool = False
    """Counterfactual pairs: `measure` gets pairs instead of samples."""
    boxes: bool = False
    """Evidence boxes: samples without any are left out and counted."""
    span: bool = False
    """A checkpoint that was trained with latent slots."""
    second_model: bool = False
    """Another model beside the first: ``--second-model``, `Model.second`."""
    may_compare: bool = False
    """``--second-model`` is taken where it is given: any model, with its own K or without a span."""
    untrained: bool = False
    """Beside ``span``: an explicit ``--latents K`` is taken for a checkpoint without latent markers of its own, too;
    those that were added when it was read have not been trained."""
    singles: bool = False
    """Beside ``pairs``: samples that are no view of a pair are taken as well, as `realvr.diagnostics.pairs.Single`."""

    @property
    def data(self) -> tuple[bool, bool, bool]:
        """What decides which data it gets: diagnostics that differ here cannot share a reading."""
        return self.pairs, self.singles, self.boxes

    def __str__(self) -> str:
        words = {"pairs": "counterfactual pairs", "boxes": "evidence boxes", "span": "a trained latent span"}
        words |= {"second_model": "a second model"}
        if self.singles:
            del words["pairs"]
        return ", ".join(text for name, text in words.items() if getattr(self, name)) or "any questions"


class DiagnosticSettings(BaseModel):
    """Base of a diagnostic's own settings: typed fields, each with a default. They become options of the verb."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: object) -> object:
        """A setting with several values may be one text with commas, as ``--set`` has it."""
        if not isinstance(values, Mapping):
            return values
        several = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {
            name: tuple(part.strip() for part in value.split(",") if part.strip())
            if name in several and isinstance(value, str)
            else value
            for name, value in values.items()
        }

    @model_validator(mode="wrap")
    @classmethod
    def _one_line(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """What is wrong with a setting, in one line, from the command line as from Python."""
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            known = f" (there are {', '.join(cls.model_fields) or 'none'})"
            unknown = first["type"] == "extra_forbidden"
            what = f"no such setting{known}" if unknown else f"{first['msg']} (got {first['input']!r})"
            raise UserError(f"{place}: {what}" if place else what) from None


class Samples(Sequence[Any]):
    """One batch, as `Diagnostic.measure` gets it: a sequence of samples or pairs.

    ``done`` holds the keys of records that an earlier run has left; a diagnostic with several records per sample may
    look there to measure less. What it yields again is not written twice. ``detailed`` holds the ids of samples whose
    records should have what the case browser draws (``"detail"``), which may be large. ``place`` is where the batch
    begins in the run, ``states`` where its hidden states may be kept.
    """

    def __init__(
        self,
        items: Sequence[Item],
        done: Collection[Hashable] = frozenset(),
        detailed: Collection[str] = frozenset(),
        place: int = 0,
        states: StateFiles | None = None,
    ) -> None:
        self.items, self.done, self.detailed = list(items), done, frozenset(detailed)
        self.place, self.states = place, states

    def keep(
        self, ids: Sequence[str], tensors: Mapping[str, Rows], several: Mapping[str, Sequence[Rows]] | None = None
    ) -> None:
        """Write hidden states of this batch, a row for each of ``ids`` (of ``several``: some rows for each); call it
        once, before the first record."""
        if self.states is not None:
            self.states.write(self.place, ids, tensors, several)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self.items[index]


@dataclass(frozen=True)
class Shown:
    """One model in a figure or table: its name, its summary, and the number that decides its colour."""

    name: str
    summary: OwnSummary
    number: int = 0
    panels: Callable[[Collection[str]], list[Measured]] | None = None
    """What all diagnostics have measured of this model's samples of these ids; see `realvr.diagnostics.panels`."""
    models: Mapping[str, str] = field(default_factory=dict)
    """What the page calls other models, by the hash of their weights."""


@dataclass(frozen=True)
class Highlight:
    """A number that stands for a diagnostic on the card of a model, and in the report's overview of several."""

    heading: str
    cell: Callable[[Any], Cell]
    """Of the summary."""
    note: str = ""
    """What it is, in a sentence below the table."""
    metric: str = ""
    """Metric of a training run that stands in where the diagnostic was not run."""
    overview: bool = True
    """Whether the report's overview has a column for it."""
