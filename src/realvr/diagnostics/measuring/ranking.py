"""Readouts, contrast and losses of one batch; `realvr.diagnostics.ranking` says what is asked and why.

One prefill and one free-running span per sample serve all orders (`forcing.Spans`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from realvr.data.sample import Sample
from realvr.diagnostics.measuring.dependence import first, losses, shorts, singles
from realvr.diagnostics.measuring.forcing import Answers, Spans, Ticket
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.measuring.replacing import Replacing, shuffled
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.diagnostics.replacements import Replacement
from realvr.maths import credit
from realvr.maths.dependence import ranked

NO_OTHER = "there is no other sample to take latents from"


def measure_ranking(
    model: Model,
    reading: Reading,
    wrong: Sequence[Sequence[str]],
    replacing: Replacing,
    kind: Replacement,
    seeds: int,
) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """The numbers of each sample that was read; ``wrong`` are wrong answers. ``skipped`` says why there are none."""
    if reading.latents_RKD is None or reading.after is None or reading.prompt is None:
        return
    answers = Answers.of(model.backbone, reading.samples, wrong)
    r_BYK = answers.readout(model.backbone, reading.after)
    r_pos_BK = r_BYK[:, 0]
    r_neg_BK = credit.mean_wrong(r_pos_BK, r_BYK[:, 1:], answers.content_BYS[:, 1:].any(-1))
    gamma_BK = credit.selective(r_pos_BK, r_neg_BK)
    spans = Spans(model.backbone, reading.prompt, answers)
    given = replacing.given(kind, reading)
    rows = []
    for row, (sample, own_KD) in enumerate(reading.spans()):
        count = len(own_KD)
        ties = shuffled(count, 0, f"ties/{sample.id}")  # many contrasts are zero: no slot is first among these
        orders = {"contrast": ranked(gamma_BK[row], ties), "attention": ranked(r_pos_BK[row], ties)}
        orders |= {f"random {seed}": shuffled(count, seed, sample.id) for seed in range(seeds)}
        rows.append(_Row(spans, row, own_KD, given[row], orders))
    spans.run()
    for one in rows:
        one.add_utility()
    spans.run()
    for row, sample in enumerate(reading.samples):
        if given[row] is None:
            yield sample, {"skipped": NO_OTHER}
            continue
        readouts = {"correct": r_pos_BK, "incorrect": r_neg_BK, "contrast": gamma_BK}
        yield (
            sample,
            {
                "skipped": None,
                "wrong": len(wrong[row]),
                **{name: shorts(value_BK[row].tolist()) for name, value_BK in readouts.items()},
                **rows[row].record(seeds),
            },
        )


class _Row:
    """The spans of one sample: as it is, one latent replaced, the first k of each order replaced."""

    def __init__(
        self, spans: Spans, row: int, own_KD: Tensor, given_KD: Tensor | None, orders: dict[str, list[int]]
    ) -> None:
        self.spans, self.row, self.own_KD, self.given_KD = spans, row, own_KD, given_KD
        self.own = spans.add(row, own_KD)
        self.single: list[Ticket] = []
        self.tickets: dict[str, list[Ticket]] = {}
        self.orders = orders
        if given_KD is not None:
            self.single = spans.replaced(row, own_KD, given_KD, singles(len(own_KD)))
            for name, order in orders.items():
                self._add(name, order)

    def _add(self, name: str, order: Sequence[int]) -> None:
        assert self.given_KD is not None
        self.tickets[name] = self.spans.replaced(self.row, self.own_KD, self.given_KD, first(order))

    def _losses(self, tickets: Sequence[Ticket]) -> list[float]:
        scored = self.spans.scored
        return losses(scored(self.own).logp, [scored(one).logp for one in tickets])

    def add_utility(self) -> None:
        """The order by the latents' own losses, once these are known."""
        if self.given_KD is not None:
            self._add("utility", ranked(torch.tensor(self._losses(self.single))))

    def record(self, seeds: int) -> dict[str, Any]:
        """Losses in nats; those of an order have an entry for each k = 0 … K."""
        found = {name: shorts(self._losses(tickets)) for name, tickets in self.tickets.items()}
        return {
            "logp": short(self.spans.scored(self.own).logp),
            "single": shorts(self._losses(self.single)),
            "order": {name: [t + 1 for t in self.orders[name]] for name in ("contrast", "attention")},
            "losses": {name: found[name] for name in ("contrast", "attention", "utility")},
            "random": [found[f"random {seed}"] for seed in range(seeds)],
        }
