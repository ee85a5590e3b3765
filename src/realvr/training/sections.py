"""Sections that the settings of every stage are composed of. Pydantic only: nothing here imports torch.

The docstring under each field is what ``--help`` shows. Sections are always present (``lora.rank = 0`` means no LoRA),
so that any value can be reached by a dotted flag. Where the paper gives a value it is the default; where it gives
none, the docstring says that the choice is ours.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, field_validator, model_validator
from typing_extensions import override

from realvr.backbone.automatic import TITLES, Switch, Where
from realvr.errors import UserError

if TYPE_CHECKING:
    from realvr.backbone.backbone import Backbone


class Section(BaseModel):
    """Settings that refuse keys they do not know."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def without_use(self) -> tuple[str, ...]:
        """Settings that may be ``auto`` and would do nothing beside the others."""
        return ()


def _switch(value: object) -> object:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValueError:
        raise ValueError("write true, false or auto") from None


Automatic = Annotated[Switch, BeforeValidator(_switch)]
"""A setting that is ``true``, ``false`` or ``auto`` (`realvr.backbone.automatic`)."""
S = TypeVar("S", bound=Section)


def settled(section: S, backbone: Backbone, without_use: tuple[str, ...] = ()) -> S:
    """The section with ``auto`` replaced by what it stands for with this model. ``without_use``: names of settings that
    settings of other sections leave nothing to do."""
    asked = [name for name in TITLES if getattr(section, name, None) == "auto"]
    if not asked:
        return section
    where, unused = Where.of(backbone), {*without_use, *section.without_use()}
    return section.model_copy(update={name: where.takes(name) and name not in unused for name in asked})


def switched_on(before: Section, after: Section) -> list[str]:
    """Settings that were ``auto`` and are on now."""
    return [name for name in TITLES if getattr(before, name, None) == "auto" and getattr(after, name) is True]


class ModelSettings(Section):
    """The model to start from."""

    path: str
    """Start: a directory, a hub id, or a packaged model (mini, mini-base, mini-direct, mini-short)."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Type of the weights and of the computation. With 16-bit types see also ``optim.master_weights``."""
    tf32: bool = False
    """On NVIDIA GPUs, multiply float32 matrices with 10-bit mantissas: several times faster, less exact."""
    latents: int | None = Field(default=8, ge=0)
    """K, the number of latent slots; it is stored in the trained checkpoint. 0 means no latent span. None: the
    checkpoint's."""
    min_tokens: int | None = Field(default=None, ge=1)
    """Least visual tokens per image (families whose token count follows the image size). None: the checkpoint's."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most visual tokens per image (families whose token count follows the image size). None: the checkpoint's."""
    tiles: bool | None = None
    """Whether large images are cut into tiles (InternVL). None: the checkpoint's, tiles where it says nothing."""
    max_tiles: int | None = Field(default=None, ge=1)
    """Most tiles of an image, its thumbnail not counted (InternVL). None: the checkpoint's."""
    fast_vision: bool = True
    """On a GPU in 16 bits, run the frozen vision tower in fewer kernels and over copies of its weights that are padded
    to a multiple of 8 (Qwen2.5-VL: 0.8 GiB), and upload pixels in 16 bits from pinned memory. The same numbers up to
    rounding."""
    fused_layers: Automatic = "auto"
    """Run norms, rotary embeddings and MLP gates of the decoder in 5 kernels a layer instead of 28, also fewer in the
    backward pass; on a GPU some are compiled at their first use. The same numbers up to rounding; in 16 bits they are
    rounded less often, which may send a token to other experts. ``auto``: on an NVIDIA GPU, unless the model is a
    mixture of experts or the engine shards it."""

    @model_validator(mode="after")
    def _ordered(self) -> ModelSettings:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")
        return self


class SourceSettings(Section):
    """One file or folder of training data."""

    path: str
    """File or folder in any format that ``realvr data check`` reads, or a dataset on the hub:
    ``hf:OWNER/NAME#SPLIT``."""
    format: str = "auto"
    """Name of the format; ``auto`` detects it."""
    weight: float = Field(default=1.0, ge=0)
    """Share of the draws, relative to the other sources; 0 leaves the source out."""
    images: str | None = None
    """Folder that image paths are relative to and stay inside. None: the folder of the data file; ``/`` admits absolute
    paths."""
    boxes: Literal["fractions", "pixels", "auto"] | None = None
    """What the numbers of evidence boxes are: fractions of the image, pixels of it, or decided row by row (pixels where
    a value is above 2). None: the format's own rule, which is fractions for our JSON lines."""
    ordered: bool | None = None
    """Whether the order of a row's evidence boxes means something, as in a trail; without it the method's
    ``evidence_order: given`` leaves the rows in reading order. None: as each row says, which is yes by default."""
    columns: dict[str, str] = {}
    """For rows of questions and answers in columns with other names: our field to their column, such as
    ``{question: problem, answer: solution, images: picture}``."""
    duplicates: Literal["drop", "rename"] = "drop"
    """What happens to a row whose id was seen before (LLaVA files reuse ids on purpose: ``rename`` keeps them)."""


