"""One microbatch of Stage 2 as tensors, and how it is made from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from realvr import answers
from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.batch import Batch
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.data.sample import Sample
from realvr.latent.group_rollout import Completion, Rollout
from realvr.latent.prototypes import Prototype
from realvr.training.prompts import PromptBatch
from realvr.training.rewards import PARSER, true_answer
from realvr.training.rollouts import Scores


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
    positive_BD: Tensor  # (B, K, D) with a prototype for each latent
    negatives_BMD: Tensor  # (B, M, K, D) likewise
    valid_BM: Tensor
    answers_BYS: Tensor  # Fmt(y*) first, then the wrong answers; padded
    answers_real_BYS: Tensor
    content_BYS: Tensor  # which of these tokens are J(y)
    wrong_BY: Tensor  # which of the Y - 1 wrong answers exist
    prompts_total: float  # prompts of the whole optimizer step
    ref_logp_BGS: Tensor | None = None
    names: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the step's prompts, how many are here."""
        return len(self.batch) / self.prompts_total


@dataclass
class Rolled:
    """One microbatch after its rollout: what sampling, rewards and the evidence boxes gave."""

    prompts: PromptBatch
    visual: VisualTokens
    rollout: Rollout
    rewards: Scores
    prototypes: list[Prototype]


class AnswerTensors(NamedTuple):
    """``Fmt(y)`` of the correct answer and of each wrong one."""

    ids_BYS: Tensor
    real_BYS: Tensor
    content_BYS: Tensor
    wrong_BY: Tensor


def correct_and_wrong(
    backbone: Backbone, samples: Sequence[Sample], groups: Sequence[Sequence[Completion]]
) -> AnswerTensors:
    """``Fmt(y*)``, then each distinct wrong answer of the group, for each prompt."""
    tokens = [_answers(backbone, sample, group) for sample, group in zip(samples, groups, strict=True)]
    ids, real, content = pad_answers(tokens)
    most = ids.shape[1]
    wrong = torch.tensor([[y < len(each) for y in range(1, most)] for each in tokens], dtype=torch.bool)
    return AnswerTensors(ids, real, content, wrong.view(len(tokens), most - 1))


def _answers(backbone: Backbone, sample: Sample, group: Sequence[Completion]) -> list[tuple[list[int], list[bool]]]:
    truth = true_answer(sample)
    wrong = answers.wrong(
        (PARSER.read(completion.text, sample.choices) for completion in group),
        truth,
        sample.choices,
        has_content=lambda answer: any(answer_tokens(backbone, answer, sample.choices)[1]),
    )
    return [answer_tokens(backbone, answer, sample.choices) for answer in (truth, *wrong)]


def rl_batch(
    backbone: Backbone,
    rolled: Rolled,
    advantages_BG: Tensor,
    answered: AnswerTensors,
    negatives: tuple[Tensor, Tensor],
    prompts_total: float,
) -> RlBatch:
    """The tensors of one microbatch, on the model's device. The policy's denominator comes later."""
    device, made = backbone.device, rolled.rollout
    ids, real, logp = made.tensors(device)
    return RlBatch(
        batch=backbone.batch(rolled.prompts.prompts),
        visual=rolled.visual,
        latents_BKD=made.latents_BKD.to(device),
        ids_BGS=ids,
        real_BGS=real,
        old_logp_BGS=logp,
        advantages_BG=advantages_BG.to(device),
        policy_denominator=torch.ones((), device=device),
        positive_BD=torch.stack([prototype.vector_D for prototype in rolled.prototypes]).to(device),
        negatives_BMD=negatives[0].to(device),
        valid_BM=negatives[1].to(device),
        answers_BYS=answered.ids_BYS.to(device),
        answers_real_BYS=answered.real_BYS.to(device),
        content_BYS=answered.content_BYS.to(device),
        wrong_BY=answered.wrong_BY.to(device),
        prompts_total=prompts_total,
        names=[sample.id for sample in rolled.prompts.samples],
    )
