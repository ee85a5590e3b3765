"""Answers teacher-forced behind spans: how much each latent is read, and how likely an answer is after other latents.

``Fmt(y)`` is the reply that the model was taught, as everywhere (`realvr.backbone.samples.answer_tokens`); its
probability is that of the entire sequence, the tags included.

The spans of a sample are branches behind its prompt, each with its own markers, latents and answer: they share the
prompt's keys and values without copies. Spans that are equal to the bit are scored once, so equal inputs give equal
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.replacing import replaced
from realvr.latent.span import decoder_pass, score, token_logprobs
from realvr.latent.state import State
from realvr.maths import credit

ROWS = 64
"""Spans that are scored together."""


@dataclass(frozen=True)
class Answers:
    """Y answers of each of B samples: ids, which are real, which are content, (B, Y, S) each. The first is the right
    one; a sample with fewer has rows without a real token."""

    ids_BYS: Tensor
    real_BYS: Tensor
    content_BYS: Tensor

    @classmethod
    def of(cls, backbone: Backbone, samples: Sequence[Sample], wrong: Sequence[Sequence[str]] | None = None) -> Answers:
        """The right answer of each sample and, behind it, its wrong ones."""
        others = [()] * len(samples) if wrong is None else wrong
        groups = [
            [answer_tokens(backbone, answer, sample.choices) for answer in (sample.answer, *more)]
            for sample, more in zip(samples, others, strict=True)
        ]
        return cls(*(x.to(backbone.device) for x in pad_answers(groups)))

    @torch.no_grad()
    def readout(self, backbone: Backbone, after: State) -> Tensor:
        """``r_t(y)`` (B, Y, K) of every answer behind the state after the span; zeros for a missing answer."""
        probe = Probe(columns=after.slots)
        score(backbone, after, self.ids_BYS, self.real_BYS, probes=[probe])
        return credit.readout(probe.stack(), credit.own_rows(self.content_BYS))


def without_answer(backbone: Backbone, sample: Sample) -> str | None:
    """Why no answer of a sample can be teacher-forced; None where one can."""
    if any(answer_tokens(backbone, sample.answer, sample.choices)[1]):
        return None
    return f"{sample.source or sample.id}: has no right answer to teacher-force"


@dataclass(frozen=True)
class Scored:
    """Log-probability of the whole formatted answer, and its mean over the content tokens."""

    logp: float
    content: float


Ticket = tuple[int, int]


class Spans:
    """Spans to be scored with the right answer of their sample; `run`, then `scored`."""

    def __init__(self, backbone: Backbone, prompt: State, answers: Answers, rows: int = ROWS) -> None:
        self.backbone, self.prompt, self.rows = backbone, prompt, rows
        self.ids_BS, self.real_BS = answers.ids_BYS[:, 0], answers.real_BYS[:, 0]
        self.content_BS = answers.content_BYS[:, 0]
        self._spans: list[list[Tensor]] = [[] for _ in range(prompt.rows)]
        self._scored: list[list[Scored]] = [[] for _ in range(prompt.rows)]
        self._tickets: dict[tuple[int, bytes], Ticket] = {}

    def add(self, row: int, latents_KD: Tensor) -> Ticket:
        """Ticket of a span (K, D) behind the prompt of this row."""
        key = (row, latents_KD.double().cpu().numpy().tobytes())
        if key not in self._tickets:
            self._tickets[key] = (row, len(self._spans[row]))
            self._spans[row].append(latents_KD)
        return self._tickets[key]

    def replaced(self, row: int, own_KD: Tensor, given_KD: Tensor, positions: Sequence[Sequence[int]]) -> list[Ticket]:
        """Tickets of a sample's span with given latents at each of these sets of positions, counted from 0."""
        return [self.add(row, replaced(own_KD, given_KD, chosen)) for chosen in positions]

    def scored(self, ticket: Ticket) -> Scored:
        """The numbers of a span, after `run`."""
        row, place = ticket
        return self._scored[row][place]

    @torch.no_grad()
    def run(self) -> None:
        """Score every span that has not been, at most ``rows`` at a time."""
        waiting = [spans[len(done) :] for spans, done in zip(self._spans, self._scored, strict=True)]
        several = max(1, self.rows // len(waiting))
        for start in range(0, max(map(len, waiting), default=0), several):
            parts = [spans[start : start + several] for spans in waiting]
            index = [row for row, part in enumerate(parts) if part]
            most = max(len(parts[row]) for row in index)
            # A row with fewer spans repeats its first: the pass is a rectangle, and what is repeated is dropped.
            spans = [parts[row] + parts[row][:1] * (most - len(parts[row])) for row in index]
            logp_BVS = self._score(torch.tensor(index, device=self.prompt.next_B.device), spans).double()
            content_BS = self.content_BS[index]
            whole = logp_BVS.sum(-1).tolist()
            inside = (logp_BVS.masked_fill(~content_BS[:, None], 0).sum(-1) / content_BS.sum(-1)[:, None]).tolist()
            for place, row in enumerate(index):
                found = zip(whole[place], inside[place], strict=True)
                self._scored[row] += [Scored(*both) for both in found][: len(parts[row])]

    def _score(self, index_B: Tensor, spans: Sequence[Sequence[Tensor]]) -> Tensor:
        """Log-probabilities (B, V, S) of the answer's tokens behind each of V spans, zeros for padding."""
        backbone, markers = self.backbone, self.backbone.markers
        state = self.prompt if len(index_B) == self.prompt.rows else self.prompt.select(index_B)
        ids_BS, real_BS = self.ids_BS[index_B], self.real_BS[index_B]
        z_BVKD = torch.stack([torch.stack(list(each)) for each in spans])
        batch, several, latents, width = z_BVKD.shape
        answer, start, end = (
            backbone.embed(ids)[:, None].expand(-1, several, -1, -1)
            for ids in (ids_BS, *(torch.full_like(ids_BS[:, :1], i) for i in (markers.start, markers.end)))
        )
        embeds_BVTD = torch.cat([start, z_BVKD.to(answer.dtype), end, answer], dim=2)
        size = embeds_BVTD.shape[2]
        before_B = torch.ones(batch, latents + 2, dtype=torch.bool, device=real_BS.device)
        real_BVT = torch.cat([before_B, real_BS], dim=1)[:, None].expand(-1, several, -1)
        positions_BVT = (state.next_B[:, None] + torch.arange(size, device=index_B.device))[:, None]
        segment_BVT = torch.arange(several, device=index_B.device)[None, :, None].expand(batch, -1, size)
        _, hidden = decoder_pass(
            backbone,
            state,
            embeds_BVTD.flatten(1, 2),
            positions_BVT.expand(-1, several, -1).flatten(1),
            real_BT=real_BVT.flatten(1),
            segment_BT=segment_BVT.flatten(1),
        )
        predicting = hidden.view(batch, several, size, width)[:, :, latents + 1 : -1]
        real_BVS = real_BVT[:, :, latents + 2 :]
        logp_N, _ = token_logprobs(backbone, predicting[real_BVS], ids_BS[:, None].expand_as(real_BVS)[real_BVS])
        zeros = torch.zeros(real_BVS.shape, dtype=logp_N.dtype, device=logp_N.device)
        return zeros.masked_scatter(real_BVS, logp_N)
