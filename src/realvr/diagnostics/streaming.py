"""Numbers over the hidden states of all samples, added up file by file: no more than D x D numbers and one file are
alive, whatever the number of rows. Torch is imported when something is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from realvr.diagnostics.states import StateFiles

if TYPE_CHECKING:
    from torch import Tensor

    from realvr.maths.geometry import Moments


def tensors(files: StateFiles, ids: Sequence[str], name: str) -> Iterator[tuple[str, Tensor]]:
    """The rows (r, D) of each sample in float64, in the order of the data."""
    import torch

    for one, rows in files.several(ids, name):
        yield one, torch.from_numpy(rows).double()


def moments(rows: Iterable[tuple[str, Tensor]], chosen: Callable[[Tensor], Tensor] | None = None) -> Moments:
    """Of all rows (or of what is ``chosen`` of each sample's), sample by sample in the order given."""
    from realvr.maths.geometry import Moments

    found = Moments()
    for some in _joined(part if chosen is None else chosen(part) for _, part in rows):
        found.add(some)
    return found


def _joined(parts: Iterable[Tensor], most: int = 1024) -> Iterator[Tensor]:
    """Rows of several samples together: one product of matrices instead of many small ones. The cut depends on the
    rows alone, not on batches or processes."""
    import torch

    held: list[Tensor] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count >= most:
            yield torch.cat(held)
            held, count = [], 0
    if held:
        yield torch.cat(held)


def amount_of(found: Moments, count: int, asked: float | None) -> float:
    """How much a covariance is shrunk: what was asked for, else none where there are more samples than dimensions, else
    by the rule of `realvr.maths.geometry.shrinkage`."""
    from realvr.maths.geometry import shrinkage

    if asked is not None:
        return asked
    covariance_DD = found.covariance_DD
    return shrinkage(covariance_DD, count) if count <= len(covariance_DD) else 0.0


def to_others(
    rows: Callable[[], Iterable[tuple[str, Tensor]]], groups: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """The mean cosine of a vector (D,) to all others of its group (``same``) and to those of other groups
    (``different``), as a share for each sample that has such others: their mean is that of the cosine over samples, and
    resampling them gives its interval (`realvr.maths.pairs`). ``rows`` is gone through twice; what is alive is a sum
    for each group, not the n x n cosines."""
    import numpy as np

    from realvr.maths.pairs import Floats, OtherGroups, same_shares
    from realvr.maths.variation import unit

    sums: dict[str, Floats] = {}
    sizes: dict[str, int] = {}
    for name, vector_D in rows():
        group = groups[name]
        sums[group] = sums.get(group, np.zeros(())) + unit(vector_D.numpy())
        sizes[group] = sizes.get(group, 0) + 1
    others = OtherGroups(sum(sizes.values()))
    for group, sum_D in sums.items() if len(sums) > 1 else ():
        others.add(sum_D, sizes[group])
    near: dict[str, dict[str, float]] = {}
    far: dict[str, float] = {}
    for name, vector_D in rows():
        group, direction_D = groups[name], unit(vector_D.numpy())
        if sizes[group] > 1:
            own = float(direction_D @ sums[group]) - float(direction_D @ direction_D)
            near.setdefault(group, {})[name] = own / (sizes[group] - 1)
        if len(sums) > 1:
            far[name] = float(others.shares(direction_D[None], sums[group], sizes[group])[0])
    found: dict[str, dict[str, float]] = {name: {} for name in groups}
    for members in near.values():
        shares = same_shares(np.array(list(members.values())))
        for name, share in zip(members, shares.tolist(), strict=True):
            found[name]["same"] = share
    for name, share in zip(far, others.settled(np.array(list(far.values()))).tolist(), strict=True) if far else ():
        found[name]["different"] = share
    return found
