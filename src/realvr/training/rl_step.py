"""The whole Stage-2 step as one module: GRPO on the sampled text, evidence on the model's own latent trajectory.

One differentiable prefill of each prompt serves everything: the replay of all G completions (branches behind the
saved latents), the regenerated trajectory (gradients through the recurrence and the prompt's keys and values) and,
without gradient, the readout of the correct and each wrong answer. A plain reading of the paper runs the prompt G
times for the replay and K times for the regeneration.

Departures from the paper: none in the numbers; ``tests`` hold loss and gradients against a naive reference in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.batch import Batch
from realvr.latent.recurrence import Memory, regenerate
from realvr.latent.span import decoder_pass, prefill, score, splice
from realvr.latent.state import State
from realvr.maths import credit, evidence, grpo, objective
from realvr.training.task import Metrics

Routing = Literal["selective", "raw", "uniform"]
Objective = Literal["contrast", "hinge-positive", "align"]


@dataclass(frozen=True)
class RlOptions:
    """What the loss is made of; every ablation of the paper is a value here."""

    temperature: float = 0.6
    clip: float = 0.2
    clip_high: float | None = None
    reduction: Literal["grpo", "dr_grpo", "bnpo"] = "grpo"
    max_new: int = 192
    beta: float = 0.0
    lambda_ev: float = 0.2
    eta: float = 0.3
    margin: float = 0.5
    routing: Routing = "selective"
    objective: Objective = "contrast"
    mass_matched: bool = False
    detach: bool = True
    on_policy: bool = True
    memory: Memory = "cached"


@dataclass
class RlBatch:
    """B prompts with their rollouts, as tensors on the device of the model."""

    batch: Batch
    visual: VisualTokens
    latents_BKD: Tensor  # saved at rollout
    ids_BGS: Tensor
    real_BGS: Tensor
    old_logp_BGS: Tensor
    advantages_BG: Tensor
    policy_denominator: Tensor  # of the whole optimizer step
    positive_BD: Tensor
    negatives_BMD: Tensor
    valid_BM: Tensor
    answers_BYS: Tensor  # Fmt(y*) first, then the wrong answers; padded
    answers_real_BYS: Tensor
    content_BYS: Tensor  # which of these tokens are J(y)
    wrong_BY: Tensor  # which of the Y - 1 wrong answers exist
    prompts_total: float  # prompts of the whole optimizer step
    ref_logp_BGS: Tensor | None = None
    names: list[str] = field(default_factory=list)


class RlStep(nn.Module):
    """``forward(microbatch, term=None) -> (loss, metrics)``; see the contract in ``task.py``."""

    def __init__(self, backbone: Backbone, options: RlOptions) -> None:
        super().__init__()
        self.model = backbone.model  # registers the parameters with whatever engine wraps this module
        self.backbone = backbone
        self.options = options
        self.forbidden = backbone.forbidden_ids().to(backbone.device)

    def forward(self, micro: RlBatch, term: str | None = None) -> tuple[Tensor, Metrics]:
        options = self.options
        with_evidence = options.lambda_ev != 0 and micro.latents_BKD.shape[1] > 0 and term != "policy"
        prompt, _ = prefill(self.backbone, micro.batch, micro.visual, checkpointed=options.memory != "cached")
        terms: dict[str, tuple[float, Tensor]] = {"connected": (0.0, prompt.last_BD.sum())}
        metrics: Metrics = {}
        checkpointed = options.memory != "cached"
        replayed, states_BKD = splice(self.backbone, prompt, micro.latents_BKD, checkpointed=checkpointed)
        if term != "evidence":
            policy = self._policy(micro, replayed, metrics)
            terms["policy"] = 1.0, policy
            metrics["loss/policy"] = _share(policy, micro)
        if with_evidence:
            if options.on_policy:
                after, z_BKD = regenerate(self.backbone, prompt, micro.latents_BKD.shape[1], memory=options.memory)
            else:  # states of one parallel pass over the saved latents: no recurrence
                after, z_BKD = replayed, states_BKD
            value = self._evidence(micro, after, z_BKD, metrics)
            terms["evidence"] = options.lambda_ev, value
            metrics["loss/evidence"] = _share(value, micro)
        loss = objective.total(terms)
        metrics["loss"] = _share(loss, micro)
        return loss, metrics

    def _policy(self, micro: RlBatch, replayed: State, metrics: Metrics) -> Tensor:
        """Clipped objective on the generated tokens, saved latents spliced in as constants."""
        options = self.options
        logp, entropy, _ = score(
            self.backbone,
            replayed,
            micro.ids_BGS,
            micro.real_BGS,
            temperature=options.temperature or 1.0,
            forbidden=self.forbidden,
            checkpointed=options.memory != "cached",
        )
        loss = grpo.loss(
            logp,
            micro.old_logp_BGS,
            micro.advantages_BG,
            micro.real_BGS,
            clip=options.clip,
            clip_high=options.clip_high,
            reduction=options.reduction,
            max_length=options.max_new,
            beta=options.beta,
            ref_logp=micro.ref_logp_BGS,
            denominator=micro.policy_denominator,
        )
        with torch.no_grad():
            real = micro.real_BGS
            metrics["policy/entropy"] = _mean(entropy, real)
            metrics["policy/ratio"] = _mean((logp - micro.old_logp_BGS).exp(), real)
            fraction = grpo.clip_fraction(
                logp, micro.old_logp_BGS, micro.advantages_BG, real, options.clip, options.clip_high
            )
            metrics["policy/clip_fraction"] = (fraction * real.sum(), real.sum())
            if micro.ref_logp_BGS is not None:
                metrics["policy/kl"] = _mean(grpo.token_kl(logp, micro.ref_logp_BGS), real)
        return loss

    def _evidence(self, micro: RlBatch, after: State, z_BKD: Tensor, metrics: Metrics) -> Tensor:
        """``mean over prompts of sum_t sg(w_t) [m - g_t]+`` for this microbatch's share of the step's prompts."""
        options = self.options
        positive, negatives, valid = micro.positive_BD, micro.negatives_BMD, micro.valid_BM
        r_pos, gamma = self._credit(micro, after)
        weights = self._weights(gamma)
        if options.objective == "contrast":
            losses = evidence.loss(z_BKD, positive, negatives, weights, options.margin, valid, detach=options.detach)
        elif options.objective == "hinge-positive":
            losses = evidence.positive_loss(z_BKD, positive, weights, options.margin, detach=options.detach)
        else:
            losses = evidence.alignment_loss(z_BKD, positive, weights, detach=options.detach)
        with torch.no_grad():
            self._record(micro, z_BKD.detach(), r_pos.detach(), gamma.detach(), metrics)
        return evidence.batch_mean(losses, micro.prompts_total)

    def _credit(self, micro: RlBatch, after: State) -> tuple[Tensor, Tensor]:
        """Readout of the correct answer (B, K) and the credit (B, K), from one pass over all answers as branches."""
        batch, answers, size = micro.answers_BYS.shape
        gradient = not self.options.detach
        state = after if gradient else after.detach()
        probe = Probe(columns=state.slots, gradient=gradient)
        real = micro.answers_real_BYS
        offset = (real.long().cumsum(-1) - 1).clamp(min=0)
        segment = torch.arange(answers, device=real.device)[None, :, None].expand_as(real)
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            decoder_pass(
                self.backbone,
                state,
                self.backbone.embed(micro.answers_BYS.flatten(1)),
                (state.next_B[:, None, None] + offset).flatten(1),
                real_BT=real.flatten(1),
                segment_BT=segment.flatten(1),
                probes=[probe],
                checkpointed=self.options.memory == "checkpointed" and gradient,
            )
            own = torch.eye(answers, dtype=torch.bool, device=real.device)
            content = (micro.content_BYS[:, None] & own[None, :, :, None]).flatten(2)  # (B, Y, Y * S)
            r_BYK = credit.readout(probe.stack(), content)
            r_pos = r_BYK[:, 0]
            if self.options.routing == "raw":
                return r_pos, credit.raw(r_pos)
            return r_pos, credit.selective(r_pos, credit.mean_wrong(r_pos, r_BYK[:, 1:], micro.wrong_BY))

    def _weights(self, gamma_BK: Tensor) -> Tensor:
        options = self.options
        if options.mass_matched:
            if options.routing == "uniform":
                return credit.mass_matched_uniform(gamma_BK)
            return credit.mass_matched(gamma_BK, options.eta)
        return credit.weights(gamma_BK, 1.0 if options.routing == "uniform" else options.eta)

    def _record(self, micro: RlBatch, z_BKD: Tensor, r_pos: Tensor, gamma: Tensor, metrics: Metrics) -> None:
        """What one needs to trust the evidence term."""
        positive, negatives, valid = micro.positive_BD, micro.negatives_BMD, micro.valid_BM
        defined = evidence.defined(positive, negatives, valid)[:, None].expand(-1, z_BKD.shape[1])
        g_BK = evidence.margin(z_BKD, positive, negatives, valid)
        cosine_BK = evidence.similarity(z_BKD, positive)
        # Positive-only arms have no use for negatives: their score is the cosine, and it needs p+ alone.
        contrast = self.options.objective == "contrast"
        score_BK = g_BK if contrast else cosine_BK
        goal = 1.0 if self.options.objective == "align" else self.options.margin  # where the loss reaches zero
        own = defined if contrast else evidence.nonzero(positive)[:, None].expand_as(cosine_BK)
        metrics["evidence/margin"] = _mean(g_BK, defined)
        metrics["evidence/cos_positive"] = _mean(cosine_BK, own)
        metrics["evidence/cos_hardest_negative"] = _mean(evidence.hardest(z_BKD, negatives, valid), defined)
        metrics["evidence/active_hinge"] = _mean((score_BK < goal).float(), own)
        metrics["evidence/undefined"] = _mean((~own[:, 0]).float())
        metrics["evidence/credit_mass"] = _mean(gamma.sum(-1))
        if not self.options.mass_matched:  # there the weights always sum to 1
            eta = 1.0 if self.options.routing == "uniform" else self.options.eta
            metrics["evidence/unassigned_weight"] = _mean(credit.unassigned_weight(gamma, eta))
        metrics["evidence/readout_mass"] = _mean(r_pos.sum(-1))
        metrics["evidence/has_wrong_answer"] = _mean(micro.wrong_BY.any(-1).float())
        metrics["evidence/negatives_used"] = _mean(valid.sum(-1).float())
        metrics["latents/norm"] = _mean(z_BKD.float().norm(dim=-1))
        if z_BKD.shape[1] > 1:
            unit = nn.functional.normalize(z_BKD.float(), dim=-1)
            metrics["latents/adjacent_cosine"] = _mean((unit[:, 1:] * unit[:, :-1]).sum(-1))


def _mean(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) over ``mask``."""
    values = values.float()
    if mask is None:
        return values.sum(), torch.tensor(float(values.numel()), device=values.device)
    return torch.where(mask, values, 0.0).sum(), mask.sum().float()


def _share(value: Tensor, micro: RlBatch) -> tuple[Tensor, Tensor]:
    """A share of the step's loss: shares and their counts add up over the step, the counts to 1."""
    return value.detach().float(), torch.tensor(len(micro.batch) / micro.prompts_total, device=value.device)


def options_from(settings: Any) -> RlOptions:
    """The options of a settings object that has fields of the same names."""
    return RlOptions(**{name: getattr(settings, name) for name in RlOptions.__dataclass_fields__})
