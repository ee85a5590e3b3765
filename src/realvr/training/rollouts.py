"""Rollouts of Stage 2: sampled by the policy, rewarded, and saved with a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.types import Prompt
from realvr.data.sample import Sample
from realvr.errors import out_of_memory
from realvr.latent.fast import COUNTS, FastDecode, NoRoom
from realvr.latent.group_rollout import Completion, Rollout, rollout
from realvr.latent.recorded_span import COUNTS as SPAN_COUNTS
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.sampling import Sampling
from realvr.training.adapters import Adapters
from realvr.training.prompts import PromptBatch
from realvr.training.rewards import Reward, rated
from realvr.training.rollout_groups import Grouping, encoded
from realvr.training.task import Metrics, Ranks

SMALLER = 2
"""Times that groups are halved because static buffers do not fit: with still fewer prompts the plain way is faster."""


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


class Sampled(NamedTuple):
    """One microbatch of prompts with the visual tokens and the completions of each."""

    prompts: PromptBatch
    visual: VisualTokens
    rollout: Rollout


class Rollouts:
    """Samples ``group`` completions of each prompt behind one latent trajectory.

    All prompts of a step are rolled out together, in groups that fit in memory (`Grouping`), whatever the microbatch.
    The random numbers of a rollout depend on (seed, step, place in the global batch), never on the rank or the group.
    What was sampled is kept, for a checkpoint: a policy that has moved on could not repeat it. Where memory runs out,
    what ``fast`` and ``recorded`` (of the passes with gradient) hold is dropped.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapters: Adapters,
        ranks: Ranks,
        sampling: Sampling,
        group: int,
        seed: int,
        grouping: Grouping,
        fast: FastDecode | None = None,
        release: bool = False,
        recorded: RecordedSpan | None = None,
    ) -> None:
        self.backbone, self.adapters, self.ranks = backbone, adapters, ranks
        self.sampling, self.group, self.seed, self.grouping = sampling, group, seed, grouping
        self.fast, self.release, self.recorded = fast, release, recorded
        self._counted: dict[str, Counter[str]] = {}
        self._smaller = 0
        self.saved: list[Rollout] = []
        """Of a checkpoint, still to be used instead of sampling; one for each prompt."""
        self.made: list[Rollout] = []
        """Of the batch in hand."""

    @torch.no_grad()
    def sample(self, batches: Sequence[PromptBatch], step: int) -> list[Sampled]:
        """Completions and latents of all microbatches; those of the checkpoint where they were saved."""
        prompts = [prompt for batch in batches for prompt in batch.prompts]
        visual = encoded(self.backbone, prompts)
        if self.saved:
            each, self.saved = self.saved[: len(prompts)], self.saved[len(prompts) :]
        else:
            places = [batch.place + i for batch in batches for i in range(len(batch))]
            each = self._sample(prompts, visual, [_seed(self.seed, step, place) for place in places])
            if self.fast is not None and self.release:
                self.fast.release()
        found, first = [], 0
        for batch in batches:
            own = slice(first, first + len(batch))
            found.append(Sampled(batch, VisualTokens.join(visual[own]), _join(each[own])))
            first += len(batch)
        self.made += [sampled.rollout for sampled in found]
        return found

    def counted(self, device: torch.device) -> Metrics:
        """How steps of ``fast_decode`` and spans of ``recorded_span`` have run since the last call, as the mean over
        ranks."""
        found: Metrics = {}
        one = torch.ones((), device=device)
        for kind, names, each in (("decode", COUNTS, self.fast), ("span", SPAN_COUNTS, self.recorded)):
            if each is not None:
                new = each.counts - self._counted.get(kind, Counter())
                self._counted[kind] = each.counts.copy()
                found |= {f"{kind}/{name}": (new[name] * one, one) for name in names}
        return found

    def _sample(self, prompts: Sequence[Prompt], visual: Sequence[VisualTokens], seeds: Sequence[int]) -> list[Rollout]:
        """One rollout for each prompt, in order. A group for which memory does not suffice is halved, and a single
        prompt decoded without static buffers: the others of an engine in lockstep could not know, so there it is an
        error."""
        found: dict[int, Rollout] = {}
        waiting = self.grouping.groups(prompts)
        while waiting:
            group = waiting[0]
            made = self._roll_out(group, prompts, visual, seeds, self.fast)
            if made is None and len(group) > 1:
                waiting = self.grouping.halve(waiting)
                continue
            if made is None:
                assert self.fast is not None
                self.fast.plain("memory ran out for one prompt beside static buffers")
                made = self._roll_out(group, prompts, visual, seeds, None)
                assert made is not None
            found |= dict(zip(group, _split(made), strict=True))
            del waiting[0]
        return [found[i] for i in range(len(prompts))]

    def _roll_out(
        self,
        group: Sequence[int],
        prompts: Sequence[Prompt],
        visual: Sequence[VisualTokens],
        seeds: Sequence[int],
        fast: FastDecode | None,
    ) -> Rollout | None:
        """The prompts of one group; None where memory ran out and there is another way: fewer prompts, or no static
        buffers."""
        may_fail = (len(group) > 1 or fast is not None) and not self.ranks.lockstep
        if fast is not None:
            fast.or_smaller = may_fail and self._smaller < SMALLER
        try:
            with self.adapters.still():
                return rollout(
                    self.backbone,
                    [prompts[i] for i in group],
                    group=self.group,
                    sampling=self.sampling,
                    seed=[seeds[i] for i in group],
                    latents=self.backbone.latents,
                    visual=VisualTokens.join([visual[i] for i in group]),
                    go_on=self.ranks.any if self.ranks.lockstep else None,
                    fast=fast,
                )
        except Exception as error:
            if not may_fail or not out_of_memory(error):
                raise
            self._smaller += isinstance(error, NoRoom)
        self.make_room()
        return None  # outside of the handler: a traceback would keep the tensors alive

    def make_room(self) -> None:
        """Drop static buffers and everything recorded; it is made again when it is needed."""
        for each in (self.fast, self.recorded):
            if each is not None:
                each.release()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def state_dict(self) -> list[dict[str, Any]]:
        """Rollouts of the batch in hand, so that a run killed within it does not sample others."""
        return [_pack(made) for made in self.made]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Hand out what was sampled before the kill."""
        self.saved, self.made = [one for each in state for one in _split(_unpack(each))], []


def _pack(made: Rollout) -> dict[str, Any]:
    completions = [[vars(completion) for completion in group] for group in made.completions]
    return {"completions": completions, "latents": made.latents_BKD.detach().cpu(), "temperature": made.temperature}


def _unpack(state: dict[str, Any]) -> Rollout:
    completions = [[Completion(**completion) for completion in group] for group in state["completions"]]
    return Rollout(completions, state["latents"], float(state["temperature"]))


def share_of_rollouts(parts: Sequence[list[dict[str, Any]]], rank: int, world: int) -> list[dict[str, Any]]:
    """The rollouts of one rank of a batch, from what all ranks of a checkpoint have saved. They come in its order."""
    every = [_pack(one) for part in parts for each in part for one in _split(_unpack(each))]
    return every[rank * len(every) // world : (rank + 1) * len(every) // world]


def _split(made: Rollout) -> list[Rollout]:
    """One for each prompt."""
    return [Rollout([group], made.latents_BKD[i : i + 1], made.temperature) for i, group in enumerate(made.completions)]


def _join(made: Sequence[Rollout]) -> Rollout:
    groups = [group for each in made for group in each.completions]
    return Rollout(groups, torch.cat([each.latents_BKD for each in made]), made[0].temperature)


def _seed(seed: int, step: int, place: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + place * 0x94D049BB133111EB + 1) % 2**63
