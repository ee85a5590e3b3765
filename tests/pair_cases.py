"""Small counterfactual data and responders that know what they say, for the tests of pairs and of exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from realvr.data.sample import Sample
from realvr.diagnostics.pairs import Pair, pair_up
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.world.splits import Recipe, samples

SIZE = (48, 48)


def world_samples(count: int, seed: int = 0) -> list[Sample]:
    """Both views of ``count`` pairs of each of the four edits."""
    return list(samples(Recipe("counterfactual", seed=seed, count=count, size=SIZE)))


def world_pairs(count: int, seed: int = 0) -> list[Pair]:
    pairs, report = pair_up(world_samples(count, seed))
    assert not report.lines()
    return pairs


class Says:
    """A responder whose reply is a function of the request."""

    name = "says"
    latents = 0

    def __init__(self, reply: Callable[[Request], str]) -> None:
        self.text = reply
        self.batches: list[int] = []

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        self.batches.append(len(requests))
        return [[Reply(self.text(request)) for request in requests] for _ in plans]


def oracle(request: Request) -> str:
    return f"<answer>{request.sample.answer}</answer>"


def stubborn(request: Request) -> str:
    """Right at first, and then what it said before."""
    said = [turn.text for turn in request.turns if turn.role == "assistant"]
    return said[-1] if said else oracle(request)
