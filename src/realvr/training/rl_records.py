"""What Stage 2 records: rewards and completions of a rollout, ratios of the policy, state of the evidence loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realvr import answers
from realvr.maths import evidence, grpo
from realvr.training.rewards import PARSER
from realvr.training.rl_batch import RlBatch, Rolled
from realvr.training.task import Metrics


def rollout_metrics(rolled: Sequence[Rolled], device: torch.device, world: int) -> Metrics:
    """Rewards, lengths and ends of all completions of this rank."""

    def pair(total: Tensor | float, count: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(total), device=device), torch.tensor(float(count), device=device)

    flat = [completion for part in rolled for group in part.rollout.completions for completion in group]
    rewards = torch.cat([part.rewards.total_BG for part in rolled])
    metrics: Metrics = {"reward": pair(rewards.sum(), rewards.numel())}
    for name in rolled[0].rewards.each:
        values = torch.cat([part.rewards.each[name] for part in rolled])
        metrics[f"reward/{Path(name).name}"] = pair(values.sum(), values.numel())
    metrics["groups/without_variance"] = pair((~grpo.varied(rewards)).sum(), len(rewards))
    lengths = [len(completion.ids) for completion in flat]
    metrics["completions/tokens"] = pair(sum(lengths), len(lengths))
    reasons = Counter(completion.finish for completion in flat)
    for reason in ("eos", "stop", "length"):
        metrics[f"completions/ended_by_{reason}"] = pair(reasons[reason], len(flat))
    prompt_tokens = sum(len(prompt) for part in rolled for prompt in part.prompts.prompts)
    metrics["prompts/tokens"] = pair(prompt_tokens, len(rewards))
    metrics["tokens"] = pair(sum(lengths) + prompt_tokens, 1 / world)
    return metrics


def completions_table(rolled: Sequence[Rolled], most: int = 4) -> list[dict[str, Any]]:
    """The best completion of a few prompts."""
    rows = []
    for part in rolled[:2]:
        totals = part.rewards.total_BG
        for sample, group, rewards in zip(part.prompts.samples, part.rollout.completions, totals, strict=True):
            best = int(rewards.argmax())
            rows.append(
                {
                    "sample": sample.id,
                    "question": sample.question,
                    "options": list(sample.choices),
                    "answer": sample.answer,
                    "completion": group[best].text,
                    "reward": float(rewards[best]),
                    "group_mean": float(rewards.mean()),
                    "parser": str(PARSER),
                    "judge": answers.JUDGE,
                }
            )
    return rows[:most]


@torch.no_grad()
def policy_metrics(b: RlBatch, logp: Tensor, entropy: Tensor, clip: float, clip_high: float | None) -> Metrics:
    """Entropy, ratio to the rollout policy, and where the clip is active."""
    real = b.real_BGS
    fraction = grpo.clip_fraction(logp, b.old_logp_BGS, b.advantages_BG, real, clip, clip_high)
    metrics: Metrics = {
        "policy/entropy": mean(entropy, real),
        "policy/ratio": mean((logp - b.old_logp_BGS).exp(), real),
        "policy/clip_fraction": (fraction * real.sum(), real.sum()),
    }
    if b.ref_logp_BGS is not None:
        metrics["policy/kl"] = mean(grpo.token_kl(logp, b.ref_logp_BGS), real)
    return metrics


@torch.no_grad()
def evidence_metrics(b: RlBatch, z_BKD: Tensor, r_pos: Tensor, gamma: Tensor, objective: str, margin: float) -> Metrics:
    """What one needs to trust the evidence term."""
    positive, negatives, valid = b.positive_BD, b.negatives_BMD, b.valid_BM
    defined = evidence.of_latents(evidence.defined(positive, negatives, valid)).expand(-1, z_BKD.shape[1])
    g_BK = evidence.margin(z_BKD, positive, negatives, valid)
    cosine_BK = evidence.similarity(z_BKD, positive)
    # Positive-only arms have no use for negatives: their score is the cosine, and it needs p+ alone.
    contrast = objective == "contrast"
    score_BK = g_BK if contrast else cosine_BK
    goal = 1.0 if objective == "align" else margin  # where the loss reaches zero
    own = defined if contrast else evidence.of_latents(evidence.nonzero(positive)).expand_as(cosine_BK)
    metrics: Metrics = {
        "evidence/margin": mean(g_BK, defined),
        "evidence/cos_positive": mean(cosine_BK, own),
        "evidence/cos_hardest_negative": mean(evidence.hardest(z_BKD, negatives, valid), defined),
        "evidence/active_hinge": mean((score_BK < goal).float(), own),
        "evidence/undefined": mean((~own.any(-1)).float()),
        "evidence/credit_mass": mean(gamma.sum(-1)),
        "evidence/readout_mass": mean(r_pos.sum(-1)),
        "evidence/has_wrong_answer": mean(b.wrong_BY.any(-1).float()),
        "evidence/negatives_used": mean(valid.sum(-1).float()),
        "latents/norm": mean(z_BKD.float().norm(dim=-1)),
    }
    if z_BKD.shape[1] > 1:
        unit = nn.functional.normalize(z_BKD.float(), dim=-1)
        metrics["latents/adjacent_cosine"] = mean((unit[:, 1:] * unit[:, :-1]).sum(-1))
    return metrics


def mean(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) over ``mask``."""
    values = values.float()
    if mask is None:
        return values.sum(), torch.tensor(float(values.numel()), device=values.device)
    return torch.where(mask, values, 0.0).sum(), mask.sum().float()
