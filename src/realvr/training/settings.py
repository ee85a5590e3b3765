"""Settings of the three trainings, each one YAML file: Stage 1 (``sft``), Stage 2 (``rl``) and base training.

Defaults are those of the paper's tables tab:hp-sft and tab:hp-rl. Read by ``configuration.load_settings``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from realvr.training import methods
from realvr.training.methods import Method, Objective, Routing
from realvr.training.sections import (
    CheckpointSettings,
    DataSettings,
    LogSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    RunSettings,
    Section,
    SourceSettings,
)

__all__ = [
    "BaseModelSettings",
    "BaseOptimSettings",
    "BaseSettings",
    "CheckpointSettings",
    "DataSettings",
    "LogSettings",
    "LoraSettings",
    "ModelSettings",
    "OptimSettings",
    "Origin",
    "RlModelSettings",
    "RlOptimSettings",
    "RlSettings",
    "RunSettings",
    "Section",
    "SftOptimSettings",
    "SftSettings",
    "SourceSettings",
    "TrainSettings",
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
    _origin: Origin = PrivateAttr(default_factory=Origin)
    model: ModelSettings
    """The model to start from."""
    data: DataSettings
    """Training data and the order in which it comes."""
    run: RunSettings
    """Where the run lives and when it gives up."""
    optim: OptimSettings = OptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints that a killed run continues from."""
    log: LogSettings = LogSettings()
    """What is recorded, and how often."""

    @property
    def origin(self) -> Origin:
        """Where the settings came from."""
        return self._origin

    def came_from(self, origin: Origin) -> Self:
        """Note where the settings came from."""
        self._origin = origin
        return self

    @model_validator(mode="after")
    def _workers_work(self) -> Self:
        if self.data.workers and not (self.encodes_ahead or self.data.keep_encoded):
            raise ValueError("data.workers needs data.keep_encoded in this stage: they encode everything at the start")
        return self


