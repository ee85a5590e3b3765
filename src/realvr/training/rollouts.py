"""Rollouts of Stage 2: sampled by the policy, rewarded, and saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.data.sample import Sample
from realvr.latent.group_rollout import Completion, Rollout, rollout
from realvr.latent.sampling import Sampling
from realvr.training.adapters import Adapters
from realvr.training.prompts import PromptBatch
from realvr.training.rewards import Reward, rated
from realvr.training.task import Ranks


class Scores(NamedTuple):
    """Rewards of the completions of a microbatch."""

    total_BG: Tensor
    each: dict[str, Tensor]
    """Each reward alone, before its weight."""


def score_completions(
    rewards: Mapping[str, tuple[Reward, float]], samples: Sequence[Sample], groups: Sequence[Sequence[Completion]]
) -> Scores:
    """The weighted sum of all rewards for each completion of each prompt."""
    each = {
        name: torch.tensor(
            [
                [rated(name, reward, completion.text, sample) for completion in group]
                for sample, group in zip(samples, groups, strict=True)
            ]
        )
        for name, (reward, _) in rewards.items()
    }
    total = torch.stack([each[name] * weight for name, (_, weight) in rewards.items()]).sum(0)
    return Scores(total, each)


class Rollouts:
    """Samples ``group`` completions of each prompt behind one latent trajectory.

    The random numbers of a rollout depend on (seed, step, place in the global batch), never on the rank. What was
    sampled is kept, for a checkpoint: a policy that has moved on could not repeat it.
    """

    def __init__(
        self, backbone: Backbone, adapters: Adapters, ranks: Ranks, sampling: Sampling, group: int, seed: int
    ) -> None:
        self.backbone, self.adapters, self.ranks = backbone, adapters, ranks
        self.sampling, self.group, self.seed = sampling, group, seed
        self.saved: list[Rollout] = []
        """Of a checkpoint, still to be used instead of sampling."""
        self.made: list[Rollout] = []
        """Of the batch in hand."""

    @torch.no_grad()
    def sample(self, prompts: PromptBatch, visual: VisualTokens, step: int) -> Rollout:
        """Completions and latents of one microbatch; those of the checkpoint where they were saved."""
        made = self.saved.pop(0) if self.saved else self._sample(prompts, visual, step)
        self.made.append(made)
        return made

    def _sample(self, prompts: PromptBatch, visual: VisualTokens, step: int) -> Rollout:
        with self.adapters.still():
            return rollout(
                self.backbone,
                prompts.prompts,
                group=self.group,
                sampling=self.sampling,
                seed=[_seed(self.seed, step, prompts.place + i) for i in range(len(prompts))],
                latents=self.backbone.latents,
                visual=visual,
                go_on=self.ranks.any if self.ranks.lockstep else None,
            )

    def state_dict(self) -> list[dict[str, Any]]:
        """Rollouts of the batch in hand, so that a run killed within it does not sample others."""
        return [_pack(made) for made in self.made]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Hand out what was sampled before the kill."""
        self.saved, self.made = [_unpack(each) for each in state], []


def _pack(made: Rollout) -> dict[str, Any]:
    completions = [[vars(completion) for completion in group] for group in made.completions]
    return {"completions": completions, "latents": made.latents_BKD.detach().cpu(), "temperature": made.temperature}


def _unpack(state: dict[str, Any]) -> Rollout:
    completions = [[Completion(**completion) for completion in group] for group in state["completions"]]
    return Rollout(completions, state["latents"], float(state["temperature"]))


def _seed(seed: int, step: int, place: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + place * 0x94D049BB133111EB + 1) % 2**63