class DataSettings(Section):
    """Training data and the order in which it comes."""

    sources: list[SourceSettings] = Field(min_length=1)
    """Files or folders to mix."""
    policy: Literal["skip", "strict"] = "skip"
    """``skip`` drops and counts bad rows; ``strict`` stops at the first, naming file and row."""
    max_dropped: float = Field(default=0.2, ge=0, le=1)
    """Largest share of the rows of a source that may be unusable; beyond it training stops. Also the largest share of
    the rows drawn that may turn out unusable when they are encoded, once 200 were drawn."""
    seed: int = 0
    """Seed of the order of the data, apart from ``run.seed``: runs that are compared can see the same order."""
    workers: int = Field(default=0, ge=0)
    """Processes per rank that encode: ahead of the loop (base training) or, with ``keep_encoded``, everything at the
    start."""
    keep_encoded: bool = False
    """Keep every encoded example in memory, pixels included, so that later epochs need not encode it again. For many
    epochs over small pictures; one of 1,000 visual tokens takes 19 MB with Qwen2.5-VL, 25 with Qwen3-VL, 9 with
    InternVL3, 38 with Gemma 3, on every rank."""
    keep_features: bool = False
    """Stage 1, with ``keep_encoded``: compute the visual tokens of every picture once, at the start, and keep them on
    the device. A picture of 1,000 visual tokens of width 3,584 takes 7 MB in 16 bits."""

    @field_validator("sources")
    @classmethod
    def _some_weight(cls, sources: list[SourceSettings]) -> list[SourceSettings]:
        if not any(source.weight > 0 for source in sources):
            raise ValueError("every source has weight 0: nothing would be drawn")
        return sources


