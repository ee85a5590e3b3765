"""From samples to what the model reads: prompts, Stage-1 sequences, answers for the readout; rejections are counted."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.backbone.types import Prompt, Turn
from realvr.data.mixture import Mixture
from realvr.data.sample import Sample
from realvr.data.wording import response_text, spelled_reply
from realvr.errors import UserError
from realvr.imaging.processing import ImageProcessor
from realvr.imaging.types import ImageInput
from realvr.latent.span import span_tokens
from realvr.training.dropping import TOO_LONG, UNREADABLE_IMAGE, Draws
from realvr.training.prefetch import parallel_map
from realvr.training.settings import TrainSettings
from realvr.training.sft_batch import SftExample
from realvr.training.targets import EvidenceConfig, Spans, refusal, spans
from realvr.training.task import Ranks


def share_of_batch(settings: TrainSettings, ranks: Ranks) -> int:
    """How many of ``optim.batch`` one rank takes; the batch must divide evenly over ranks and microbatches."""
    settings.optim.refuse_uneven(ranks.world)
    return settings.optim.batch // ranks.world


def all_of(samples: Mixture[Sample]) -> list[Sample]:
    """Every sample of a mixture, once."""
    return [sample for source in samples.sources for sample in source]


class Encoder:
    """Samples to prompts and sequences within a token limit; counts what it rejects.

    ``respond`` gives the reply that Stage 1 teaches, ``evidence`` what its latent slots stand for. ``auxiliary``: that
    many targets of the reply for a model without latents; they take up no slots. With ``keep`` the results stay in
    memory, under the sample's identity: the caller holds the samples.
    """

    def __init__(
        self,
        backbone: Backbone,
        limit: int,
        keep: bool = False,
        respond: Callable[[Sample], str] = response_text,
        evidence: EvidenceConfig | None = None,
        auxiliary: int = 0,
    ) -> None:
        self.backbone = backbone
        self.auxiliary = auxiliary
        self.respond = respond
        self.evidence = evidence or EvidenceConfig()
        self.limit = min(limit, backbone.context_length)
        self.draws = Draws()
        self.keep = keep
        self._prompts: dict[int, Prompt] = {}
        self._sequences: dict[int, SftExample] = {}

    @property
    def rejected(self) -> Counter[str]:
        """How many samples could not be used, by reason."""
        return self.draws.rejected

    @property
    def kept(self) -> int:
        """How many results are in memory."""
        return len(self._prompts) + len(self._sequences)

    def encode_all(self, samples: Sequence[Sample], workers: int, sequences: bool) -> None:
        """Fill the memory with the prompts, or the sequences, of all samples. What cannot be used is met again, and
        counted, when it is drawn."""
        kept: dict[int, Any] = self._sequences if sequences else self._prompts
        make = self._laid_out if sequences else self._prompt  # in workers, which need not keep anything
        for sample, found in zip(samples, parallel_map(make, samples, workers), strict=True):
            if found is not None:
                kept[id(sample)] = found

    def images(self) -> Iterator[ImageInput]:
        """Of the sequences in memory, in the order in which they came."""
        return (image for example in self._sequences.values() for image in example.prompt.images)

    def _laid_out(self, sample: Sample) -> SftExample | None:
        found = self._sequence(sample)
        if found is not None:
            found.layout(self.backbone)
        return found

    def holds(self, sample: Sample) -> bool:
        """Whether the prompt is in memory."""
        return id(sample) in self._prompts

    def prompt(self, sample: Sample, ready: Prompt | None = None) -> Prompt | None:
        """The prompt, its images scaled down where it would be too long; None (counted) where that does not help.
        ``ready`` is what `prompt_aside` has made of the sample, where it was asked."""
        found = self._prompts.get(id(sample)) or ready or self._prompt(sample)
        if self.keep and found is not None:
            self._prompts[id(sample)] = found
        return found

    def prompt_aside(self, sample: Sample) -> Prompt | None:
        """As `prompt`, in a thread beside it: nothing is kept, and what cannot be used is counted when it is drawn."""
        aside = copy.copy(self)
        aside.draws = Draws()
        return aside._prompt(sample)

    def _prompt(self, sample: Sample) -> Prompt | None:
        return self._fitting(sample, EvidenceConfig(), lambda targets: 0)[0]

    def sequence(self, sample: Sample) -> SftExample | None:
        """Prompt, span over the evidence and response in one sequence."""
        found = self._sequences.get(id(sample)) or self._sequence(sample)
        if self.keep and found is not None:
            self._sequences[id(sample)] = found
        return found

    def _sequence(self, sample: Sample) -> SftExample | None:
        response = [*self.backbone.prompts.encode_text(self.respond(sample))[0], self.backbone.end_of_turn_id]

        def more(targets: int) -> int:
            return len(response) + span_tokens(0 if self.auxiliary else targets)

        prompt, found = self._fitting(sample, self.evidence, more)
        if prompt is None:
            return None
        own = found.targets[-1:] if self.auxiliary else found.targets
        markers, slots = self.backbone.markers, 0 if self.auxiliary else len(own[-1])
        span = [markers.start, *[markers.slot] * slots, markers.end] if slots else []
        ids = torch.cat([prompt.ids, torch.tensor([*span, *response], dtype=torch.long)])
        whole = Prompt(ids, prompt.images)
        targets, pools = torch.from_numpy(np.concatenate(own)), tuple(map(torch.from_numpy, found.pools))
        return SftExample(whole, len(prompt), targets, sample.id, pools, earlier=len(targets) - slots)

    def _fitting(
        self, sample: Sample, evidence: EvidenceConfig, more: Callable[[int], int]
    ) -> tuple[Prompt | None, Spans]:
        """Largest images with which prompt and what follows it fit the limit; and the targets on these images."""
        nothing = None, Spans([], [])
        # Without latents there is no span: Direct-SFT, the control with matched steps and cross-entropy only.
        latents = self.auxiliary or self.backbone.latents
        if (refused := refusal(evidence, sample, latents)) is not None:
            self.draws.reject(refused[0], f"{sample.source or sample.id}: {refused[1]}")
            return nothing
        processor = self.backbone.processor
        try:
            opened = [image.open() for image in sample.images]
            pictures = [image.picture(seen) for image, seen in zip(sample.images, opened, strict=True)]
            images = [processor(image, picture) for image, picture in zip(opened, pictures, strict=True)]
        except UserError as error:  # damaged, or so thin that the family has no grid for it
            self.draws.reject(UNREADABLE_IMAGE, f"{sample.source or sample.id}: {error}")
            return nothing
        for _ in range(8):
            found = spans(evidence, sample, [image.grid for image in images], latents)
            turns = conversation(sample, images)
            try:
                prompt = self.backbone.prompt(self._with_spans(turns, found) if evidence.earlier_spans else turns)
                length = len(prompt)
            except UserError:  # longer than the model's context
                prompt, length = None, self.limit + sum(image.tokens for image in images)
            over = length + more(len(found.targets[-1])) - self.limit
            if prompt is not None and over <= 0:
                return prompt, found
            smaller = _smaller(processor, images, over)
            if smaller is None:
                break
            images = [smaller(image, picture) for image, picture in zip(opened, pictures, strict=True)]
            processor = smaller
        detail = f"{sample.source or sample.id}: over {self.limit:,} tokens"
        self.draws.reject(TOO_LONG, detail)
        return nothing

    def _with_spans(self, turns: list[Turn], found: Spans) -> list[Turn]:
        """Earlier replies as the model gives them itself: behind their spans, and in the words it is taught."""
        slots, asked = iter(0 if self.auxiliary else len(targets) for targets in found.targets), ""
        said: list[Turn] = []
        for turn in turns:
            if turn.role == "assistant":
                text = spelled_reply(asked, turn.text) if self.backbone.spell_out else turn.text
                # The slots' inputs come with the batch; here they take up room.
                latents, ids = torch.empty(next(slots), 0), self.backbone.prompts.encode_text(text)[0]
                turn = replace(turn, text=text, latents=latents, ids=ids)
            asked = turn.text
            said.append(turn)
        return said


def _smaller(processor: ImageProcessor, images: Sequence[ImageInput], over: int) -> ImageProcessor | None:
    """A processor with a smaller budget, or None where the family has none or the minimum is reached."""
    if not processor.family.variable_grid or not images:
        return None
    largest = max(image.tokens for image in images)
    share = 1 - over / max(sum(image.tokens for image in images) * 1.5, 1)
    budget = math.floor(largest * min(max(share, 0.3), 0.95))
    least = processor.min_tokens or 1
    if budget < least:
        return None
    return ImageProcessor(processor.family, processor.stock, None, least, budget)
