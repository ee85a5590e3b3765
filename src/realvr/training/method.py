"""What a training method is: one class, in one file, that the loop drives.

A method belongs to a stage (``sft``, ``rl``, ``base``), has typed settings of its own (``Config``, the ``method``
section of a settings file) and two halves: `Method.collect` is everything of a step without gradient, `Method.terms`
everything with gradient. The sum of weight times loss over the terms is the loss of the step; `Step` is that sum as the
one module that an engine wraps.

Scaling: each loss is this microbatch's part divided by the normaliser of the *whole optimizer step*, all ranks and all
microbatches together (see ``task.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from typing_extensions import override

from realvr.backbone.automatic import announcement
from realvr.backbone.backbone import Backbone
from realvr.errors import UserError
from realvr.maths import objective
from realvr.registry import Registry, place_of
from realvr.runs.hashes import digests
from realvr.training.dropping import Draws
from realvr.training.engine import Engine
from realvr.training.examples import share_of_batch
from realvr.training.lanes import same_on_all
from realvr.training.metrics import odd_metric, on_device
from realvr.training.records import About, Metric, about
from realvr.training.sections import MethodConfig, settled, switched_on
from realvr.training.settings import RlSettings, SftSettings, StageSettings
from realvr.training.sources import TrainingData, training_data
from realvr.training.task import Collected, Metrics, Ranks

S = TypeVar("S", bound=StageSettings)
C = TypeVar("C", bound=MethodConfig)
B = TypeVar("B")


@dataclass(frozen=True)
class Term:
    """One term of the loss, on one microbatch."""

    name: str
    weight: float
    loss: Tensor
    share: float | Tensor
    """This microbatch's part of the step's normaliser; over the step they add up to 1."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Run(Generic[S]):
    """What a method trains in: settings, processes, data."""

    settings: S
    ranks: Ranks
    data: TrainingData
    dry: bool = False
    """Whether the first batch is all that will be made."""


