"""ReaLVR: GRPO on the text, evidence credit on the model's own latents (sec:method). All of Stage 2 is `ReaLVR`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from realvr.backbone.automatic import is_on
from realvr.backbone.backbone import Backbone
from realvr.backbone.loading import trained_latents
from realvr.latent.prototypes import Evidence, chosen_boxes, prototypes
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.recurrence import regenerate
from realvr.latent.span import prefill, score, splice
from realvr.latent.state import State
from realvr.maths import credit, evidence, grpo
from realvr.training.method import Term
from realvr.training.readouts import readouts
from realvr.training.rl_batch import RlBatch, Rolled, correct_and_wrong, rl_batch
from realvr.training.rl_method import RolloutConfig, RolloutMethod
from realvr.training.rl_records import evidence_metrics, mean, policy_metrics
from realvr.training.sections import Automatic
from realvr.training.settings import RlSettings
from realvr.training.sources import TrainingData
from realvr.training.task import Collected, Metrics, Ranks

Routing = Literal["selective", "raw", "uniform"]
Objective = Literal["contrast", "hinge-positive", "align"]
Credit = Literal["paper", "normalised"]


class ReaLVRConfig(RolloutConfig):
    """Rollouts, policy loss and evidence loss."""

    may_change: ClassVar[tuple[str, ...]] = (*RolloutConfig.may_change, "recorded_span")
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
    credit: Credit = "paper"
    """``normalised`` divides the credit of each example by its sum (1/K each where that is 0), so that weights sum to 1
    as those of uniform routing. Ours; without effect where routing is uniform."""
    evidence_boxes: Evidence = "all"
    """Which of a sample's ordered boxes are evidence: their union, the ``last`` alone, or ``per-slot``: box t for
    latent t, the last repeated, against box t of other pictures. The last two are ours."""
    objective: Objective = "contrast"
    """Margin over the hardest negative, the same hinge without negatives, or plain 1 - cos."""
    mass_matched: bool = False
    """Weights of each example sum to 1, and every arm computes both branches (app:mass-matched-factorial)."""
    detach: bool = True
    """Stop the gradient at the weights."""
    on_policy: bool = True
    """Evidence loss on a regenerated trajectory; false: on the saved latents of the rollout."""
    recorded_span: Automatic = "auto"
    """Regenerate the trajectory, and go back through it, as two CUDA graphs, on a GPU where that is possible; not with
    ``memory`` 'checkpointed'. The same numbers up to rounding. ``auto``: on an NVIDIA GPU, unless the model is a
    mixture of experts or the engine shards it."""

    @model_validator(mode="after")
    def _consistent(self) -> ReaLVRConfig:
        if self.mass_matched and self.eta == 0:
            raise ValueError("mass_matched needs eta > 0: an example without credit would have no mass")
        if self.routing == "uniform" and not self.mass_matched and self.eta != 1:
            raise ValueError(f"routing 'uniform' gives every latent 1/K, which is eta = 1, but eta is {self.eta}")
        return self

    @override
    def without_use(self) -> tuple[str, ...]:
        regenerates = self.lambda_ev > 0 and self.on_policy and self.memory != "checkpointed"
        return () if regenerates else ("recorded_span",)

    @override
    def memory_advice(self) -> list[str]:
        ways = super().memory_advice()
        if self.recorded_span is True:
            ways.append("set method.recorded_span false")
            if self.split_attention is False:
                ways.append("set method.split_attention true")
        return ways


class _Evidence(RolloutMethod[ReaLVRConfig]):
    """What the evidence loss adds to a Stage-2 method beside the step itself."""

    Config = ReaLVRConfig
    term_names: tuple[str, ...] = ("policy", "evidence")

    def __init__(self, backbone: Backbone, config: ReaLVRConfig) -> None:
        super().__init__(backbone, config)
        self.bank_size = config.bank
        self.recorded = RecordedSpan(backbone) if is_on(self.config.recorded_span) else None
        if not (config.lambda_ev and backbone.latents):
            self.term_names = ("policy",)

    @classmethod
    def check(cls, settings: RlSettings) -> None:
        config = settings.method
        if isinstance(config, ReaLVRConfig) and config.lambda_ev > 0 and settings.model.latents == 0:
            raise ValueError("an evidence loss (lambda_ev > 0) needs latents: model.latents is 0")

    @classmethod
    def check_data(cls, settings: RlSettings, data: TrainingData, ranks: Ranks) -> None:
        """A latent for each box, where each is held against one of its own."""
        config = settings.method
        if isinstance(config, ReaLVRConfig) and config.lambda_ev and config.evidence_boxes == "per-slot":
            asked = settings.model.latents
            latents = (trained_latents(settings.model.path) or 0) if asked is None else asked
            for name, samples in data.samples.items():
                for sample in samples if data.weights[name] else ():
                    chosen_boxes(sample, config.evidence_boxes, latents)

    @property
    def which_boxes(self) -> Evidence:
        """The evidence that prototypes are made of; without an evidence loss it does not matter."""
        return self.config.evidence_boxes if "evidence" in self.term_names else "all"


class ReaLVR(_Evidence):
    """GRPO on the sampled text, and an evidence loss on the model's own latent trajectory (eq:realvr_difference).

    One differentiable prefill of each prompt serves everything: the replay of all G completions (branches behind the
    saved latents), the regenerated trajectory (gradients through the recurrence and the prompt's keys and values) and,
    without gradient, the readout of the correct and each wrong answer. Departures from the paper: none in the numbers.
    """

    name, order = "realvr", 0
    fixed = {
        "routing": "selective",
        "objective": "contrast",
        "mass_matched": False,
        "detach": True,
        "on_policy": True,
    }

    @torch.no_grad()
    def collect(self, step: int) -> Collected[RlBatch]:
        """Roll out, reward, and what the evidence is held against."""
        if (kept := self.reuse(step)) is not None:  # a later update on the same rollouts
            return Collected(kept)
        step -= step % self.config.updates_per_rollout
        rolled = []
        taken = self.take(step)  # in one global order, whatever the number of ranks
        with self.ranks.full_parameters():
            # All together, then cut into microbatches: G completions of each prompt behind one latent trajectory.
            for prompts, visual, rollout in self.rollouts.sample(taken, step):
                rewards = self.score(prompts, rollout.completions)
                latents = self.backbone.latents
                # p+, from the evidence boxes
                positive = prototypes(prompts.samples, prompts.prompts, visual, self.which_boxes, latents)
                rolled.append(Rolled(prompts, visual, rollout, rewards, positive))
        everyone = self.gather([p for each in rolled for p in each.prototypes])
        batches = [
            rl_batch(
                self.backbone,
                each,
                advantages_BG=grpo.advantages(each.rewards.total_BG),
                answered=correct_and_wrong(self.backbone, each.prompts.samples, each.rollout.completions),
                negatives=self.negatives(each.prompts, everyone, self.config.negatives, step),
                prompts_total=float(self.settings.optim.batch),
            )
            for each in rolled
        ]
        self.compare_with_start(batches)
        self.normalise(batches)
        self.bank.add(everyone)
        return self.keep(batches, rolled)

    def terms(self, b: RlBatch) -> Iterator[Term]:
        """``policy + lambda_ev * evidence``, by one prefill with gradient."""
        c, backbone, recompute = self.config, self.backbone, self.config.recomputed
        prompt, _ = prefill(backbone, b.batch, b.visual, checkpointed=recompute)
        # Replay: the sampled text behind the latents of the rollout, which are constants.
        split = is_on(c.split_attention)
        replayed, states_BKD = splice(backbone, prompt, b.latents_BKD, branches=int(split), checkpointed=recompute)
        logp, entropy = replay(backbone, replayed, b, c, self.forbidden)
        policy = policy_loss(logp, b, c)
        yield Term("policy", 1.0, policy, b.share, policy_metrics(b, logp, entropy, c.clip, c.clip_high))
        if not c.lambda_ev or not b.latents_BKD.shape[1]:
            return
        # Think again: the trajectory of today's policy, with gradients through the recurrence.
        after, z_BKD = replayed, states_BKD
        if c.on_policy:
            passes: dict[str, Any] = {"memory": c.memory, "recorded": self.recorded, "whole": not c.detach}
            after, z_BKD = regenerate(backbone, prompt, b.latents_BKD.shape[1], split=split, **passes)
        options = {"checkpointed": c.memory == "checkpointed", "split": split}
        r_BYK = readouts(backbone, after, b, gradient=not c.detach, **options)
        gamma_BK = slot_credit(r_BYK, b.wrong_BY, c)
        w_BK = slot_weights(gamma_BK, c)
        losses_B = evidence_losses(z_BKD, b, w_BK, c)
        loss = evidence.batch_mean(losses_B, b.prompts_total)
        yield Term("evidence", c.lambda_ev, loss, b.share, slot_metrics(b, z_BKD, r_BYK, gamma_BK, w_BK, c))


def replay(backbone: Backbone, state: State, b: RlBatch, c: RolloutConfig, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled text, and the entropy, under today's policy at the sampling temperature."""
    split = is_on(c.split_attention)
    options: dict[str, Any] = {"temperature": c.temperature, "forbidden": forbidden, "split": split}
    logp, entropy, _ = score(backbone, state, b.ids_BGS, b.real_BGS, checkpointed=c.recomputed, **options)
    return logp, entropy


def policy_loss(logp_BGS: Tensor, b: RlBatch, c: RolloutConfig) -> Tensor:
    """Clipped objective on the generated tokens, this microbatch's part of the step."""
    return grpo.loss(
        logp_BGS,
        b.old_logp_BGS,
        b.advantages_BG,
        b.real_BGS,
        clip=c.clip,
        clip_high=c.clip_high,
        reduction=c.reduction,
        max_length=c.max_new,
        beta=c.beta,
        ref_logp=b.ref_logp_BGS,
        denominator=b.policy_denominator,
    )


def slot_credit(r_BYK: Tensor, wrong_BY: Tensor, c: ReaLVRConfig) -> Tensor:
    """``gamma``: what the correct answer reads beyond the wrong ones or, with raw routing, all that it reads."""
    r_pos = r_BYK[:, 0]
    if c.routing == "raw":
        return credit.raw(r_pos)
    return credit.selective(r_pos, credit.mean_wrong(r_pos, r_BYK[:, 1:], wrong_BY))


def slot_weights(gamma_BK: Tensor, c: ReaLVRConfig) -> Tensor:
    """``w``: a floor for every latent, the rest by credit."""
    if c.mass_matched and c.routing == "uniform":
        return credit.mass_matched_uniform(gamma_BK)
    routed_BK = routed_credit(gamma_BK, c)
    if c.mass_matched:
        return credit.mass_matched(routed_BK, c.eta)
    return credit.weights(routed_BK, 1.0 if c.routing == "uniform" else c.eta)


def routed_credit(gamma_BK: Tensor, c: ReaLVRConfig) -> Tensor:
    """The credit that decides the weights: as the paper has it, or with the mass 1 in every example."""
    return credit.normalised(gamma_BK) if c.credit == "normalised" and c.routing != "uniform" else gamma_BK


def evidence_losses(z_BKD: Tensor, b: RlBatch, w_BK: Tensor, c: ReaLVRConfig) -> Tensor:
    """``sum_t sg(w_t) [m - g_t]+`` of each prompt, or an arm without negatives."""
    if c.objective == "contrast":
        return evidence.loss(z_BKD, b.positive_BD, b.negatives_BMD, w_BK, c.margin, b.valid_BM, detach=c.detach)
    if c.objective == "hinge-positive":
        return evidence.positive_loss(z_BKD, b.positive_BD, w_BK, c.margin, detach=c.detach)
    return evidence.alignment_loss(z_BKD, b.positive_BD, w_BK, detach=c.detach)


def slot_metrics(b: RlBatch, z_BKD: Tensor, r_BYK: Tensor, gamma_BK: Tensor, w_BK: Tensor, c: ReaLVRConfig) -> Metrics:
    """What one needs to trust the evidence term."""
    metrics = evidence_metrics(b, z_BKD, r_BYK[:, 0], gamma_BK, c.objective, c.margin)
    metrics["evidence/weight_spread"] = mean(credit.spread(w_BK.detach()))
    if not c.mass_matched:  # there the weights always sum to 1
        routed_BK = routed_credit(gamma_BK.detach(), c)
        unassigned = credit.unassigned_weight(routed_BK, 1.0 if c.routing == "uniform" else c.eta)
        metrics["evidence/unassigned_weight"] = mean(unassigned)
    return metrics
