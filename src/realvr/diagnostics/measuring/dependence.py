"""Utilities and probabilities of one batch; `realvr.diagnostics.dependence` says what is asked and why.

One prefill and one free-running span per sample serve all replacements (`forcing.Spans`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from realvr.data.sample import Sample
from realvr.diagnostics.measuring.forcing import Answers, Scored, Spans, Ticket
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.measuring.replacing import Replacing
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.diagnostics.replacements import REPLACEMENTS
from realvr.maths.dependence import ranked, utility


def measure_dependence(model: Model, reading: Reading, replacing: Replacing) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """The numbers of each sample that was read; those of a replacement that it does not have are None."""
    if reading.latents_RKD is None or reading.after is None or reading.prompt is None:
        return
    answers = Answers.of(model.backbone, reading.samples)
    r_BK = answers.readout(model.backbone, reading.after)[:, 0]
    orders = [ranked(r_K) for r_K in r_BK]
    spans = Spans(model.backbone, reading.prompt, answers)
    own = [spans.add(row, own_KD) for row, own_KD in enumerate(reading.latents_RKD)]
    single: list[dict[str, list[Ticket]]] = [{} for _ in own]
    top: list[dict[str, list[Ticket]]] = [{} for _ in own]
    for kind in REPLACEMENTS:
        for row, given_KD in enumerate(replacing.given(kind, reading)):
            if given_KD is not None:
                own_KD = reading.latents_RKD[row]
                single[row][kind] = spans.replaced(row, own_KD, given_KD, singles(len(own_KD)))
                top[row][kind] = spans.replaced(row, own_KD, given_KD, first(orders[row]))
    spans.run()
    for row, sample in enumerate(reading.samples):
        base = spans.scored(own[row])
        yield (
            sample,
            {
                "answer_tokens": int(answers.real_BYS[row, 0].sum()),
                "logp": short(base.logp),
                "content": short(base.content),
                "readout": shorts(r_BK[row].tolist()),
                "order": [t + 1 for t in orders[row]],
                "utility": {kind: _utility(spans, base.logp, single[row].get(kind)) for kind in REPLACEMENTS},
                "top": {kind: _top(spans, base, top[row].get(kind)) for kind in REPLACEMENTS},
                "donor": replacing.donors.get(sample.id),
                "donor_same": replacing.same_answer(sample.id),
            },
        )


def singles(latents: int) -> list[list[int]]:
    """Each slot alone."""
    return [[t] for t in range(latents)]


def first(order: Sequence[int]) -> list[Sequence[int]]:
    """The first k of an order, k = 0 … K."""
    return [order[:k] for k in range(len(order) + 1)]


def losses(logp: float, others: Sequence[float]) -> list[float]:
    """Log-probability of one answer minus that after each of several other spans: ``u_t`` where one latent differs."""
    before, after = (torch.tensor(values, dtype=torch.float64) for values in ([logp], [list(others)]))
    found: list[float] = utility(before, after)[0].tolist()
    return found


def shorts(values: Iterable[float]) -> list[float]:
    """Six significant digits each."""
    return [short(value) for value in values]


def _utility(spans: Spans, logp: float, tickets: Sequence[Ticket] | None) -> list[float] | None:
    return None if tickets is None else shorts(losses(logp, [spans.scored(one).logp for one in tickets]))


def _top(spans: Spans, base: Scored, tickets: Sequence[Ticket] | None) -> dict[str, list[float]] | None:
    """Losses, not log-probabilities: they keep their digits where an answer is long."""
    if tickets is None:
        return None
    found = [spans.scored(one) for one in tickets]
    return {
        "loss": shorts(losses(base.logp, [one.logp for one in found])),
        "content": shorts(losses(base.content, [one.content for one in found])),
    }
