"""Settings of the three trainings, each one YAML file: Stage 1 (``sft``), Stage 2 (``rl``) and base training.

Sections stand here and in ``sections.py``; what belongs to a method stands with it (``methods/``) and is read into
``method``. Defaults are those of the paper's tables tab:hp-sft and tab:hp-rl. Read by ``configuration.load_settings``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from realvr.training import method_settings
from realvr.training.sections import (
    NEED_EFFECTS,
    CheckpointSettings,
    DataSettings,
    DiagnoseSettings,
    LogSettings,
    LoraSettings,
    MethodConfig,
    ModelSettings,
    OptimSettings,
    Section,
    SourceSettings,
    ValidationSettings,
)

__all__ = [
    "BaseModelSettings",
    "BaseOptimSettings",
    "BaseSettings",
    "CheckpointSettings",
    "DataSettings",
    "LogSettings",
    "LoraSettings",
    "MethodConfig",
    "ModelSettings",
    "OptimSettings",
    "Origin",
    "RlModelSettings",
    "RlOptimSettings",
    "RlSettings",
    "DiagnoseSettings",
    "Section",
    "SftOptimSettings",
    "SftSettings",
    "SourceSettings",
    "StageSettings",
    "TrainSettings",
    "ValidationSettings",
]


class SftOptimSettings(OptimSettings):
    """AdamW, its schedule, and how much data one step takes."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    steps: int = Field(default=1000, ge=1)
    """Optimizer steps of the run (the paper does not say how many)."""


class RlOptimSettings(OptimSettings):
    """AdamW, its schedule, and how much data one step takes."""

    lr: float = Field(default=5e-7, gt=0)
    """Peak learning rate."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""


class BaseOptimSettings(OptimSettings):
    """AdamW, its schedule, and how much data one step takes."""

    lr: float = Field(default=8e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's two moments."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled weight decay. Applies to matrices; never to norms, biases and embeddings."""
    warmup: float = Field(default=300, ge=0)
    """Linear warm-up from 0: below 1 a share of all steps, from 1 on a number of steps."""
    steps: int = Field(default=2400, ge=1)
    """Optimizer steps of the run."""
    microbatch: int = Field(default=64, ge=1)
    """Of ``batch``, how many one rank passes through the model at a time; the rest is accumulated."""


class BaseModelSettings(ModelSettings):
    """The model to start from."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights and of the computation."""


class RlModelSettings(ModelSettings):
    """The model to start from."""

    latents: int | None = Field(default=None, ge=0)
    """K, the number of latent slots. None: the K that the checkpoint was trained with; a file that says another is
    refused, a flag overrides it. 0 means no latent span."""


@dataclass(frozen=True)
class Origin:
    """Where settings came from. Settings that say the same are equal, wherever they came from."""

    file: str | None = field(default=None, compare=False)
    flags: frozenset[str] = field(default=frozenset(), compare=False)
    """Dotted names of those given on the command line."""


class TrainSettings(Section):
    """What every training has."""

    encodes_ahead: ClassVar[bool] = False
    """Whether the stage can use ``data.workers`` without ``data.keep_encoded``."""
    frozen_vision: ClassVar[bool] = False
    """Whether the stage can use ``data.keep_features``."""
    _origin: Origin = PrivateAttr(default_factory=Origin)
    model: ModelSettings
    """The model to start from."""
    data: DataSettings
    """Training data and the order in which it comes."""
    run: DiagnoseSettings
    """Where the run lives and when it gives up."""
    engine: str = "ddp"
    """How several processes train together: the name of a packaged engine file, or the path of one."""
    optim: OptimSettings = OptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints that a killed run continues from."""
    log: LogSettings = LogSettings()
    """What is recorded, and how often."""
    validation: ValidationSettings = ValidationSettings()
    """Held-out questions that the current model answers while it trains. Off unless ``path`` is given."""

    @property
    def origin(self) -> Origin:
        """Where the settings came from."""
        return self._origin

    def came_from(self, origin: Origin) -> Self:
        """Note where the settings came from."""
        self._origin = origin
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Self:
        metric, validation = self.checkpoint.keep_best, self.validation
        if metric is not None and validation.path is None:
            raise ValueError(f"checkpoint.keep_best: {metric} needs held-out questions: give validation.path")
        if metric in NEED_EFFECTS and not validation.effects:
            raise ValueError(f"checkpoint.keep_best: {metric} is measured with validation.effects: true")
        return self

    @model_validator(mode="after")
    def _workers_work(self) -> Self:
        if self.data.workers and not (self.encodes_ahead or self.data.keep_encoded):
            raise ValueError("data.workers needs data.keep_encoded in this stage: they encode everything at the start")
        if self.data.keep_features and not self.frozen_vision:
            raise ValueError("data.keep_features is for Stage 1: leave it out")
        if self.data.keep_features and not (self.data.keep_encoded and self.data.workers):
            raise ValueError("data.keep_features needs data.keep_encoded and data.workers: all is encoded at the start")
        return self


class StageSettings(TrainSettings):
    """What a training has beside the settings of its method."""

    stage: ClassVar[str]
    default_method: ClassVar[str]
    method: SerializeAsAny[MethodConfig]
    """The method and its settings."""

    @model_validator(mode="before")
    @classmethod
    def _arrange(cls, raw: object) -> object:
        """Also accept the method by its name alone, and its settings without the section."""
        return method_settings.arrange(cls, raw) if isinstance(raw, dict) else raw

    @field_validator("method", mode="before")
    @classmethod
    def _typed(cls, value: object) -> object:
        """Settings of a method are checked by its own class."""
        if not isinstance(value, dict):
            return value
        return method_settings.find_method(cls.stage, value["type"]).Config.model_validate(value)

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        method_settings.find_method(self.stage, self.method.type).check(self)
        return self


class SftSettings(StageSettings):
    """Stage 1: target-conditioned visual supervision (LVR-SFT)."""

    stage: ClassVar[str] = "sft"
    default_method: ClassVar[str] = "lvr-sft"
    frozen_vision: ClassVar[bool] = True
    optim: SftOptimSettings = SftOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters (peft)."""


class RlSettings(StageSettings):
    """Stage 2: free-running outcome optimization (LVR-RL), with the evidence loss (ReaLVR)."""

    stage: ClassVar[str] = "rl"
    default_method: ClassVar[str] = "realvr"
    model: RlModelSettings
    """The model to start from."""
    optim: RlOptimSettings = RlOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters (peft)."""


class BaseSettings(StageSettings):
    """Base training: all parameters, vision included, with next-token, caption and dense auxiliary losses."""

    stage: ClassVar[str] = "base"
    default_method: ClassVar[str] = "base"
    encodes_ahead: ClassVar[bool] = True
    model: BaseModelSettings
    """The model to start from."""
    optim: BaseOptimSettings = BaseOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
