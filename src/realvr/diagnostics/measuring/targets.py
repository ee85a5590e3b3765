"""Target forcing on a model's tensors; `realvr.diagnostics.forcing` says what is asked and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from realvr.backbone.types import Prompt
from realvr.data.boxes import prompt_boxes, with_area
from realvr.data.sample import Sample
from realvr.data.targets import Tokens, as_evidence, fixed
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.errors import UserError
from realvr.latent.span import splice, think
from realvr.latent.walk import walk
from realvr.maths.evidence import unit
from realvr.maths.precision import at_least_float32
from realvr.runs.journal import Record


@dataclass(frozen=True)
class Targets:
    """What the K latents of a sample are compared with."""

    kind: str
    tokens: list[int | None]
    """Number of the visual token that a target is; None where it is a mean of several."""
    distinct: int
    cut: bool
    """Whether there was more evidence than latents."""
    vectors_KD: Tensor


def targets_of(sample: Sample, prompt: Prompt, features_ND: Tensor, latents: int, how: str) -> Targets:
    """Targets of Stage 1 for a span of K latents; `realvr.diagnostics.forcing` has the rule."""
    grids = [image.grid for image in prompt.images]
    if not grids:
        raise UserError(f"{sample.id}: no picture, so there is no visual token to compare latents with")
    starts = [0, *accumulate(grid.tokens for grid in grids)]
    boxes, pools = with_area(prompt_boxes(sample)), list[Tokens]()
    trail = sample.ordered and len(boxes) > 1 if how == "auto" else how == "boxes"
    if boxes and not trail:
        kind, found = "evidence", as_evidence(boxes, False, grids, starts).tolist()
        cut, numbers = len(found) > latents, [*found[:latents], *found[-1:] * (latents - len(found))]
    else:
        kind, cut = "boxes" if boxes else "image", len(boxes) > latents
        numbers = fixed(boxes, sample.ordered, grids, starts, latents, pools, whole_image=True).tolist()
    means = [at_least_float32(features_ND[torch.from_numpy(pool).to(features_ND.device)]).mean(0) for pool in pools]
    choices = torch.cat([features_ND, *(mean[None].to(features_ND) for mean in means)])
    tokens = [number if number < starts[-1] else None for number in numbers]
    return Targets(kind, tokens, len(set(numbers)), cut, choices[numbers])


@torch.no_grad()
def forcing_records(
    model: Model, reading: Reading, forced: Sequence[int], how: str
) -> Iterator[tuple[Sample, Record | str]]:
    """For each sample that was read what its record holds, or why there is no target."""
    latents, found, rows = model.latents, [], []
    for row, (sample, prompt, images) in enumerate(
        zip(reading.samples, reading.prompts, reading.features(), strict=True)
    ):
        try:
            features = torch.cat(images) if images else torch.empty(0)
            found.append((sample, targets_of(sample, prompt, features, latents, how), features, prompt))
            rows.append(row)
        except UserError as error:
            yield sample, str(error)
    if not found:
        return
    assert reading.prompt is not None and reading.latents_RKD is not None
    index = torch.tensor(rows, device=model.backbone.device)
    state, targets_RKD = reading.prompt.select(index), torch.stack([targets.vectors_KD for _, targets, _, _ in found])
    runs = {0: reading.latents_RKD[index]}
    for count in forced:
        put = {step: targets_RKD[:, step - 1] for step in range(1, count + 1)}
        runs[count] = think(model.backbone, state, latents, interventions=put)[1]
    _, predicted_RKD = splice(model.backbone, state, targets_RKD)
    for row, (sample, targets, features, prompt) in enumerate(found):
        grids = [image.grid for image in prompt.images]
        scored = {str(count): _scores(z_RKD[row], targets, features, grids) for count, z_RKD in runs.items()}
        yield (
            sample,
            {
                "target": targets.kind,
                "distinct": targets.distinct,
                "cut": targets.cut,
                "schedules": scored,
                "predicted": _scores(predicted_RKD[row], targets, features, grids),
                "others": _others(runs[0][row], targets, features),
            },
        )


def _scores(z_KD: Tensor, targets: Targets, features_ND: Tensor, grids: Sequence[Any]) -> dict[str, list[Any]]:
    """Error, cosine and whether the nearest visual token is the target, latent by latent."""
    z, right = z_KD.double(), targets.vectors_KD.double()
    nearest = walk(z_KD, features_ND, grids).nearest.tolist()
    return {
        "mse": [short(value) for value in (z - right).square().mean(-1).tolist()],
        "cosine": [short(value) for value in (unit(z) * unit(right)).sum(-1).tolist()],
        "nearest": [
            None if token is None else found == token for found, token in zip(nearest, targets.tokens, strict=True)
        ],
    }


def _others(z_KD: Tensor, targets: Targets, features_ND: Tensor) -> float | None:
    """Mean cosine of free-running latents with the visual tokens that are no target."""
    named = {token for token in targets.tokens if token is not None}
    others = [token for token in range(len(features_ND)) if token not in named]
    if not others or not named:
        return None
    return short(float((unit(z_KD.double()) @ unit(features_ND[others].double()).T).mean()))
