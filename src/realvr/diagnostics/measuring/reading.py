"""Samples read by a model: prompts, and the free-running span behind each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from PIL.Image import Image
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.samples import conversation
from realvr.backbone.types import Prompt
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.imaging.types import ImageInput
from realvr.latent.span import prefill, think
from realvr.latent.state import State


@dataclass
class Reading:
    """Samples that could be read, a row each, and those that could not."""

    samples: list[Sample] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    errors: list[tuple[Sample, str]] = field(default_factory=list)
    prompt: State | None = None
    """After the prompts, before the span; None where nothing could be read."""
    after: State | None = None
    """After ``<|lvr_end|>``, or after the prompt where K = 0."""
    latents_RKD: Tensor | None = None
    visual: VisualTokens | None = None
    """Visual tokens of the pictures, in the order of the prompts."""

    def spans(self) -> Iterator[tuple[Sample, Tensor]]:
        """Samples that could be read, each with its latents (K, D)."""
        if self.latents_RKD is not None:
            yield from zip(self.samples, self.latents_RKD, strict=True)

    def features(self) -> list[list[Tensor]]:
        """Visual tokens (n, D) of each picture of each sample that could be read."""
        tokens = iter(self.visual.per_image() if self.visual is not None else ())
        return [[next(tokens) for _ in prompt.images] for prompt in self.prompts]


def prompt_of(backbone: Backbone, sample: Sample, pictures: Sample, latents: int) -> Prompt:
    """The sample's question about the pictures of another, or of its own."""
    if len(sample.images) != len(pictures.images):
        raise UserError(f"{sample.id}: {pictures.id} has another number of pictures and cannot be its control")
    return prompt_with(backbone, sample, [backbone.image(image) for image in pictures.images], latents)


def prompt_with(backbone: Backbone, sample: Sample, pictures: Sequence[Image | ImageInput], latents: int) -> Prompt:
    """The sample's question about these pictures, in place of `Sample.images`."""
    ready = [picture if isinstance(picture, ImageInput) else backbone.processor(picture) for picture in pictures]
    prompt = backbone.prompt(conversation(sample, ready))
    if len(prompt) + latents + 3 > backbone.context_length:  # two markers, and one token to answer with
        raise UserError(f"{sample.id}: {len(prompt)} tokens leave no room for {latents} latents and an answer")
    return prompt


@torch.no_grad()
def read_samples(backbone: Backbone, samples: Sequence[Sample], latents: int) -> Reading:
    """Prefill and free-running span of every sample, in one batch."""
    reading = Reading()
    for sample in samples:
        try:
            reading.prompts.append(prompt_of(backbone, sample, sample, latents))
            reading.samples.append(sample)
        except UserError as error:
            reading.errors.append((sample, str(error)))
    return read_prompts(backbone, reading, latents)


@torch.no_grad()
def read_prompts(backbone: Backbone, reading: Reading, latents: int) -> Reading:
    """Prefill and free-running span of the prompts of a reading, in one batch; the same reading."""
    if reading.prompts:
        batch = backbone.batch(reading.prompts)
        reading.visual = backbone.encode_images(batch.images)
        reading.prompt, _ = prefill(backbone, batch, reading.visual)
        reading.after, reading.latents_RKD = think(backbone, reading.prompt, latents)
    return reading