class OptimSettings(Section):
    """AdamW, its schedule, and how much data one step takes."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments (our choice: torch's default)."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon (our choice: torch's default)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay. Applies to matrices; never to norms, biases and embeddings."""
    warmup: float = Field(default=0.03, ge=0)
    """Linear warm-up from 0: below 1 a share of all steps, from 1 on a number of steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of ``lr``."""
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient, before the update; 0 switches clipping off (1.0 is our choice)."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    batch: int = Field(default=512, ge=1)
    """Examples (Stage 1: packed rows, Stage 2: prompts) per optimizer step, over all ranks together."""
    microbatch: int = Field(default=1, ge=1)
    """Of these, how many one rank passes through the model at a time; the rest is accumulated."""
    master_weights: bool = True
    """For 16-bit weights, keep a 32-bit copy that the update is added to. Without it an update at a small learning
    rate is below the rounding of the weight and is lost."""
    gradients: Literal["deferred", "autograd"] = "deferred"
    """How gradients of a weight that several passes share are added up. ``deferred`` multiplies all latent steps out
    together and adds in place; ``autograd`` multiplies each pass out alone, with a second copy of all gradients in
    Stage 2. The same up to rounding. Engine ddp only; engines that shard have their own way."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must lie in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _warmup_ends(self) -> OptimSettings:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup {self.warmup} is neither a share below 1 nor a whole number of steps")
        return self

    def refuse_uneven(self, ranks: int) -> None:
        """The batch must divide evenly over ranks and microbatches."""
        if self.batch % (ranks * self.microbatch):
            raise UserError(
                f"optim.batch is {self.batch}: it must be a multiple of {ranks} ranks x optim.microbatch "
                f"{self.microbatch}"
            )

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps."""
        return math.ceil(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step``, counted from 0: a function of the step alone, so there is nothing to save.

        The warm-up gives its first step lr / n, not 0: a step with a rate of 0 would be spent for nothing.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "constant":
            return self.lr
        done = min((step - warmup) / max(self.steps - warmup, 1), 1.0)
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


class LoraSettings(Section):
    """Low-rank adapters (peft)."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the language model's own weights."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters (alpha / rank)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Names of the linear layers of the language model that get an adapter."""
    kernels: Automatic = "auto"
    """On an NVIDIA GPU, in bfloat16: compute layers and their adapters by kernels of our own. The same numbers up to
    rounding, which is checked on the device before training. ``auto``: there, unless the model is a mixture of
    experts, the engine is zero3, or adapters have dropout."""

    @override
    def without_use(self) -> tuple[str, ...]:
        return () if self.rank and not self.dropout else ("kernels",)


VALIDATION_METRICS: dict[str, Literal["higher", "lower"]] = {
    "validation/accuracy": "higher",
    "validation/reward": "higher",
    "validation/readable": "higher",
    "validation/loss": "lower",
    "validation/help": "higher",
    "validation/dependence_other": "higher",
    "validation/dependence_noise": "higher",
}
"""What ``checkpoint.keep_best`` may name, and which values are better."""
NEED_EFFECTS = ("validation/help", "validation/dependence_other", "validation/dependence_noise")


class ValidationSettings(Section):
    """Held-out questions that the current model answers while it trains. Off unless ``path`` is given."""

    path: str | None = None
    """File or folder of held-out questions in any format that ``realvr data check`` reads, or ``hf:OWNER/NAME#SPLIT``.
    None: no validation."""
    images: str | None = None
    """Folder that image paths are relative to and stay inside. None: the folder of the file."""
    every: int = Field(default=25, ge=1)
    """Steps between validations; the last step has one too."""
    n: int = Field(default=200, ge=1)
    """Most questions; a larger file gives the same n at every validation, drawn by ``seed``."""
    seed: int = 0
    """Seed of the choice of questions."""
    batch: int = Field(default=16, ge=1)
    """Questions that one rank answers at a time."""
    max_new: int = Field(default=192, ge=1)
    """Most tokens of an answer, which is greedy and ends at ``</answer>``."""
    by: str | None = None
    """Tag of the questions, such as ``arrows`` of trails: each of its values gets an accuracy of its own,
    ``validation/accuracy/TAG=VALUE``."""
    effects: bool = False
    """Also measure help and dependence: the same questions without a span and with exchanged latents. Takes about five
    times as long."""


class CheckpointSettings(Section):
    """Checkpoints that a killed run continues from."""

    every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest are kept."""
    resume: str = "auto"
    """``auto`` continues from the newest complete checkpoint of ``run.out`` if there is one, ``never`` refuses a folder
    that holds a run, anything else is the path of a checkpoint to continue from."""
    keep_best: str | None = None
    """Metric whose best value is kept beside the newest checkpoints, such as ``validation/accuracy``: its checkpoint is
    not rotated away, and ``run.out/best`` holds its model. None: the newest only."""
    changed_data: Literal["refuse", "accept"] = "refuse"
    """What a resumed run does when a data file or an image is no longer as it was: ``accept`` goes on with what is
    there now, at the same number of draws."""

    @field_validator("keep_best")
    @classmethod
    def _known_metric(cls, metric: str | None) -> str | None:
        if metric is not None and metric not in VALIDATION_METRICS:
            raise ValueError(f"no metric is called '{metric}': choose one of {', '.join(VALIDATION_METRICS)}")
        return metric


class MethodConfig(Section):
    """The method and its settings."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """Settings that a resumed run may change: every value gives the same numbers."""
    type: str = ""
    """Name of the method (docs/training.md lists them), or ``FILE.py:Class`` for one of yours."""

    def memory_advice(self) -> list[str]:
        """What to change where memory runs out."""
        return []


class LogSettings(Section):
    """What is recorded, and how often."""

    every: int = Field(default=1, ge=1)
    """Steps between lines on the console; ``metrics.jsonl`` has every step. Where nobody watches there is also a line
    when 30 seconds have passed without one."""
    table_every: int = Field(default=10, ge=0)
    """Steps between tables of sampled completions (console and ``completions.jsonl``); 0: never."""
    parts_every: int = Field(default=25, ge=0)
    """Steps between measurements of the gradient norm of each term of the loss alone; 0: never. Each costs one more
    forward and backward pass per term."""
    to: list[Literal["tensorboard", "wandb", "trackio"]] = ["tensorboard"]
    """Where the metrics of every step go beside ``metrics.jsonl``: TensorBoard files in ``run.out/tensorboard``,
    Weights & Biases, trackio. ``[]``: nowhere else."""
    project: str = Field(default="realvr", min_length=1)
    """Project of the run in Weights & Biases and trackio."""
    tensorboard: bool | None = None
    """Earlier name: ``true`` adds tensorboard to ``to``, ``false`` takes it out."""
    console: bool = True
    """Show progress on the console."""

    @model_validator(mode="after")
    def _one_list(self) -> LogSettings:
        if self.tensorboard:
            self.to = ["tensorboard", *self.to]
        elif self.tensorboard is not None:
            self.to = [name for name in self.to if name != "tensorboard"]
        self.to, self.tensorboard = list(dict.fromkeys(self.to)), None
        return self


class DiagnoseSettings(Section):
    """Where the run lives and when it gives up."""

    out: Path
    """Folder of the run: settings, metrics, checkpoints, and the trained model in ``final``."""
    seed: int = 0
    """Seed of everything random but the order of the data."""
    max_bad_steps: int = Field(default=5, ge=0)
    """Steps in a row with a NaN or infinite loss or gradient that are skipped before the run stops."""

    @field_validator("out", mode="before")
    @classmethod
    def _named(cls, out: object) -> object:
        if isinstance(out, str) and not out.strip():
            raise ValueError("it is empty: name a folder (. is the one you are in)")
        return out
