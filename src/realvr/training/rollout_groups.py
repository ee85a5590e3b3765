"""Which prompts of a step are rolled out together: as many as fit in memory, prompts of similar length side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.types import Prompt
from realvr.imaging.types import ImageInput
from realvr.latent.modes import FastMode, is_static
from realvr.runs.guard import note
from realvr.training.engine import Engine
from realvr.training.estimate import Decoder, Setup, Weight, Workload, decoder_of, weights_of
from realvr.training.estimate.activations import regeneration
from realvr.training.estimate.peak import GIB, RESERVE, recorded_bytes, rollout_states
from realvr.training.estimate.rollout import ENCODED_TOGETHER, rollout_bytes
from realvr.training.sections import settled
from realvr.training.settings import RlSettings, TrainSettings
from realvr.training.task import Ranks

CPU_ROOM = 2 * GIB
"""What a rollout may take of main memory, weights not counted."""
WASTE = 2.0
"""Times the tokens of its prompts that a group may have with padding."""


def encoded(backbone: Backbone, prompts: Sequence[Prompt]) -> list[VisualTokens]:
    """Visual tokens of each prompt. Every picture is encoded once, a bounded number of them at a time."""
    unique = {image.key: image for prompt in prompts for image in prompt.images}
    found: dict[object, VisualTokens] = {}
    for images in _lots(list(unique.values())):
        visual = backbone.encode_images(images)
        found |= dict(zip((image.key for image in images), visual.split([1] * len(images)), strict=True))
    none = backbone.encode_images(())
    return [VisualTokens.join([found[image.key] for image in prompt.images] or [none]) for prompt in prompts]


def _lots(images: Sequence[ImageInput]) -> list[list[ImageInput]]:
    lots: list[list[ImageInput]] = []
    tokens = 0
    for image in images:
        if not lots or tokens + image.tokens > ENCODED_TOGETHER:
            lots.append([])
            tokens = 0
        lots[-1].append(image)
        tokens += image.tokens
    return lots


def similar(lengths: Sequence[int], joins: Callable[[int, int], bool], waste: float | None) -> list[list[int]]:
    """Groups of places, the longest prompts first. ``joins(n, tokens)``: whether n prompts padded to ``tokens`` may be
    one group; ``waste`` as `WASTE`. Within a group the order is the given one."""
    groups: list[list[int]] = []
    real = 0
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        size = len(groups[-1]) + 1 if groups else 0
        real += lengths[place]
        if not groups or not joins(size, longest) or (waste is not None and size * longest > waste * real):
            groups.append([])
            real = lengths[place]
        groups[-1].append(place)
    return [sorted(group) for group in groups]


def evened(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The same places in ``count`` groups: the largest are cut in two."""
    found = [list(group) for group in groups]
    while len(found) < count:
        at = max(range(len(found)), key=lambda i: len(found[i]))
        middle = (len(found[at]) + 1) // 2
        found[at : at + 1] = [found[at][:middle], found[at][middle:]]
    return found


