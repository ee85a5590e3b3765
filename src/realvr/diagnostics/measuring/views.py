"""The views of pairs in one batch (original, edited, an unrelated picture), and the distances between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.diagnostics.measuring.reading import prompt_of
from realvr.diagnostics.pairs import Asked, Pair
from realvr.errors import UserError
from realvr.evaluation.model_responder import prompt_hash
from realvr.latent.span import prefill, think
from realvr.latent.state import State
from realvr.runs.journal import Record

T = TypeVar("T", bound=Asked)
ORIGINAL, EDITED, UNRELATED = range(3)
NO_CANDIDATE = "no other pair shows as many pictures and none of its own"
CONTROL_FAILED = "the control cannot be read"


@dataclass(frozen=True)
class NoControl:
    """Why a pair is read without the unrelated view: one of the two reasons above, and what exactly went wrong."""

    reason: str
    detail: str = ""


@dataclass
class Views(Generic[T]):
    """P pairs read in one batch of R rows. Equal prompts share a row, so equal views have the same latents."""

    pairs: list[T] = field(default_factory=list)
    controls: list[Pair | NoControl] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """Rows of the views of each pair: original, edited and, where the control could be read, unrelated."""
    prompt: State | None = None
    """After the prompts, before the span."""
    after: State | None = None
    """After ``<|lvr_end|>``."""
    latents_RKD: Tensor | None = None
    errors: list[tuple[T, str]] = field(default_factory=list)
    """Pairs that could not be read, and why; they have no rows."""

    def unrelated(self, pair: int) -> int | None:
        """Row of a pair's unrelated view, where it has one."""
        rows = self.rows[pair]
        return rows[UNRELATED] if len(rows) > UNRELATED else None

    def missing(self) -> list[tuple[T, NoControl]]:
        """Pairs that were read without the unrelated view, and why."""
        pairs = zip(self.pairs, self.controls, strict=True)
        return [(pair, control) for pair, control in pairs if isinstance(control, NoControl)]


@torch.no_grad()
def read_views(backbone: Backbone, pairs: Sequence[T], controls: Sequence[Pair | None], latents: int) -> Views[T]:
    """Prefill and free-running span of every view, in one batch; each view is a conversation of its own.

    A control that is missing or cannot be read costs its own pair the unrelated view, nothing else.
    """
    views: Views[T] = Views()
    seen: dict[str, int] = {}
    for pair, chosen in zip(pairs, controls, strict=True):
        try:
            prompts = [prompt_of(backbone, view, view, latents) for view in pair.views]
        except UserError as error:
            views.errors.append((pair, str(error)))
            continue
        control: Pair | NoControl = chosen or NoControl(NO_CANDIDATE)
        if isinstance(control, Pair):
            try:
                prompts.append(prompt_of(backbone, pair.original, control.original, latents))
            except UserError as error:
                control = NoControl(CONTROL_FAILED, f"{control.id}: {error}")
        views.pairs.append(pair)
        views.controls.append(control)
        views.rows.append([])
        for prompt in prompts:
            row = seen.setdefault(prompt_hash(prompt), len(views.prompts))
            views.rows[-1].append(row)
            if row == len(views.prompts):
                views.prompts.append(prompt)
    if views.prompts:
        views.prompt, _ = prefill(backbone, backbone.batch(views.prompts))
        views.after, views.latents_RKD = think(backbone, views.prompt, latents)
    return views


def measure_distances(views: Views[Pair]) -> list[Record]:
    """One record per pair: the distances from the original to the edited and to the unrelated view."""
    records = [_record(pair, None, error=error) for pair, error in views.errors]
    for pair, control, rows in zip(views.pairs, views.controls, views.rows, strict=True):
        assert views.after is not None and views.latents_RKD is not None
        found = {"final": _from_first(views.after.last_BD[rows])}
        if views.latents_RKD.shape[1]:
            found["latent"] = _from_first(views.latents_RKD[rows].double().mean(1))
        values = {}
        for name, distances in found.items():
            values[name] = distances[0]
            if len(distances) > 1:
                values[f"{name}_unrelated"] = distances[1]
        records.append(_record(pair, control, values))
    return records


def _from_first(vectors_VD: Tensor) -> list[float]:
    """Cosine distances of the first vector to each of the others."""
    first, *others = vectors_VD.double()
    return [max(0.0, 1.0 - float(F.cosine_similarity(first, other, dim=0))) for other in others]


def _record(
    pair: Pair, control: Pair | NoControl | None, values: dict[str, float] | None = None, error: str | None = None
) -> Record:
    names = ("latent", "latent_unrelated", "final", "final_unrelated")
    return {
        "pair": pair.id,
        "edit": pair.edit,
        "changed": pair.changed,
        **{name: (values or {}).get(name) for name in names},
        "unrelated": control.id if isinstance(control, Pair) else None,
        "no_control": asdict(control) if isinstance(control, NoControl) else None,
        "error": error,
    }