class SftSettings(TrainSettings):
    """Stage 1: target-conditioned visual supervision (LVR-SFT)."""

    optim: SftOptimSettings = SftOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters (peft)."""
    reconstruction_weight: float = Field(default=0.1, ge=0)
    """Weight of the reconstruction loss beside the cross-entropy."""
    reconstruction_reduction: Literal["mean", "sum"] = "mean"
    """Over the width of a visual token: ``mean`` is the MSE of the paper's table, ``sum`` its equation."""
    pack_tokens: int = Field(default=4096, ge=1)
    """Length of a packed row; no example is longer."""
    position_jitter: int = Field(default=0, ge=0)
    """Largest random gap in the position ids around the latent span, so that another K works at inference. Not in the
    paper; 0 is off."""
    hide_image_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of examples whose text cannot see the image, so that answers must be read from the latents. Not in the
    paper; 0 is off."""
    spell_out: bool = False
    """Multiple choice: teach the answer in words before its letter, as base training does. Small models name what they
    see before they can match it with an option. The checkpoint remembers it: Stage 2 and latent exchange read an answer
    out in the same form. Not in the paper."""
    gradient_checkpointing: bool = True
    """Recompute the decoder layers in the backward pass instead of keeping their activations. Exact."""
    allow_no_evidence: bool = False
    """Train with latents although no row has an evidence box. The latents then learn nothing."""


class RlSettings(TrainSettings):
    """Stage 2: free-running outcome optimization (LVR-RL), with the evidence loss (ReaLVR)."""

    model: RlModelSettings
    """The model to start from."""
    optim: RlOptimSettings = RlOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters (peft)."""
    method: Method = "realvr"
    """Method or ablation of the paper by name: it sets the fields that define it (docs/training.md lists them). A field
    that contradicts it is refused; ``custom`` leaves all fields free."""
    group: int = Field(default=8, ge=1)
    """G, completions sampled per prompt."""
    temperature: float = Field(default=0.6, gt=0)
    """Sampling temperature; log-probabilities in the loss are taken at the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k most likely tokens; 0 is off."""
    max_new: int = Field(default=192, ge=1)
    """Most tokens of a completion."""
    stop_at_answer: bool = True
    """End a completion once it has written ``</answer>``. The paper's rollouts end with the end token or at the limit;
    off does the same."""
    max_prompt: int = Field(default=4096, ge=1)
    """Most tokens of a prompt, visual tokens included. A longer one first gets smaller images, where the family allows
    it; where that does not suffice it is left out and counted."""
    rewards: dict[str, float] = {"accuracy": 1.0, "format": 1.0}
    """Weight of each reward: ``accuracy``, ``format``, or a function of yours as ``path.py:function``."""
    clip: float = Field(default=0.2, ge=0, lt=1)
    """Clip range of the probability ratio."""
    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range where it differs from ``clip``."""
    reduction: Literal["grpo", "dr_grpo", "bnpo"] = "grpo"
    """How token terms become a loss: mean per sequence, sum over a constant length, or mean over all tokens."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting policy; 0 needs no reference pass."""
    updates_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps on one batch of rollouts."""
    lambda_ev: float = Field(default=0.2, ge=0)
    """Weight of the evidence loss; 0 is LVR-RL."""
    eta: float = Field(default=0.3, ge=0, le=1)
    """Share of the supervision that every latent gets; the rest follows the credit."""
    margin: float = Field(default=0.5, gt=0, le=2)
    """Target margin m of the hinge."""
    negatives: int = Field(default=16, ge=1)
    """N-, prototypes of other images that each example is held against."""
    bank: int = Field(default=1024, ge=0)
    """Recent prototypes kept to top up a batch with too few other images (the paper's batches need none)."""
    routing: Routing = "selective"
    """Credit of a latent: answer contrast, raw attention of the correct answer, or the same for all."""
    objective: Objective = "contrast"
    """Margin over the hardest negative, the same hinge without negatives, or plain 1 - cos."""
    mass_matched: bool = False
    """Weights of each example sum to 1, and every arm computes both branches (app:mass-matched-factorial)."""
    detach: bool = True
    """Stop the gradient at the weights."""
    on_policy: bool = True
    """Evidence loss on a regenerated trajectory; false: on the saved latents of the rollout."""
    memory: Literal["cached", "checkpointed-prefill", "checkpointed"] = "checkpointed-prefill"
    """What is recomputed in the backward pass: nothing, the prompt's layers, or the latent steps' too. All exact."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, settings: Any) -> Any:
        return methods.fill(settings) if isinstance(settings, dict) else settings

    @model_validator(mode="after")
    def _consistent(self) -> RlSettings:
        if self.group < 2:
            raise ValueError(
                f"group is {self.group}: a completion is judged against the others of its prompt, so at least 2 are "
                "needed"
            )
        if self.mass_matched and self.eta == 0:
            raise ValueError("mass_matched needs eta > 0: an example without credit would have no mass")
        if self.routing == "uniform" and not self.mass_matched and self.eta != 1:
            raise ValueError(f"routing 'uniform' gives every latent 1/K, which is eta = 1, but eta is {self.eta}")
        if self.lambda_ev > 0 and self.model.latents == 0:
            raise ValueError("an evidence loss (lambda_ev > 0) needs latents: model.latents is 0")
        if not any(self.rewards.values()):
            raise ValueError("rewards: no reward has a weight, so there is nothing to learn from")
        return self


class BaseSettings(TrainSettings):
    """Base training: all parameters, vision included, with next-token, caption and dense auxiliary losses."""

    encodes_ahead: ClassVar[bool] = True
    model: BaseModelSettings
    """The model to start from."""
    optim: BaseOptimSettings = BaseOptimSettings()
    """AdamW, its schedule, and how much data one step takes."""
    next_token_weight: float = Field(default=1.0, ge=0)
    """Weight of the next-token loss on the answer."""
    caption_weight: float = Field(default=1.0, ge=0)
    """Weight of the next-token loss on captions, for samples that have one."""
    caption_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the samples whose caption is used; each costs as much as a question."""
    dense_weight: float = Field(default=0.5, ge=0)
    """Weight of the auxiliary loss that predicts labels from single visual tokens, for samples that have them."""
    feature_norm_weight: float = Field(default=0.0, ge=0)
    """Weight of the squared distance of each visual token's root mean square from 1; 0 is off. Keeps visual tokens of a
    size that a latent can reconstruct."""
    position_jitter: int = Field(default=0, ge=0)
    """Largest random gap in the position ids, so that later stages may put latents there; 0 is off."""