class Method(Generic[S, C, B]):
    """A training method. Subclasses define ``name``, ``stage``, ``Config``, ``term_names``, `collect` and `terms`.

    ``B`` is the type of a microbatch. A microbatch with ``names`` has its examples named when something goes wrong.
    """

    name: ClassVar[str]
    """As settings call it: ``method: {type: NAME}``."""
    aliases: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 1000
    """Place in lists."""
    stage: ClassVar[str]
    """The verb it belongs to: ``sft``, ``rl`` or ``base``."""
    Config: ClassVar[type[MethodConfig]]
    """Its settings."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings that make the method what it is: filled in, and refused where they are given otherwise. A name without a
    dot is one of the method's own, ``model.latents`` one of that section."""
    metrics: ClassVar[Sequence[Metric]] = ()
    """What it records that a report should show, with titles and descriptions; ``method.json`` of a run holds them. By
    default what other methods of the stage record."""
    span: ClassVar[bool] = True
    """Whether the model learns to answer behind its latent span; validation then asks with it."""
    term_names: tuple[str, ...]
    """Names of its terms; the gradient norm of each can be measured alone."""

    def __init__(self, backbone: Backbone, config: C) -> None:
        """Enough for `terms`. What `collect` needs comes with `begin`."""
        self.backbone = backbone
        self.config = settled(config, backbone)

    def begin(self, run: Run[S]) -> None:
        """Open the data and prepare the model for training; called once, before the first step."""
        self.settings, self.ranks, self.data = run.settings, run.ranks, run.data
        self.share = share_of_batch(run.settings, run.ranks)
        """Of ``optim.batch``, how many are this rank's."""
        self.draws = Draws()
        """Rows drawn, and why some of them could not be used."""

    # ------------------------------------------------------------------ one step

    def collect(self, step: int) -> Collected[B]:
        """Everything of step ``step`` without gradient: data, rollouts, rewards, targets, teachers."""
        raise NotImplementedError

    def terms(self, batch: B) -> Iterator[Term]:
        """Everything with gradient: the terms of the loss on one microbatch, with their weights and metrics."""
        raise NotImplementedError

    def after_update(self) -> None:
        """Called after each update of the parameters, not after a step that was skipped: EMA teachers move here."""

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What must survive a kill beside model, optimizer and generators. JSON values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""

    def redistribute(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this rank, from those of all ranks of a checkpoint that another number of them has written.

        By default what is the same on all ranks. A method whose ranks differ overrides this.
        """
        return same_on_all(states, f"{place_of(type(self))}: method '{self.name}'")

    def reference(self) -> AbstractContextManager[Backbone]:
        """A frozen policy that the method compares with, such as the start of the run."""
        raise UserError(f"method '{self.name}' has no reference policy")

    def modules(self) -> dict[str, nn.Module]:
        """The modules that are trained; ``model`` is the backbone's."""
        return {"model": self.backbone.model}

    @cached_property
    def module(self) -> Step:
        """The whole differentiable step, for the engine to wrap."""
        return Step(self)

    # ------------------------------------------------------------------ life of a run

    @classmethod
    def check(cls, settings: S) -> None:
        """Raise ValueError where settings of several sections make no sense together."""

    @classmethod
    def check_start(cls, settings: S) -> None:
        """Raise UserError where the model is no start for this method. Nothing has been read yet."""

    @classmethod
    def check_data(cls, settings: S, data: TrainingData, ranks: Ranks) -> None:
        """Raise UserError where the data is no use for this method. The model has not been read yet."""

    def export(self, directory: Path) -> None:
        """Write the trained model as a plain HF directory."""
        self.backbone.save(directory)

    def close(self) -> None:
        """End what the method has started, such as worker processes."""

    @classmethod
    @cache  # the file as it was loaded, also where somebody edits it while the run goes on
    def about(cls) -> About:
        """What a run records about its method: ``method.json``, and ``method`` in ``run.json`` of a checkpoint."""
        file = Path(place_of(cls).rpartition(":")[0])
        summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        found = about(cls.stage, cls.name, cls.metrics)
        return {**found, "summary": summary, "file": str(file), "sha256": digests([file])[file.name]}


class Step(nn.Module):
    """``forward(microbatch, term=None) -> (loss, metrics)``: the sum of weight times loss over the method's terms; with
    ``term`` that term alone. See the contract in ``task.py``."""

    def __init__(self, method: Method[Any, Any, Any]) -> None:
        super().__init__()
        for name, module in method.modules().items():  # registers the parameters with whatever engine wraps this
            self.add_module(name, module)
        self.method = method

    @override
    def forward(self, microbatch: object, term: str | None = None) -> tuple[Tensor, Metrics]:
        terms: dict[str, tuple[float, Tensor]] = {}
        metrics: Metrics = {}
        given: Any = self.method.terms(microbatch)
        if given is None:
            raise UserError(f"{place_of(type(self.method))}: terms() yields nothing: yield Term(...) for each term")
        for found in given:
            self._refuse_odd(found)
            if term in (None, found.name):
                share = on_device(found.share, found.loss.device)
                terms[found.name] = found.weight, found.loss
                metrics.setdefault("loss", (found.loss, share))
                metrics |= {f"loss/{found.name}": (found.loss, share), **found.metrics}
            if term == found.name:
                break
        if not terms:  # this batch has no such term: nothing, with a gradient of zero
            whole = (p for p in self.parameters() if p.requires_grad and type(p) is nn.Parameter)  # not in shards now
            anchor = next(whole, torch.zeros((), requires_grad=True))
            return anchor.sum() * 0.0, {}
        loss = objective.total(terms)
        metrics["loss"] = (loss, metrics["loss"][1])
        return loss, {name: (value.detach().float(), count) for name, (value, count) in metrics.items()}

    def _refuse_odd(self, found: object) -> None:
        """What a method from outside may get wrong, with the place of its class."""
        place, listed = f"{place_of(type(self.method))}: terms()", ", ".join(self.method.term_names)
        if not isinstance(found, Term):
            raise UserError(f"{place} yields {type(found).__name__}, not Term(name, weight, loss, share, metrics)")
        if found.name not in self.method.term_names:
            raise UserError(f"{place} gives '{found.name}', term_names lists {listed}")
        if not isinstance(found.loss, Tensor):
            raise UserError(f"{place}: the loss of '{found.name}' is {type(found.loss).__name__}, not a tensor")
        if name := odd_metric(found.metrics):
            raise UserError(f"{place}: metric '{name}' is no pair of tensors (sum, count)")


def _complaint(method: type[Method[Any, Any, Any]]) -> str:
    """What is wrong with a class that has all that a method needs; '' where nothing is."""
    if not (isinstance(method.Config, type) and issubclass(method.Config, MethodConfig)):
        return "Config is no subclass of realvr.training.sections.MethodConfig"
    for listed in ("term_names", "aliases"):
        names = getattr(method, listed)
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            return f"{listed} is {names!r}; write a tuple of names, such as ('fit',)"
    for key in method.fixed:  # one with a dot is a setting of its stage
        if "." not in key and key not in method.Config.model_fields:
            return f"fixed names '{key}', which {method.Config.__name__} does not have"
    try:
        TypeAdapter(list[Metric]).validate_python(list(method.metrics))
    except ValueError:
        return "metrics is no list of {'name': ..., 'title': ..., 'description': ...}"
    return ""


METHODS: Registry[Method[Any, Any, Any]] = Registry(
    "method",
    Method,
    "realvr.training.methods",
    required=("stage", "Config", "term_names", "collect", "terms"),
    check=_complaint,
)
"""All methods: those of this package and those of ``--plugin`` files."""


def build(settings: StageSettings, ranks: Ranks, dry: bool = False) -> Method[Any, Any, Any]:
    """The method that the settings name, its model and data loaded, ready for the loop. Every rank calls it.

    Files that cannot be used are found before the model is read, which may take minutes.
    """
    from realvr.training.memory import refuse_before_loading
    from realvr.training.method_settings import find_method
    from realvr.training.models import load_backbone

    method = find_method(settings.stage, settings.method.type)
    method.check_start(settings)
    data = training_data(settings, ranks)
    method.check_data(settings, data, ranks)
    refuse_before_loading(ranks, settings)
    asked, own = settings.model, settings.method
    backbone = load_backbone(settings, ranks)
    settings.method = settled(own, backbone, ("recorded_span",) if _drops(settings) else ())
    chosen = [*switched_on(asked, settings.model), *switched_on(own, settings.method)]
    if isinstance(settings, SftSettings | RlSettings):
        lora = settings.lora
        settings.lora = settled(lora, backbone, ("kernels",) if _gathers_layers(ranks) else ())
        chosen += switched_on(lora, settings.lora)
    if chosen and ranks.rank == 0:
        print(announcement(chosen), file=sys.stderr, flush=True)
    made = method(backbone, settings.method)
    made.begin(Run(settings, ranks, data, dry))
    return made


def _gathers_layers(ranks: Ranks) -> bool:
    """Whether the engine gathers the parts of an adapted layer in hooks of their own, which kernels go past."""
    return isinstance(ranks, Engine) and ranks.settings.type == "zero3"


def _drops(settings: StageSettings) -> bool:
    """Whether adapters have dropout, which no CUDA graph takes."""
    lora = getattr(settings, "lora", None)
    return lora is not None and lora.rank > 0 and lora.dropout > 0