class Grouping:
    """Decides for one run. ``asked``: completions per prompt, most tokens of one, and prompts that the settings want
    together (None: as many as fit); ``copies`` are further models on the same device.

    On a GPU the estimate of `realvr plan` decides, from shapes alone: what is free at the moment differs between a run
    and its continuation, and 16-bit numbers depend on the group in their last bits.
    """

    def __init__(
        self,
        backbone: Backbone,
        settings: TrainSettings,
        ranks: Ranks,
        asked: tuple[int, int, int | None],
        copies: Sequence[Backbone] = (),
    ) -> None:
        self.backbone, self.settings, self.ranks, self.copies = backbone, settings, ranks, copies
        self.completions, self.max_new, self.asked = asked
        self.most: int | None = self.asked
        """Prompts of a group, once known: as asked for, or what did not run out of memory."""
        self._noted = False

    def groups(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Places of the prompts of each group. Engines in lockstep need equally many on every rank."""
        lengths = [len(prompt) for prompt in prompts]
        visual = sum(image.tokens for prompt in prompts for image in prompt.images) // max(len(prompts), 1)
        bounded = [0]

        def joins(size: int, tokens: int) -> bool:
            if self.most is not None and size > self.most:
                return False
            if self.asked is not None or self._need(size, tokens, visual, len(prompts)) <= self._left:
                return True
            bounded[0] += 1
            return False

        found = similar(lengths, joins, None if self.asked is not None else WASTE)
        if bounded[0]:
            self._note(
                f"{len(prompts)} prompts of a step are rolled out in {len(found)} groups of at most "
                f"{max(map(len, found))}: more would not fit in memory"
            )
        if self.ranks.lockstep:
            return evened(found, max(self.ranks.gather_objects(len(found))))
        return found

    def halve(self, waiting: Sequence[Sequence[int]]) -> list[list[int]]:
        """After the first of these groups has run out of memory: none is larger than half of it from now on."""
        self.most = most = (len(waiting[0]) + 1) // 2
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self._note(
            f"{len(waiting[0])} prompts together ran out of memory in the rollout: it goes on with groups of at most "
            f"{most}, the texts are the same but for rounding (method.rollout_batch sets the number)",
            every_rank=True,
        )
        return [list(group[i : i + most]) for group in waiting for i in range(0, len(group), most)]

    def _note(self, text: str, every_rank: bool = False) -> None:
        if not self._noted and (every_rank or self.ranks.rank == 0):
            note(text)
        self._noted = True

    def _need(self, size: int, tokens: int, visual: int, prompts: int) -> int:
        work = replace(self._work, tokens=tokens, visual=visual, microbatches=prompts, together=size)
        return sum(rollout_bytes(self._decoder, work).values()) + self._span(tokens)

    def _span(self, tokens: int) -> int:
        """What a recorded span of a microbatch holds from the first step on."""
        if not self._work.recorded_span:
            return 0
        work = replace(self._work, rows=self.settings.optim.microbatch, tokens=tokens)
        return recorded_bytes(self._decoder, self._weights, work, self._setup)

    @cached_property
    def _work(self) -> Workload:
        latents = self.backbone.latents
        work = Workload(stage="rl", latents=latents, group=self.completions, answer=self.max_new, padded=True)
        mode: FastMode = getattr(getattr(self.settings, "method", None), "fast_decode", "off")
        ranks = self.ranks
        static = is_static(mode, ranks.device.type, sharded=ranks.shards, lockstep=ranks.lockstep)
        work = replace(work, static=self.max_new if static else 0)
        if not isinstance(self.settings, RlSettings):
            return work
        method = settled(self.settings.method, self.backbone)
        how = regeneration(method, ranks.device.type, ranks.shards, self.backbone.dtype.itemsize)
        return replace(work, **how)

    @cached_property
    def _decoder(self) -> Decoder:
        return decoder_of(self.backbone.model)

    @cached_property
    def _left(self) -> float:
        """Bytes that rollouts may take. Asked for when engine and optimizer are there."""
        device = self.ranks.device
        if device.type != "cuda":
            return CPU_ROOM
        free, total = torch.cuda.mem_get_info(device)
        room = min(total * (1 - RESERVE), free + torch.cuda.memory_reserved(device))
        weights = [*self._weights, *(weight for copy in self.copies for weight in weights_of(copy.model))]
        still, _ = rollout_states(self._decoder, weights, self._work, self._setup, room)
        return room - sum(still.values())

    @cached_property
    def _weights(self) -> list[Weight]:
        return weights_of(self.backbone.model)

    @cached_property
    def _setup(self) -> Setup:
        ranks, optim = self.ranks, self.settings.optim
        assert isinstance(ranks, Engine)
        setup = Setup.of(ranks.settings, ranks.world, optim.master_weights, optim.gradients)
        return replace(setup, rollout="lockstep" if ranks.lockstep else "gather")
