"""Checkpoints of sharded parameters: each rank writes its rows, and any number of ranks reads them back.

``shard-00000.safetensors`` holds what rank 0 has, ``shard-00000.json`` which rows of which tensor that is. A tensor is
cut along its first dimension. What every rank holds whole (buffers, counts) is written by rank 0 alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realvr.training.statefile import write_tensors, write_text

FILES = "shard-*.json"


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``start + rows`` of a tensor of this shape; ``rows`` is None where it is whole on every
    rank."""

    shape: tuple[int, ...]
    start: int = 0
    rows: int | None = None


def rows_of(size: int, rank: int, world: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as ``torch.chunk`` cuts them."""
    each = -(-size // world)
    start = min(rank * each, size)
    return start, min(each, size - start)


def piece(shape: Iterable[int], rank: int, world: int) -> Piece:
    """What a rank has of a tensor that is cut."""
    shape = tuple(shape)
    return Piece(shape, *rows_of(shape[0], rank, world))


def write_shard(directory: Path, rank: int, tensors: dict[str, tuple[Tensor, Piece]], values: dict[str, Any]) -> None:
    """Write what this rank holds, and ``values``, which are JSON and the same on every rank."""
    kept = {key: each for key, each in tensors.items() if (each[1].rows if each[1].rows is not None else not rank)}
    stem = f"shard-{rank:05d}"
    write_tensors(directory / f"{stem}.safetensors", {key: tensor for key, (tensor, _) in kept.items()})
    index = {key: {"shape": place.shape, "start": place.start, "rows": place.rows} for key, (_, place) in kept.items()}
    write_text(directory / f"{stem}.json", json.dumps({"tensors": index, "values": values if not rank else {}}))


class Shards:
    """What all ranks wrote, read a few rows at a time."""

    def __init__(self, directory: Path) -> None:
        self.places: dict[str, list[tuple[Piece, Path]]] = defaultdict(list)
        self.values: dict[str, Any] = {}
        for file in sorted(directory.glob(FILES)):
            content = json.loads(file.read_text(encoding="utf-8"))
            self.values |= content["values"]
            for key, found in content["tensors"].items():
                place = Piece(tuple(found["shape"]), found["start"], found["rows"])
                self.places[key].append((place, file.with_suffix(".safetensors")))
        for key, found in self.places.items():
            self._refuse_gaps(key, found)

    @staticmethod
    def _refuse_gaps(key: str, found: list[tuple[Piece, Path]]) -> None:
        found.sort(key=lambda each: each[0].start)
        shape, end = found[0][0].shape, 0
        for place, _ in found:
            if place.shape != shape or place.start != end or (place.rows is None and len(found) > 1):
                raise ValueError(f"the shards of {key} do not fit together")
            end += place.rows if place.rows is not None else (shape[0] if shape else 0)
        if shape and end != shape[0]:
            raise ValueError(f"rows {end} to {shape[0]} of {key} are in no shard")

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self.places)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.places[key][0][0].shape

    def stack(self, key: str) -> None:
        """Read a tensor of three dimensions as one of two, the rows of its first dimension one below the other."""
        found = []
        for place, file in self.places[key]:
            first, rows, width = place.shape
            count = None if place.rows is None else place.rows * rows
            found.append((Piece((first * rows, width), place.start * rows, count), file))
        self.places[key] = found

    def whole(self, key: str) -> Tensor:
        """All of a tensor."""
        shape = self.shape(key)
        return self.read(key, 0, shape[0]) if shape else _read(self.places[key][0][1], key)

    def read(self, key: str, start: int, rows: int) -> Tensor:
        """Some rows of a tensor."""
        parts = []
        for place, file in self.places[key]:
            size = place.shape[0] if place.rows is None else place.rows
            first, last = max(start, place.start), min(start + rows, place.start + size)
            if first < last:
                parts.append(_read(file, key, first - place.start, last - place.start, len(place.shape)))
        if not parts:
            empty = _read(self.places[key][0][1], key, 0, 0, len(self.shape(key)))
            return empty.reshape(0, *self.shape(key)[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(file: Path, key: str, first: int = 0, last: int | None = None, dims: int = 0) -> Tensor:
    """Rows of a stored tensor, or all of it. ``dims``: how many dimensions the rows are counted in; a stored one more
    is stacked."""
    try:
        with safe_open(file, framework="pt") as opened:
            if last is None:
                whole: Tensor = opened.get_tensor(key)
                return whole
            stored = opened.get_slice(key)
            shape = stored.get_shape()
            if len(shape) == dims:
                rows: Tensor = stored[first:last]
                return rows
            each = shape[1]
            some: Tensor = stored[first // each : -(-last // each)]
            begin = first // each * each
            return some.flatten(0, 1)[first - begin : last - begin]
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from error
