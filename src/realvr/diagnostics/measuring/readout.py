"""Attention of generated answers on the latents; `realvr.diagnostics.readout` says what is asked and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from realvr.backbone.attention import Probe
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.attending import Attending, answer
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.maths import credit


@torch.no_grad()
def readout_records(model: Model, reading: Reading, policy: str) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """What the record of each sample that was read has: the answer, the verdict and r_1 … r_K."""
    if not reading.samples:
        return
    answers = answer(model.backbone, reading, model.sampling, model.latents, policy)
    attending = Attending(model.backbone, reading, answers)
    rows_BR, real_BR = attending.content()
    readout: list[list[float] | None] = [None] * len(answers)
    if rows_BR.shape[1]:
        probe = Probe(rows=rows_BR, columns=attending.slots)
        attending.look([probe])
        r_BK = credit.readout(probe.stack(), real_BR)
        readout = [r_K if one.content else None for one, r_K in zip(answers, r_BK.double().tolist(), strict=True)]
    for sample, said, r_K in zip(reading.samples, answers, readout, strict=True):
        yield (
            sample,
            {
                "latents": model.latents,
                "extracted": said.extracted,
                "correct": said.correct,
                "block": said.block,
                "content": len(said.content),
                "readout": None if r_K is None else [short(value) for value in r_K],
            },
        )
