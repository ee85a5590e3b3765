"""Completions of a prompt while they grow: what was said, and whether it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from realvr.backbone.backbone import Backbone

FinishReason = Literal["eos", "stop", "length"]


@dataclass
class Completion:
    """One sampled continuation. ``ids`` include the end-of-sequence token where one was sampled; ``text`` does not."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: FinishReason = "length"

    @property
    def reply_ids(self) -> list[int]:
        """What was said, without the end-of-sequence token: the ids to keep in a conversation that goes on."""
        return self.ids[:-1] if self.finish == "eos" else self.ids


@dataclass
class Branch:
    """An unfinished completion: number ``number`` of prompt ``prompt``, of at most ``limit`` tokens."""

    prompt: int
    number: int
    completion: Completion
    limit: int


def stop_test(backbone: Backbone, stop: str | None) -> Callable[[list[int]], bool]:
    """Whether ids have just come to hold the text ``stop``.

    To decode the end of every branch at every step costs more than the rest of the bookkeeping together, so that is
    done only where the newest token holds the last character of ``stop``.
    """
    if not stop:
        return lambda ids: False
    decode, last = backbone.tokenizer.decode, stop[-1]
    tail = len(stop.encode()) + 1  # a token holds at least one byte
    alone = "!" <= last <= "~"  # one byte, and no space that decoding might strip: it stands whole in some token

    @cache
    def may_end(token: int) -> bool:
        return not alone or last in decode([token])

    return lambda ids: may_end(ids[-1]) and stop in decode(ids[-tail:])


def finish(backbone: Backbone, rows: list[list[Branch]], stopped: Callable[[list[int]], bool]) -> list[list[Branch]]:
    """Set the finish reason of branches that just ended; return those that go on, row by row."""
    survivors = []
    for row in rows:
        alive = []
        for branch in row:
            done = branch.completion
            if done.ids[-1] in backbone.eos_ids:
                done.finish = "eos"
            elif stopped(done.ids):
                done.finish = "stop"
            elif len(done.ids) < branch.limit:
                alive.append(branch)
        survivors.append(alive)
    return survivors
