"""Asking both views of counterfactual pairs, in one conversation or in two. Everything goes through `Responder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.answers import JUDGE, parser
from realvr.backbone.samples import conversation
from realvr.backbone.types import Turn
from realvr.data.sample import Sample
from realvr.diagnostics.counterfactual import Variant
from realvr.diagnostics.pairs import Pair
from realvr.errors import UserError
from realvr.evaluation.responder import Plan, Reply, Request, Responder
from realvr.imaging.cache import ImageCache
from realvr.runs.journal import Record


def ask_pairs(
    responder: Responder, pairs: Sequence[Pair], variants: Sequence[Variant], latents: int, policy: str = "strict"
) -> list[Record]:
    """Records of one batch of pairs, variant by variant. ``policy``: one of `realvr.answers.POLICIES`."""
    turns = [_view_turns(responder, pair) for pair in pairs]
    originals = [_request(pair.original, view[0]) for pair, view in zip(pairs, turns, strict=True)]
    first = _replies(responder, originals, latents)
    records = []
    for protocol, span in variants:
        if protocol == "separate":
            asked = [_request(pair.edited, view[1]) for pair, view in zip(pairs, turns, strict=True)]
        else:
            asked = [
                _second_turn(pair, view, reply, span == "keep")
                for pair, view, reply in zip(pairs, turns, first, strict=True)
            ]
        second = _replies(responder, asked, latents)
        for pair, *replies in zip(pairs, first, second, strict=True):
            records.append(_record(pair, (protocol, span), replies, latents, policy))
    return records


def ask_samples(responder: Responder, samples: Sequence[Sample], latents: int) -> list[Reply]:
    """Replies to one batch of samples, each a conversation of its own; one that cannot be asked has the error."""
    turns = [_turns(responder, sample, ImageCache()) for sample in samples]
    asked = [_request(sample, own) for sample, own in zip(samples, turns, strict=True)]
    return _replies(responder, asked, latents)


def _view_turns(responder: Responder, pair: Pair) -> tuple[list[Turn] | str, list[Turn] | str]:
    """The conversations of both views, or why there is none. Pictures are processed here, once for all variants."""
    cache = ImageCache()
    return _turns(responder, pair.original, cache), _turns(responder, pair.edited, cache)


def _turns(responder: Responder, sample: Sample, cache: ImageCache) -> list[Turn] | str:
    backbone = getattr(responder, "backbone", None)
    try:
        images: list[Any] = [
            cache.open(image) if backbone is None else backbone.image(image, cache.open) for image in sample.images
        ]
    except UserError as error:
        return str(error)
    return conversation(sample, images)


def _request(sample: Sample, turns: list[Turn] | str) -> Request | str:
    return turns if isinstance(turns, str) else Request(sample, turns)


def _second_turn(
    pair: Pair, turns: tuple[list[Turn] | str, list[Turn] | str], reply: Reply, keep: bool
) -> Request | str:
    """The whole conversation up to the question about the edited picture."""
    before, after = turns
    if reply.error is not None or isinstance(before, str):
        return f"the first turn has no reply ({reply.error})"
    if isinstance(after, str):
        return after
    said = Turn("assistant", reply.text, ids=reply.ids or None, latents=reply.latents if keep else None)
    # One conversation has one system message: that of the original view.
    return Request(pair.edited, [*before, said, *(turn for turn in after if turn.role != "system")])


def _replies(responder: Responder, requests: Sequence[Request | str], latents: int) -> list[Reply]:
    """A reply to each request; where there is an error instead of one, a reply that says so."""
    ready = [request for request in requests if isinstance(request, Request)]
    answers = iter(responder.reply(ready, [Plan(latents)])[0] if ready else [])
    return [
        next(answers) if isinstance(request, Request) else Reply("", finish="error", error=request)
        for request in requests
    ]


def _record(pair: Pair, variant: Variant, replies: Sequence[Reply], latents: int, policy: str) -> Record:
    """One line of counterfactual.jsonl; lists hold the first and the second view."""
    reader = parser(policy, "evaluation")
    extracted = [
        None if reply.error is not None else reader.read(reply.text, view.choices)
        for reply, view in zip(replies, pair.views, strict=True)
    ]
    return {
        "pair": pair.id,
        "edit": pair.edit,
        "protocol": variant[0],
        "first_span": variant[1],
        "latents": latents,
        "changed": pair.changed,
        "truths": list(pair.truths),
        "extracted": extracted,
        "texts": [reply.text for reply in replies],
        "questions": [view.id for view in pair.views],
        "choices": list(pair.original.choices),
        "policy": policy,
        "parser": str(reader),
        "judge": JUDGE,
        "prompts": [reply.prompt for reply in replies],
        "finish": [reply.finish for reply in replies],
        "new_tokens": [reply.new_tokens for reply in replies],
        "errors": [reply.error for reply in replies],
    }
