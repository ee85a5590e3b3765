"""Latents, dummy tokens and ordinary tokens behind one prompt; `realvr.diagnostics.similarity` says what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.data.boxes import prompt_boxes, with_area
from realvr.data.sample import Sample
from realvr.data.targets import as_evidence
from realvr.diagnostics.measuring.controls import dummy_ids
from realvr.diagnostics.measuring.reading import Reading, prompt_of, read_samples
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.errors import UserError
from realvr.latent.group_rollout import decode
from realvr.latent.span import extend, span_tokens
from realvr.maths import geometry
from realvr.runs.journal import Record


@dataclass(frozen=True)
class Found:
    """Hidden states of one sample."""

    sample: Sample
    context_D: Tensor
    latents_KD: Tensor
    dummies_KD: Tensor
    ordinary_SD: Tensor


def evidence_tokens(backbone: Backbone, sample: Sample) -> int:
    """Visual tokens inside the evidence boxes of a sample; 0 without any."""
    boxes = with_area(prompt_boxes(sample))
    if not boxes:
        return 0
    grids = [image.grid for image in prompt_of(backbone, sample, sample, 0).images]
    return len(as_evidence(boxes, False, grids, [0, *accumulate(grid.tokens for grid in grids)]))


def lengths_of(
    model: Model, samples: Sequence[Sample], evidence: bool
) -> tuple[dict[int, list[Sample]], list[tuple[Sample, str]]]:
    """Samples by the number of latents that they get, and those that cannot be read."""
    if not evidence:
        return {model.latents: list(samples)}, []
    found: dict[int, list[Sample]] = {}
    errors = []
    for sample in samples:
        try:
            found.setdefault(evidence_tokens(model.backbone, sample), []).append(sample)
        except UserError as error:
            errors.append((sample, str(error)))
    errors += [(sample, f"{sample.id}: no evidence box, so no number of latents") for sample in found.pop(0, [])]
    return found, errors


@torch.no_grad()
def states_of(
    model: Model, samples: Sequence[Sample], latents: int, dummy: str
) -> tuple[list[Found], list[tuple[Sample, str]]]:
    """Samples that are read with the same number of latents."""
    reading = read_samples(model.backbone, samples, latents)
    if reading.prompt is None or reading.latents_RKD is None:
        return [], reading.errors
    dummies_RKD = _dummies(model.backbone, reading, dummy)
    ordinary = _ordinary(model, reading, latents)
    rows = zip(reading.samples, reading.prompt.last_BD, reading.latents_RKD, dummies_RKD, ordinary, strict=True)
    return [Found(*row) for row in rows], reading.errors


def _dummies(backbone: Backbone, reading: Reading, dummy: str) -> Tensor:
    """Hidden states (R, K, D) at K dummy tokens behind the same prompt and ``<|lvr_start|>``."""
    assert reading.prompt is not None and reading.latents_RKD is not None
    ids = [backbone.markers.start, *dummy_ids(backbone, dummy, reading.latents_RKD.shape[1])]
    ids_BS = torch.tensor(ids, device=backbone.device).expand(reading.prompt.rows, -1)
    _, hidden = extend(backbone, reading.prompt, ids_BS)
    return hidden[:, 1:]


def _ordinary(model: Model, reading: Reading, latents: int) -> list[Tensor]:
    """Hidden states (S, D) at the tokens of the greedy reply behind the span, at most K of them."""
    backbone, after = model.backbone, reading.after
    assert after is not None
    room = backbone.context_length - span_tokens(latents)
    limits = [max(0, min(latents, model.sampling.max_new, room - len(prompt))) for prompt in reading.prompts]
    groups = decode(backbone, after, 1, replace(model.sampling, temperature=0.0), 0, limits)
    replies = [list(group[0].reply_ids) for group in groups]
    longest = max(map(len, replies))
    if not longest:
        return [after.last_BD.new_zeros(0, after.last_BD.shape[-1]) for _ in replies]
    ids_BS = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in replies], device=backbone.device)
    lengths = torch.tensor([len(ids) for ids in replies], device=backbone.device)
    real_BS = torch.arange(longest, device=backbone.device) < lengths[:, None]
    _, hidden = extend(backbone, after, ids_BS, real_BS=None if bool(real_BS.all()) else real_BS)
    return [hidden[row, : len(ids)] for row, ids in enumerate(replies)]


def cosines_of(found: Found, detailed: bool) -> Record:
    """What the record of a sample holds: cosines as they are."""
    record: Record = {"latents": len(found.latents_KD)}
    off = geometry.off_diagonal(found.latents_KD)
    record["off_diagonal"], record["maximum"] = (None, None) if off is None else (short(off[0]), short(off[1]))
    kinds = {"latents": found.latents_KD, "dummies": found.dummies_KD, "ordinary": found.ordinary_SD}
    adjacent = {kind: geometry.adjacent(rows) for kind, rows in kinds.items()}
    record["adjacent"] = {kind: None if value is None else short(value) for kind, value in adjacent.items()}
    if detailed and len(found.latents_KD) <= 32:
        rows = geometry.cosines(found.latents_KD).tolist()
        record["detail"] = [[float(f"{value:.3g}") for value in row] for row in rows]
    return record
