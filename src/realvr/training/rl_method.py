"""What every Stage-2 method has: prompts in one global order, rollouts, rewards, the bank of negatives, the start of
the run as a reference, and a state that a killed run continues from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from realvr.backbone.automatic import is_on
from realvr.backbone.backbone import Backbone
from realvr.backbone.loading import trained_latents
from realvr.errors import UserError
from realvr.imaging.ahead import threads_for
from realvr.latent import prototypes
from realvr.latent.fast import fast_decode
from realvr.latent.group_rollout import Completion
from realvr.latent.modes import FastMode, is_static
from realvr.latent.prototypes import NegativeBank, Prototype
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.sampling import ANSWER_END, Sampling
from realvr.latent.span import prefill, score, splice
from realvr.maths import grpo
from realvr.training.adapters import Adapters
from realvr.training.dropping import Draws
from realvr.training.examples import Encoder
from realvr.training.method import Method, Run
from realvr.training.models import StartingPolicy
from realvr.training.prompts import PromptBatch, PromptStream
from realvr.training.rewards import load_rewards
from realvr.training.rl_batch import RlBatch, Rolled
from realvr.training.rl_records import completions_table, rollout_metrics
from realvr.training.rollout_groups import Grouping
from realvr.training.rollouts import Rollouts, Scores, score_completions, share_of_rollouts
from realvr.training.sections import Automatic, MethodConfig
from realvr.training.settings import RlSettings
from realvr.training.task import Collected


class RolloutConfig(MethodConfig):
    """Rollouts, rewards and the policy loss."""

    may_change: ClassVar[tuple[str, ...]] = (
        "memory",
        "rollout_batch",
        "fast_decode",
        "release_decode",
        "recompute",
        "split_attention",
    )
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
    rollout_batch: int | None = Field(default=None, ge=1)
    """Prompts of a step that one process rolls out together, whatever ``optim.microbatch``; null: as many as fit in its
    memory. The texts are the same but for rounding."""
    fast_decode: FastMode = "auto"
    """How rollouts are decoded: ``off``; ``static``, in fixed shapes; ``graph``, as CUDA graphs; ``auto``, as CUDA
    graphs on a GPU where that is possible, otherwise ``off``. The texts are the same but for rounding."""
    release_decode: bool = False
    """Drop the buffers and graphs of ``fast_decode`` after the rollouts of each step, to leave the memory to training;
    they are then made again for every step."""
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
    memory: Literal["cached", "checkpointed-prefill", "checkpointed"] = "checkpointed-prefill"
    """What is recomputed in the backward pass: nothing, the prompt's layers, or the latent steps' too. All exact."""
    recompute: float = Field(default=1.0, gt=0, le=1)
    """Share of the layers of prompts and completions that are recomputed, unless ``memory`` is 'cached': less takes
    more memory and less time. Exact too."""
    split_attention: Automatic = "auto"
    """Attend to the prompt and inside each completion by itself instead of through a mask over the prompt and all
    completions: the same numbers up to rounding, with less work. Latent steps with gradient attend to the prompt as it
    lies: none keeps a copy of its keys and values. On a GPU in 16 bits only; completions in layers with a sliding
    window shorter than prompt and completion keep the mask. ``auto``: there, unless the model is a mixture of experts
    or the engine shards it."""

    @model_validator(mode="after")
    def _learns_something(self) -> RolloutConfig:
        if self.group < 2:
            raise ValueError(
                f"group is {self.group}: a completion is judged against the others of its prompt, so at least 2 are "
                "needed"
            )
        if not any(self.rewards.values()):
            raise ValueError("rewards: no reward has a weight, so there is nothing to learn from")
        return self

    @property
    def recomputed(self) -> float:
        """The share that is: 0 with ``memory`` 'cached'."""
        return 0.0 if self.memory == "cached" else self.recompute

    @override
    def memory_advice(self) -> list[str]:
        ways = ["set method.memory checkpointed"] if self.memory != "checkpointed" else []
        if 0 < self.recomputed < 1:
            ways.append("set method.recompute 1")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if is_static(self.fast_decode, device) and not self.release_decode:
            ways.append("set method.release_decode true")
        if self.rollout_batch != 1:
            ways.append("lower method.rollout_batch" if self.rollout_batch else "set method.rollout_batch 1")
        return ways


RC = TypeVar("RC", bound=RolloutConfig)


class RolloutMethod(Method[RlSettings, RC, RlBatch]):
    """One optimizer step is ``optim.batch`` prompts over all ranks, each rolled out ``group`` times.

    The order of the prompts, the random numbers of each rollout and the negatives of each prompt depend on (seed, step,
    place in the global batch, sample), never on the rank: any split over ranks and microbatches is the same step.
    """

    stage = "rl"
    from_scratch: ClassVar[bool] = False
    """Whether the method starts from a model without latents."""
    bank_size: int = 0
    recorded: RecordedSpan | None = None
    """What regenerates latents as CUDA graphs, where the method does so."""

    def __init__(self, backbone: Backbone, config: RC) -> None:
        super().__init__(backbone, config)
        self.forbidden = backbone.forbidden_ids().to(backbone.device)

    @override
    def begin(self, run: Run[RlSettings]) -> None:
        super().begin(run)
        c, settings = self.config, run.settings
        self.adapters = Adapters(self.backbone, settings.lora)
        self.encoder = Encoder(self.backbone, c.max_prompt, settings.data.keep_encoded)
        self.draws = self.encoder.draws
        self.samples = run.data.mixture(settings)  # the global order, on every rank
        self.prompts = PromptStream(self.samples, self.encoder, settings, run.ranks, self._threads(run))
        stop = ANSWER_END if c.stop_at_answer else None
        sampling = Sampling(c.temperature, c.top_p, c.top_k, c.max_new, stop)
        self.start = StartingPolicy(self.backbone, self.adapters, settings, run.ranks) if c.beta else None
        copies = [self.start.copy] if self.start is not None and self.start.copy is not None else []
        grouping = Grouping(self.backbone, settings, run.ranks, (c.group, c.max_new, c.rollout_batch), copies)
        self.rollouts = Rollouts(
            self.backbone,
            self.adapters,
            run.ranks,
            sampling,
            c.group,
            settings.run.seed,
            grouping,
            fast_decode(self.backbone, c.fast_decode, sharded=run.ranks.shards, announce=run.ranks.rank == 0),
            c.release_decode,
            self.recorded,
        )
        self.rewards = load_rewards(c.rewards)
        self.dry = run.dry
        self.bank = NegativeBank(self.bank_size)
        self._kept: list[RlBatch] = []
        self._rebuilding = self._last = False
        self._before: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def _threads(self, run: Run[RlSettings]) -> int:
        """Threads that encode the prompts of the next step. Without a GPU that works meanwhile they would only compete
        with the model; with ``data.workers`` everything is in memory, and processes are forked, which threads disturb.
        """
        useless = self.backbone.device.type == "cpu" or run.settings.data.workers
        return 0 if useless else threads_for(run.ranks.local_world)

    # ------------------------------------------------------------------ the words of `collect`

    def reuse(self, step: int) -> list[RlBatch] | None:
        """The batch of a later update on the same rollouts; None where `collect` has to make one.

        After a kill between two updates it is made again from the rollouts of the checkpoint.
        """
        updates = self.config.updates_per_rollout
        self._rebuilding, self._last = step % updates != 0, (step + 1) % updates == 0
        if self._rebuilding and self._kept:
            return self._held(self._kept)
        if not self._rebuilding and self.rollouts.saved:  # resumed after the last update on the saved rollouts
            self._restore(self._loaded["after"])
            self.rollouts.saved = []
        self._before, self.rollouts.made = self._position(), []
        return None

    def take(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of the rollouts of ``step``, in microbatches. Threads begin with those of the next
        rollouts, where the run has any."""
        taken = self.prompts.take()
        if not self.dry and step + self.config.updates_per_rollout < self.settings.optim.steps:
            self.prompts.prepare()
        return taken

    def keep(self, batches: list[RlBatch], rolled: Sequence[Rolled]) -> Collected[RlBatch]:
        """The batch, kept for later updates. Only the first update on it records the rollouts."""
        self._held(batches)
        if self._rebuilding:
            return Collected(batches)
        metrics = rollout_metrics(rolled, self.backbone.device, self.ranks.world)
        metrics |= self.draws.metrics(self.backbone.device, self.ranks.world)
        metrics |= self.rollouts.counted(self.backbone.device)
        return Collected(batches, metrics, completions_table(rolled))

    def _held(self, batches: list[RlBatch]) -> list[RlBatch]:
        """The batch, held until its last update begins: its pixels are in main memory, its visual tokens on the
        device."""
        self._kept = [] if self._last else batches
        return batches

    def score(self, prompts: PromptBatch, groups: Sequence[Sequence[Completion]]) -> Scores:
        """Rewards of all completions."""
        return score_completions(self.rewards, prompts.samples, groups)

    def gather(self, own: Sequence[Prototype]) -> list[Prototype]:
        """Prototypes of the global batch, in its order."""
        return [prototype for part in self.ranks.gather_objects(list(own)) for prototype in part]

    def negatives(
        self, prompts: PromptBatch, everyone: Sequence[Prototype], count: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Prototypes of other pictures for each prompt (B, M, D), or (B, M, K, D) with one a latent; and which are real
        (B, M)."""
        seed, bank = self.settings.run.seed, list(self.bank.items)
        chosen = [
            prototypes.sample_negatives(prompts.place + i, everyone, bank, count, seed, step, sample.id)
            for i, sample in enumerate(prompts.samples)
        ]
        return prototypes.pad(chosen, count, *everyone[0].vector_D.shape)

    def normalise(self, batches: Sequence[RlBatch]) -> None:
        """Give each microbatch the denominator of the whole step."""
        c = self.config
        sizes = [grpo.normalizer(batch.real_BGS, c.reduction, c.max_new) for batch in batches]
        total = sum(self.ranks.gather_objects(sum(float(size) for size in sizes)))
        for batch in batches:
            batch.policy_denominator = torch.tensor(max(total, 1e-12), device=self.backbone.device)

    def reference(self) -> AbstractContextManager[Backbone]:
        """The policy that the run started from."""
        return self.start.use() if self.start is not None else super().reference()

    def compare_with_start(self, batches: Sequence[RlBatch]) -> None:
        """Give each microbatch its log-probabilities under the starting policy, where ``beta`` asks for them."""
        if not self.config.beta:
            return
        with self.ranks.full_parameters():  # gathered once for all of them
            for batch in batches:
                batch.ref_logp_BGS = self.reference_logp(batch)

    @torch.no_grad()
    def reference_logp(self, b: RlBatch) -> Tensor | None:
        """Log-probabilities under the starting policy, at the same temperature, behind the same saved latents; None
        where nothing is compared with them."""
        if not self.config.beta:
            return None
        with self.reference() as policy:
            state, _ = prefill(policy, b.batch, b.visual)
            c, split = self.config, is_on(self.config.split_attention)
            state, _ = splice(policy, state, b.latents_BKD, branches=int(split))
            options: dict[str, Any] = {"temperature": c.temperature, "forbidden": self.forbidden, "split": split}
            return score(policy, state, b.ids_BGS, b.real_BGS, **options)[0]

    @override
    def close(self) -> None:
        self.prompts.close()

    # ------------------------------------------------------------------ state

    def _position(self) -> dict[str, Any]:
        return {"samples": self.samples.state_dict(), "bank": self.bank.state_dict(), **self.draws.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands. Between two updates on the same rollouts: where it stood before them, and the
        rollouts, which a policy that has moved on could not repeat."""
        if self.rollouts.saved:  # nothing happened since they were loaded
            return self._loaded
        if self.config.updates_per_rollout == 1 or not self.rollouts.made:
            return {**self._position(), "rollouts": []}
        return {**self._before, "rollouts": self.rollouts.state_dict(), "after": self._position()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self._loaded = [], state
        same_data = state["samples"]["sizes"] == self.samples.state_dict()["sizes"]
        self.rollouts.load_state_dict(state["rollouts"] if same_data else [])  # else they answer other prompts
        self._restore(state)

    @override
    def redistribute(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Data, bank and order are the same on all ranks; counts of rows go to the first; rollouts by their place."""
        own = ("rollouts", "after", "drawn", "rejected", "first")
        shared = super().redistribute([{key: each[key] for key in each if key not in own} for each in states])
        parts = [each["rollouts"] for each in states]
        found = {**shared, "rollouts": share_of_rollouts(parts, self.ranks.rank, self.ranks.world)}
        found |= self._counts(states)
        if "after" in states[0]:
            after = [each["after"] for each in states]
            found["after"] = {**after[0], **self._counts(after)}
        return found

    def _counts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        total = Draws()
        for state in states if self.ranks.rank == 0 else ():
            each = Draws()
            each.load_state_dict(state)
            total.add(each)
        return total.state_dict()

    def _restore(self, position: dict[str, Any]) -> None:
        self.samples.load_state_dict(position["samples"])
        self.bank.load_state_dict(position["bank"])
        self.draws.load_state_dict(position)

    @override
    def export(self, directory: Path) -> None:
        self.adapters.export(self.backbone, directory)

    # ------------------------------------------------------------------ what it may start from

    @classmethod
    def check_start(cls, settings: RlSettings) -> None:
        """Stage 2 goes on with the K of Stage 1; Direct starts from a model that never had a span."""
        path, asked = settings.model.path, settings.model.latents
        trained = trained_latents(path)
        if cls.from_scratch and trained:
            raise UserError(
                f"model.path: {path} went through Stage 1 (K = {trained}), but method {cls.name} starts from the "
                "pretrained backbone or from a Direct-SFT checkpoint: name it with --model.path (to train this one "
                "without its span: --method custom --lambda-ev 0 --model.latents 0)"
            )
        if asked != 0 and not trained:
            raise UserError(
                f"{path} was not trained with latent slots: train Stage 1 first (realvr train sft), or use --method "
                "direct"
            )
        if asked is None or asked == (trained or 0) or "model.latents" in settings.origin.flags:
            return
        raise UserError(
            f"{settings.origin.file or 'settings'}: model.latents is {asked}, but {path} was trained with K = "
            f"{trained}: remove model.latents from the file, or give --model.latents {asked} on the command line to "
            "change K"
        )
