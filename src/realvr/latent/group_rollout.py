"""Group rollout: one prefill and one latent span per prompt, G sampled continuations.

The latents are deterministic given the prompt, so the G completions share them and only the text branches. The
branches grow side by side on one trunk: a step feeds one token per unfinished branch, the prompt's keys and values
are held once and read once per step, not G times, and finished branches and prompts leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.types import Prompt
from realvr.errors import UserError
from realvr.latent.completions import Branch, Completion, finish, stop_test
from realvr.latent.sampling import Sampling, choose, draws, prompt_seeds
from realvr.latent.span import Interventions, decoder_pass, log_softmax_rows, prefill, span_tokens, think
from realvr.latent.state import State

if TYPE_CHECKING:
    from realvr.latent.fast import FastDecode


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
    fast: FastDecode | None = None,
) -> Rollout:
    """Sample ``group`` completions of each prompt after one shared latent span of K = ``latents`` (the checkpoint's
    K).

    ``interventions`` are vectors put into the span (see `think`). ``go_on`` is for processes that must pass through the
    model equally often (see `decode`). ``fast`` runs the span and the decoding in static shapes where that applies.
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
    with nullcontext() if fast is None else fast.settled():
        state, z_BKD = free_span(backbone, state, count, interventions=interventions, go_on=go_on, fast=fast)
        completions = decode(backbone, state, group, sampling, seed, limits, go_on, fast)
    return Rollout(completions, z_BKD, sampling.policy_temperature)


def free_span(
    backbone: Backbone,
    state: State,
    latents: int,
    *,
    interventions: Interventions | None = None,
    go_on: Callable[[bool], bool] | None = None,
    fast: FastDecode | None = None,
) -> tuple[State, Tensor]:
    """`think`, in static shapes where ``fast`` applies."""
    new = span_tokens(latents)
    if fast is not None and latents > 0 and fast.applies(state, new=new, go_on=go_on, put=interventions):
        return fast.think(state, latents)
    return think(backbone, state, latents, interventions=interventions)


def _room(backbone: Backbone, prompt: Prompt, latents: int) -> int:
    """Tokens that can still be decoded before the context is full."""
    room = backbone.context_length - len(prompt) - span_tokens(latents)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens with {latents} latents leaves no room to answer: "
            f"the model's context is {backbone.context_length} tokens"
        )
    return room


@torch.no_grad()
def decode(
    backbone: Backbone,
    state: State,
    group: int,
    sampling: Sampling,
    seed: int | Sequence[int] = 0,
    limits: Sequence[int] | None = None,
    go_on: Callable[[bool], bool] | None = None,
    fast: FastDecode | None = None,
) -> list[list[Completion]]:
    """Sample ``group`` continuations of each row of ``state``, at most ``limits[row]`` tokens each (``max_new``).

    ``go_on`` is called before every pass with whether this process still decodes, and returns whether any process
    does. One that has finished repeats its last pass until none does: parameters sharded over processes need equally
    many passes on each. ``fast`` decodes in static shapes where that applies.
    """
    limits = [sampling.max_new] * state.rows if limits is None else limits
    steps = max(limits, default=0)
    if fast is not None and fast.applies(state, new=steps, group=group, go_on=go_on):
        return fast.decode(state, group, sampling, seed, limits)
    uniform = draws(prompt_seeds(seed, state.rows), group, steps).flatten(0, 1).to(backbone.device)
    forbidden = backbone.forbidden_ids().to(backbone.device)
    completions = [[Completion() for _ in range(group)] for _ in range(state.rows)]
    # fed.rows[r] holds the unfinished branches of row r of the (shrinking) state, in the order their tokens are fed.
    fed = _Layout(
        [[Branch(p, g, completions[p][g], limits[p]) for g in range(group)] for p in range(state.rows)],
        group,
        backbone.device,
    )
    stopped = stop_test(backbone, sampling.stop)
    # Every branch of a row starts from the same state: one row of logits serves them all.
    logp = log_softmax_rows(backbone, state.last_BD, sampling.policy_temperature, forbidden)
    logp = logp.repeat_interleave(group, dim=0)
    start = state.next_B
    for step in range(steps):
        tokens = choose(logp, uniform[fed.index, step], sampling)
        chosen = logp.gather(-1, tokens[:, None])[:, 0]
        for branch, token, value in zip(fed.branches, tokens.tolist(), chosen.tolist(), strict=True):
            branch.completion.ids.append(token)
            branch.completion.logprobs.append(value)
        survivors = finish(backbone, fed.rows, stopped)
        if not any(survivors):
            break
        if go_on is not None:
            go_on(True)
        if sum(map(len, survivors)) < len(fed.branches):
            state, start, fed, tokens = _drop(state, start, fed, survivors, tokens)
        state, hidden = _feed(backbone, state, fed, tokens, start + step)
        logp = log_softmax_rows(backbone, hidden, sampling.policy_temperature, forbidden)
    while go_on is not None and go_on(False):  # only the passes count: what comes out is dropped
        _, hidden = _feed(backbone, state, fed, tokens, start)
        log_softmax_rows(backbone, hidden, sampling.policy_temperature, forbidden)
    for row_group in completions:
        for completion in row_group:
            completion.text = backbone.tokenizer.decode(completion.reply_ids, skip_special_tokens=False)
    return completions


class _Layout:
    """Where the unfinished branches stand in the columns that are fed. It is the same until one of them ends, and so
    are its tensors."""

    def __init__(self, rows: list[list[Branch]], group: int, device: torch.device) -> None:
        self.rows, self.group, self.device = rows, group, device
        self.branches = [branch for row in rows for branch in row]
        self.index = torch.tensor([b.prompt * group + b.number for b in self.branches], device=device)
        self.width = max(len(row) for row in rows)
        # -2: a filler that no branch sees
        segment = torch.tensor([[b.number for b in row] + [-2] * (self.width - len(row)) for row in rows])
        self.segment = segment.to(device)
        full = len(self.branches) == segment.numel()
        self.real = None if full else self.segment != -2
        self.place = None if full else (segment != -2).flatten().nonzero()[:, 0].to(device)


def _drop(
    state: State, start: Tensor, fed: _Layout, survivors: list[list[Branch]], tokens: Tensor
) -> tuple[State, Tensor, _Layout, Tensor]:
    """Without the branches that have ended, and without the rows of which all have."""
    live = {id(branch) for row in survivors for branch in row}
    kept = [index for index, branch in enumerate(fed.branches) if id(branch) in live]
    tokens = tokens[torch.tensor(kept, device=tokens.device)]
    keep = [index for index, row in enumerate(survivors) if row]
    if len(keep) < len(survivors):
        index = torch.tensor(keep, device=start.device)
        state, start = state.select(index), start[index]
    return state, start, _Layout([survivors[i] for i in keep], fed.group, fed.device), tokens


def _feed(backbone: Backbone, state: State, fed: _Layout, tokens: Tensor, position_B: Tensor) -> tuple[State, Tensor]:
    """One token per unfinished branch; returns the hidden states of these branches (n, D) in row-major order."""
    ids = tokens
    if fed.place is not None:
        ids = torch.zeros(fed.segment.numel(), dtype=tokens.dtype, device=tokens.device)
        ids = ids.index_copy(0, fed.place, tokens)
    longer, hidden = decoder_pass(
        backbone,
        state,
        backbone.embed(ids.view(-1, fed.width)),
        position_B[:, None].expand(-1, fed.width),
        real_BT=fed.real,
        segment_BT=fed.segment,
    )
    hidden = hidden.flatten(0, 1)
    return longer, hidden if fed.place is None else hidden[fed.place]
