"""Attention between bins of tokens: image, question, latents and answer of one batch, mean over layers and heads.

Queries of a bin are averaged and keys summed, so a row is the share of attention that each bin gets; what is missing
from 1 went to tokens of no bin (system and template text, markers). Both passes, over the prompt and over what follows,
pool their rows a few queries at a time (`Probe.pool`): no matrix of all pairs exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.data.boxes import prompt_boxes, token_mask
from realvr.data.sample import Sample
from realvr.data.wording import question_text
from realvr.diagnostics.measuring.attending import Attending, Generated, answer, token_offsets
from realvr.diagnostics.model import Model


@dataclass(frozen=True)
class Binned:
    """One sample. ``mass`` (Q, Q) float64: share of attention from the queries of a bin to the keys of another."""

    sample: Sample
    said: Generated
    mass: Tensor
    sizes: list[int]
    """Tokens of each bin; one without any has neither row nor column."""
    evidence: list[float] | None
    """Share of the evidence's tokens in each bin of the image; None where no box covers a token."""
    found: bool
    """Whether the question was found in the prompt; else all text behind the last picture stands for it."""


def cut(columns: Sequence[int], count: int) -> list[list[int]]:
    """Columns in ``count`` runs of almost equal length, in order; with fewer columns than bins some are empty."""
    return [
        list(columns[place * len(columns) // count : (place + 1) * len(columns) // count]) for place in range(count)
    ]


def question_columns(backbone: Backbone, prompt: Prompt, sample: Sample) -> tuple[list[int], bool]:
    """Tokens of the last question with its options and instruction, by place in the prompt, and whether its text was
    found there; if not, all tokens behind the last picture."""
    ids = prompt.ids.tolist()
    start = max((place + 1 for place, token in enumerate(ids) if token == backbone.image_id), default=0)
    offsets = token_offsets(backbone, ids[start:])
    text = backbone.tokenizer.decode(ids[start:], skip_special_tokens=False)
    asked = question_text(sample).strip()
    first = text.rfind(asked)
    if first < 0:
        return list(range(start, len(ids))), False
    last = first + len(asked)
    return [start + place for place, (a, b) in enumerate(offsets) if a < last and b > first], True


def evidence_shares(sample: Sample, prompt: Prompt, bins: int) -> list[float] | None:
    """How the visual tokens of the evidence are spread over the bins of the image."""
    boxes = prompt_boxes(sample)
    grids = [image.grid for image in prompt.images]
    masks = [token_mask([box.xyxy for box in boxes if box.image == n], grid) > 0 for n, grid in enumerate(grids)]
    inside = np.concatenate(masks) if masks else np.zeros(0, dtype=bool)
    if not inside.any():
        return None
    return [float(inside[own].sum() / inside.sum()) for own in cut(range(len(inside)), bins)]


@torch.no_grad()
def binned(
    model: Model, samples: Sequence[Sample], image: int, question: int, reply: int
) -> tuple[list[Binned], list[tuple[Sample, str]]]:
    """Read, answer and probe one batch; samples that cannot be read come with the reason."""
    backbone = model.backbone
    reading = model.read(samples)
    if not reading.samples:
        return [], reading.errors
    answers = answer(backbone, reading, model.sampling, model.latents)
    looking = Attending(backbone, reading, answers)
    image_BN, shown_BN = looking.image_columns()
    bins, found = [], []
    for row, (sample, prompt) in enumerate(zip(reading.samples, reading.prompts, strict=True)):
        columns, exact = question_columns(backbone, prompt, sample)
        padding = looking.first - len(prompt)
        after = looking.first + looking.before
        slots = range(looking.slots.start, looking.slots.stop)
        bins.append(
            cut(image_BN[row][shown_BN[row]].tolist(), image)
            + cut([padding + place for place in columns], question)
            + [[slot] for slot in slots]
            + cut(range(after, after + len(answers[row].ids)), reply)
        )
        found.append(exact)
    mass_BQQ = _masses(looking, bins)
    return [
        Binned(
            sample,
            answers[row],
            mass_BQQ[row],
            [len(own) for own in bins[row]],
            evidence_shares(sample, prompt, image) if sample.boxes else None,
            found[row],
        )
        for row, (sample, prompt) in enumerate(zip(reading.samples, reading.prompts, strict=True))
    ], reading.errors


def _masses(looking: Attending, bins: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """(B, Q, Q), mean over layers: the prompt's queries from one pass, all later ones from another."""
    prompt, total = looking.first, looking.first + looking.queries
    left_BQT, right_BTQ = torch.zeros(len(bins), len(bins[0]), total), torch.zeros(len(bins), total, len(bins[0]))
    for row, own in enumerate(bins):
        for place, columns in enumerate(own):
            left_BQT[row, place, columns] = 1 / max(len(columns), 1)
            right_BTQ[row, columns, place] = 1
    before = Probe(pool=(left_BQT[..., :prompt], right_BTQ[:, :prompt]))
    looking.look_from_prompt([before])
    mass = before.stack().double().mean(0).cpu()
    if looking.queries:
        after = Probe(pool=(left_BQT[..., prompt:], right_BTQ))
        looking.look([after])
        mass = mass + after.stack().double().mean(0).cpu()
    return mass
