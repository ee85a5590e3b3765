"""Hidden states of every sample, kept in files beside the records: ``NAME-states/000016.safetensors``, one per batch.

Records are JSON lines and hold small numbers. A diagnostic that needs the vectors of all samples at once (a probe, a
clustering, a covariance) writes those of a batch before its records, and computes with them in `Diagnostic.extend`. A
file is named by the place of its batch in the run, so a run that was killed and continued, or shared between processes,
leaves the same files; it is there whole or not at all. Where the size of batches has changed in between, two files may
hold one sample, and its row counts once. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realvr.errors import UserError
from realvr.runs.files import write_atomically

Rows = NDArray[np.floating[Any]]
_IDS = "ids"
_LENGTHS = ".lengths"
"""Behind the name of a tensor: how many of its rows belong to each sample."""


class StateFiles:
    """The files of one diagnostic in one folder (``OUT/NAME-states``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self,
        place: int,
        ids: Sequence[str],
        tensors: Mapping[str, Rows],
        several: Mapping[str, Sequence[Rows]] | None = None,
    ) -> None:
        """The rows of one batch: every tensor (n, …) has a row for each of ``ids``; ``several`` has some rows (r, …)
        for each of them, which may be none."""
        from safetensors.numpy import save

        for name, rows in {**tensors, **(several or {})}.items():
            if len(rows) != len(ids):
                raise ValueError(f"{name}: {len(rows)} rows for {len(ids)} samples")
        if not ids:
            return
        file = self.folder / f"{place:06d}.safetensors"
        whole: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(rows) for name, rows in tensors.items()}
        for name, parts in (several or {}).items():
            whole[name] = np.concatenate(list(parts))
            whole[name + _LENGTHS] = np.array([len(part) for part in parts], dtype=np.int64)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save(whole, {_IDS: json.dumps(list(ids))}))
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror or error})") from None
        self.__dict__.pop("_places", None)

    @cached_property
    def _places(self) -> dict[str, tuple[Path, int]]:
        """File and row of every sample; of two files that hold one, the later name stands."""
        found: dict[str, tuple[Path, int]] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with _opened(file) as content:
                ids = json.loads((content.metadata() or {}).get(_IDS, "[]"))
            found |= {name: (file, row) for row, name in enumerate(ids)}
        return found

    def _files(self, ids: Sequence[str]) -> list[tuple[Path, list[str]]]:
        """The files of these samples in the order of their places, with the samples of each."""
        missing = [one for one in ids if one not in self._places]
        if missing:
            raise UserError(
                f"{self.folder}: the states of {len(missing)} of {len(ids)} samples are missing (first: {missing[0]}); "
                f"delete {self.folder.name.removesuffix('-states')}.jsonl beside it to measure again"
            )
        by_file: dict[Path, list[str]] = {}
        for one in ids:
            by_file.setdefault(self._places[one][0], []).append(one)
        return sorted(by_file.items())

    def batches(self, ids: Sequence[str], name: str) -> Iterator[tuple[list[str], Rows]]:
        """The tensor ``name`` of these samples, one file at a time: what is alive does not grow with the samples."""
        for file, own in self._files(ids):
            with _opened(file) as content:
                rows = content.get_tensor(name)
            yield own, rows[[self._places[one][1] for one in own]]

    def several(self, ids: Sequence[str], name: str) -> Iterator[tuple[str, Rows]]:
        """The rows (r, …) of each of these samples, one file at a time."""
        for file, own in self._files(ids):
            with _opened(file) as content:
                rows, lengths = content.get_tensor(name), content.get_tensor(name + _LENGTHS)
            ends = lengths.cumsum()
            for one in own:
                row = self._places[one][1]
                yield one, rows[ends[row] - lengths[row] : ends[row]]

    def rows(self, ids: Sequence[str], name: str) -> Rows:
        """The tensor ``name`` of these samples in this order, whole."""
        places = {one: place for place, one in enumerate(ids)}
        whole: Rows | None = None
        for own, rows in self.batches(ids, name):
            if whole is None:
                whole = np.empty((len(ids), *rows.shape[1:]), dtype=rows.dtype)
            whole[[places[one] for one in own]] = rows
        return np.empty((0, 0), dtype=np.float32) if whole is None else whole


def _opened(file: Path) -> Any:  # noqa: ANN401  # safetensors has no types
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="np")
    except (OSError, SafetensorError) as error:
        name = file.parent.name.removesuffix("-states")
        raise UserError(f"{file}: damaged ({error}); delete it and {name}.jsonl to measure again") from None
