"""Cosines that need the hidden states of all questions: centred, whitened, residualised, within and between tasks. See
`realvr.diagnostics.similarity`; torch is imported when something is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.numbers import mean
from realvr.diagnostics.states import StateFiles
from realvr.diagnostics.streaming import amount_of, moments, tensors, to_others

if TYPE_CHECKING:
    from torch import Tensor


def normalised(files: StateFiles, ids: Sequence[str], kinds: Sequence[str], asked: float | None) -> dict[str, Any]:
    """Centred and whitened adjacent cosines of each kind of token, residualised ones of latents, and the shrinkage."""
    values: dict[str, dict[str, dict[str, float]]] = {"centred": {}, "whitened": {}}
    shrinkage: dict[str, Any] = {}
    for kind in kinds:
        for norm, (found, stated) in _whitened(files, ids, kind, asked).items():
            values[norm][kind] = found
            shrinkage |= {kind: stated} if stated else {}
    residual, shrinkage["contexts"] = _residualised(files, ids, asked)
    return {
        "adjacent": {
            norm: {kind: mean(list(found.values())) for kind, found in own.items()} for norm, own in values.items()
        },
        "minus_ordinary": {norm: _minus(own["latents"], own["ordinary"]) for norm, own in values.items()},
        "residualised": mean(list(residual.values())),
        "shrinkage": shrinkage,
    }


def _minus(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Any]:
    return mean([value - second[name] for name, value in first.items() if name in second])


def _whitened(
    files: StateFiles, ids: Sequence[str], kind: str, asked: float | None
) -> dict[str, tuple[dict[str, float], Any]]:
    """Adjacent cosine of each question, centred and whitened, and how the covariance was shrunk."""
    from realvr.maths import geometry

    found = moments(tensors(files, ids, kind))
    if not found.count:
        return {"centred": ({}, None), "whitened": ({}, None)}
    mean_D, covariance_DD = found.mean_D, found.covariance_DD
    amount = amount_of(found, found.count, asked)
    whitener_DD = geometry.whitener(geometry.shrunk(covariance_DD, amount))
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "centred": lambda z_KD: z_KD - mean_D,
        "whitened": lambda z_KD: (z_KD - mean_D) @ whitener_DD,
    }
    stated = {"rows": found.count, "width": len(mean_D), "amount": amount}
    values: dict[str, dict[str, float]] = {norm: {} for norm in changes}
    for name, z_KD in tensors(files, ids, kind):
        for norm, change in changes.items():
            cosine = geometry.adjacent(change(z_KD))
            if cosine is not None:
                values[norm][name] = cosine
    return {"centred": (values["centred"], None), "whitened": (values["whitened"], stated)}


def _residualised(
    files: StateFiles, ids: Sequence[str], asked: float | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Adjacent cosine of the latents of each question without what their context tells by a linear map."""
    from realvr.maths import geometry

    own, cross = geometry.Moments(), geometry.Moments()
    for (_, context_1D), (_, z_KD) in _both(files, ids):
        context_KD = context_1D.expand(len(z_KD), -1)
        own.add(context_KD)
        cross.add(context_KD, z_KD)
    contexts = len(ids)
    amount = amount_of(own, contexts, asked)
    b_CD = geometry.coefficients(geometry.shrunk(own.covariance_DD, amount), cross.covariance_DD)
    assert cross.right_D is not None
    values: dict[str, float] = {}
    for (name, context_1D), (_, z_KD) in _both(files, ids):
        cosine = geometry.adjacent(z_KD - cross.right_D - (context_1D - own.mean_D) @ b_CD)
        if cosine is not None:
            values[name] = cosine
    return values, {"rows": contexts, "width": len(own.mean_D), "amount": amount}


def _both(files: StateFiles, ids: Sequence[str]) -> Any:  # noqa: ANN401  # pairs of (id, rows)
    return zip(tensors(files, ids, "context"), tensors(files, ids, "latents"), strict=True)


def tasks(files: StateFiles, groups: Mapping[str, str]) -> dict[str, Any]:
    """Cosines of mean latents within a task and between tasks."""

    def means() -> Iterator[tuple[str, Tensor]]:
        return ((name, z_KD.mean(0)) for name, z_KD in tensors(files, list(groups), "latents"))

    found = to_others(means, groups)
    return {f"{key}_task": mean([one[key] for one in found.values() if key in one]) for key in ("same", "different")}
