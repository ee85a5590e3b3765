"""Residual injection on a model's tensors; `realvr.diagnostics.residual` says what is asked and why.

One prefill and one free-running span per view serve all values of alpha; spans that come out equal are decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realvr.answers import JUDGE, parser
from realvr.backbone.backbone import Backbone
from realvr.diagnostics.measuring.exchange import Answered, Answers, Recipient, Spans, recipients_of
from realvr.diagnostics.measuring.views import read_views
from realvr.diagnostics.numbers import hashed, short
from realvr.diagnostics.pairs import Pair
from realvr.latent.sampling import GREEDY, Sampling
from realvr.maths.injection import random_direction, residual
from realvr.runs.journal import Record


@dataclass(frozen=True)
class ResidualOptions:
    """What is injected, and how answers are made and read."""

    latents: int
    alphas: tuple[float, ...]
    seeds: int = 1
    """Random directions per value of alpha."""
    policy: Any = "strict"
    sampling: Sampling = GREEDY
    rows: int = 64
    """Spans decoded together."""


@torch.no_grad()
def residual_pairs(backbone: Backbone, pairs: Sequence[Pair], options: ResidualOptions) -> list[Record]:
    """One record for each pair of a batch."""
    views = read_views(backbone, pairs, [None] * len(pairs), options.latents)
    records: list[Record] = [
        {"pair": pair.id, "edit": pair.edit, "directions": {}, "error": error} for pair, error in views.errors
    ]
    if not views.pairs:
        return records
    assert views.latents_RKD is not None
    recipients = recipients_of(views)
    spans = Spans(backbone, views, Answers(backbone, recipients), options)
    tickets = [
        _put(spans, recipient, views.latents_RKD[recipient.row], views.latents_RKD[recipient.donor], options)
        for recipient in recipients
    ]
    spans.run()
    found: dict[str, Record] = {}
    for recipient, (injected, random) in zip(recipients, tickets, strict=True):
        pair = recipient.pair
        record = found.setdefault(pair.id, _about(pair, options))
        own, other = views.latents_RKD[recipient.row].double(), views.latents_RKD[recipient.donor].double()
        record["directions"][recipient.direction] = {
            "recipient_truth": recipient.truths[0],
            "donor_truth": recipient.truths[1],
            "step": [short(value) for value in (other - own).norm(dim=-1).tolist()],
            "norm": [short(value) for value in own.norm(dim=-1).tolist()],
            "inject": _told(pair, [spans.answered[ticket] for ticket in injected], options),
            "random": [_told(pair, [spans.answered[ticket] for ticket in one], options) for one in random],
        }
    return records + list(found.values())


def _about(pair: Pair, options: ResidualOptions) -> Record:
    return {
        "pair": pair.id,
        "edit": pair.edit,
        "latents": options.latents,
        "alphas": list(options.alphas),
        "choices": list(pair.original.choices),
        "policy": options.policy,
        "parser": str(parser(options.policy, "evaluation")),
        "judge": JUDGE,
        "directions": {},
        "error": None,
    }


def _put(
    spans: Spans, recipient: Recipient, own_KD: Tensor, other_KD: Tensor, options: ResidualOptions
) -> tuple[list[int], list[list[int]]]:
    """Tickets of the spans with alpha times the step to the other view, and with as much of a random direction."""
    injected = [spans.put(recipient, residual(own_KD, other_KD, alpha)) for alpha in options.alphas]
    random = []
    for seed in range(options.seeds):
        elsewhere = own_KD + random_direction(other_KD - own_KD, control_seed(recipient, seed))
        random.append([spans.put(recipient, residual(own_KD, elsewhere, alpha)) for alpha in options.alphas])
    return injected, random


def control_seed(recipient: Recipient, seed: int) -> int:
    """Of the random direction: the seed, the pair and the direction alone decide it."""
    return hashed(f"{seed}\n{recipient.pair.id}\n{recipient.direction}")


def _told(pair: Pair, answered: Sequence[Answered], options: ResidualOptions) -> dict[str, list[Any]]:
    reader = parser(options.policy, "evaluation")
    return {
        "extracted": [reader.read(one.completion.text, pair.original.choices) for one in answered],
        "margin": [short(one.scores[1] - one.scores[0]) for one in answered],
    }
