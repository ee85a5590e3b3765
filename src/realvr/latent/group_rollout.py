"""Group rollout: one prefill and one latent span per prompt, G sampled continuations.

The latents are deterministic given the prompt, so the G completions share them and only the text branches. The
branches grow side by side on one trunk: a step feeds one token per unfinished branch, the prompt's keys and values
are held once and read once per step, not G times, and finished branches and prompts leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.types import Prompt
from realvr.errors import UserError
from realvr.latent.sampling import Sampling, choose, draws, prompt_seeds
from realvr.latent.span import Interventions, decoder_pass, log_softmax_rows, prefill, span_tokens, think
from realvr.latent.state import State

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
class Rollout:
    """G completions for each of B prompts, and the latents they share."""

    completions: list[list[Completion]]
    latents_BKD: Tensor
    temperature: float
    """Temperature of the recorded log-probabilities."""

    def tensors(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """(ids, real, log-probabilities), each (B, G, S), right-padded with 0."""
        flat = [completion for group in self.completions for completion in group]
        shape = (len(self.completions), len(self.completions[0]) if self.completions else 0)
        size = max((len(c.ids) for c in flat), default=0)
        ids = torch.zeros(len(flat), size, dtype=torch.long)
        real = torch.zeros(len(flat), size, dtype=torch.bool)
        logp = torch.zeros(len(flat), size)
        for row, c in enumerate(flat):
            ids[row, : len(c.ids)] = torch.tensor(c.ids, dtype=torch.long)
            real[row, : len(c.ids)] = True
            logp[row, : len(c.ids)] = torch.tensor(c.logprobs)
        return tuple(x.view(*shape, size).to(device) for x in (ids, real, logp))  # type: ignore[return-value]


@torch.no_grad()
def rollout(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    *,
    group: int = 1,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    latents: int | None = None,
    visual: VisualTokens | None = None,
    interventions: Interventions | None = None,
    go_on: Callable[[bool], bool] | None = None,
) -> Rollout:
    """Sample ``group`` completions of each prompt after one shared latent span of K = ``latents`` (the checkpoint's
    K).

    ``interventions`` are vectors put into the span (see `think`). ``go_on`` is for processes that must pass through the
    model equally often (see `decode`).
    """
    sampling = sampling or Sampling()
    count = backbone.latents if latents is None else latents
    if group < 1:
        raise UserError(f"group is {group}: at least one completion per prompt is sampled")
    if count < 0:
        raise UserError(f"latents is {count}: the number of latent slots cannot be negative")
    if not prompts:
        return Rollout([], torch.empty(0, count, backbone.width), sampling.policy_temperature)
    limits = [min(sampling.max_new, _room(backbone, prompt, count)) for prompt in prompts]
    state, _ = prefill(backbone, backbone.batch(prompts), visual)
    state, z_BKD = think(backbone, state, count, interventions=interventions)
    completions = decode(backbone, state, group, sampling, seed, limits, go_on)
    return Rollout(completions, z_BKD, sampling.policy_temperature)


def _room(backbone: Backbone, prompt: Prompt, latents: int) -> int:
    """Tokens that can still be decoded before the context is full."""
    room = backbone.context_length - len(prompt) - span_tokens(latents)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens with {latents} latents leaves no room to answer: "
            f"the model's context is {backbone.context_length} tokens"
        )
    return room


@dataclass
class _Branch:
    prompt: int
    number: int
    completion: Completion
    limit: int


@torch.no_grad()
def decode(
    backbone: Backbone,
    state: State,
    group: int,
    sampling: Sampling,
    seed: int | Sequence[int] = 0,
    limits: Sequence[int] | None = None,
    go_on: Callable[[bool], bool] | None = None,
) -> list[list[Completion]]:
    """Sample ``group`` continuations of each row of ``state``, at most ``limits[row]`` tokens each (``max_new``).

    ``go_on`` is called before every pass with whether this process still decodes, and returns whether any process
    does. One that has finished repeats its last pass until none does: parameters sharded over processes need equally
    many passes on each.
    """
    limits = [sampling.max_new] * state.rows if limits is None else limits
    steps = max(limits, default=0)
    uniform = draws(prompt_seeds(seed, state.rows), group, steps)
    forbidden = backbone.forbidden_ids().to(backbone.device)
    completions = [[Completion() for _ in range(group)] for _ in range(state.rows)]
    # rows[r] holds the unfinished branches of row r of the (shrinking) state, in the order their tokens are fed.
    rows = [[_Branch(p, g, completions[p][g], limits[p]) for g in range(group)] for p in range(state.rows)]
    stopped = _stop_test(backbone, sampling.stop)
    hidden = state.last_BD[:, None]
    start = state.next_B
    for step in range(steps):
        branches = [branch for row in rows for branch in row]
        if step == 0:  # every branch of a row starts from the same state: one row of logits serves them all
            logp = log_softmax_rows(backbone, hidden[:, 0], sampling.policy_temperature, forbidden)
            logp = logp.repeat_interleave(group, dim=0)
        else:
            logp = log_softmax_rows(backbone, hidden, sampling.policy_temperature, forbidden)
        pick = torch.tensor([(b.prompt, b.number) for b in branches])
        tokens = choose(logp, uniform[pick[:, 0], pick[:, 1], step], sampling)
        chosen = logp.gather(-1, tokens[:, None])[:, 0]
        for branch, token, value in zip(branches, tokens.tolist(), chosen.tolist(), strict=True):
            branch.completion.ids.append(token)
            branch.completion.logprobs.append(value)
        survivors = _finish(backbone, rows, stopped)
        if not any(survivors):
            break
        if go_on is not None:
            go_on(True)
        state, start, rows = _drop_rows(state, start, survivors)
        state, hidden = _feed(backbone, state, rows, start + step)
    while go_on is not None and go_on(False):  # only the passes count: what comes out is dropped
        _, hidden = _feed(backbone, state, rows, start)
        log_softmax_rows(backbone, hidden, sampling.policy_temperature, forbidden)
    for row_group in completions:
        for completion in row_group:
            completion.text = backbone.tokenizer.decode(completion.reply_ids, skip_special_tokens=False)
    return completions


def _stop_test(backbone: Backbone, stop: str | None) -> Callable[[list[int]], bool]:
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


def _finish(backbone: Backbone, rows: list[list[_Branch]], stopped: Callable[[list[int]], bool]) -> list[list[_Branch]]:
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


def _drop_rows(state: State, start: Tensor, rows: list[list[_Branch]]) -> tuple[State, Tensor, list[list[_Branch]]]:
    keep = [index for index, row in enumerate(rows) if row]
    if len(keep) == len(rows):
        return state, start, rows
    index = torch.tensor(keep, device=start.device)
    return state.select(index), start[index], [rows[i] for i in keep]


def _feed(backbone: Backbone, state: State, rows: list[list[_Branch]], position_B: Tensor) -> tuple[State, Tensor]:
    """One token per unfinished branch; returns the hidden states of these branches (n, D) in row-major order."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[b.completion.ids[-1] for b in row] + [0] * (width - len(row)) for row in rows])
    # -2: a filler that no branch sees
    segment = torch.tensor([[b.number for b in row] + [-2] * (width - len(row)) for row in rows])
    device = position_B.device
    filler = segment == -2
    positions = position_B[:, None].expand(-1, width)
    longer, hidden = decoder_pass(
        backbone,
        state,
        backbone.embed(ids.to(device)),
        positions,
        real_BT=(~filler).to(device) if bool(filler.any()) else None,
        segment_BT=segment.to(device),
    )
    if bool(filler.any()):
        place = (~filler).flatten().nonzero()[:, 0].to(device)
        return longer, hidden.flatten(0, 1)[place]
    return longer, hidden.flatten(0, 1)
