"""Data that each rank reads for itself, in a form that another number of ranks can go on with.

A run that starts on N ranks has N lanes: one sequence of rows each, with random numbers of its own. A step is the rows
of all lanes, one lane after the other, cut into microbatches; rank r of M takes the r-th part of them. While the number
of ranks stays what it was, rank r has lane r. On fewer ranks each reads several lanes; on more, several ranks read the
same lane and each takes a part of it. The step is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realvr.errors import UserError
from realvr.training.sections import OptimSettings
from realvr.training.task import Ranks


@dataclass(frozen=True)
class Lane:
    """What one rank has of a lane."""

    number: int
    lanes: int
    """How many there are."""
    rows: int
    """Of the whole lane in each step."""
    own: slice
    """Microbatches that are this rank's, among those of the lane."""
    counts: bool
    """Whether this rank counts what is drawn from the lane: one of those that read it does."""

    def generator(self, seed: int, step: int) -> torch.Generator:
        """Random numbers of the lane in a step."""
        return torch.Generator().manual_seed((seed * 1_000_003 + step) * 4099 + self.number)


def lanes_of(ranks: Ranks, optim: OptimSettings, lanes: int) -> list[Lane]:
    """The lanes that a rank reads."""
    if optim.batch % (lanes * optim.microbatch):
        raise UserError(
            f"the run was started on {lanes} processes, which each packed their own rows: optim.batch {optim.batch} "
            f"must be a multiple of {lanes} x optim.microbatch {optim.microbatch}"
        )
    count = optim.batch // optim.microbatch
    each = count // lanes
    first, last = ranks.rank * count // ranks.world, (ranks.rank + 1) * count // ranks.world
    found = []
    for number in range(lanes):
        begin, end = number * each, (number + 1) * each
        own = slice(max(first, begin) - begin, min(last, end) - begin)
        if own.start < own.stop:
            found.append(Lane(number, lanes, optim.batch // lanes, own, first <= begin))
    return found


def lane_states(states: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The state of each lane, from those of all ranks of a checkpoint."""
    if "lanes" not in states[0]:  # one each
        return dict(enumerate(states))
    # The first rank that reads a lane is the one that counts what is drawn from it.
    return {int(number): state for each in reversed(states) for number, state in each["lanes"].items()}


def rank_state(found: dict[int, dict[str, Any]], count: int, world: int) -> dict[str, Any]:
    """What a checkpoint keeps of the lanes of a rank; nothing else while each rank has one."""
    if count == world:
        (state,) = found.values()
        return state
    return {"lanes": {str(number): state for number, state in found.items()}, "of": count}


def own_states(state: dict[str, Any], rank: int, world: int) -> tuple[dict[int, dict[str, Any]], int]:
    """The lanes in the state of a rank, and how many there are in all."""
    if "lanes" not in state:
        return {rank: state}, world
    return {int(number): each for number, each in state["lanes"].items()}, int(state["of"])


def redistribute(states: Sequence[dict[str, Any]], ranks: Ranks, optim: OptimSettings) -> dict[str, Any]:
    """The state of this rank, from those of all ranks of a checkpoint that another number of them has written."""
    every = lane_states(states)
    own = lanes_of(ranks, optim, len(every))
    return rank_state({lane.number: every[lane.number] for lane in own}, len(every), ranks.world)


def same_on_all(states: Sequence[dict[str, Any]], who: str) -> dict[str, Any]:
    """States of all ranks that are one and the same; refuses others."""
    for key in states[0]:
        if not all(key in each and _equal(each[key], states[0][key]) for each in states[1:]):
            raise UserError(
                f"{who} keeps '{key}' apart on each rank, so another number of processes cannot go on with it: "
                f"continue on {len(states)}"
            )
    return states[0]


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other
