"""The model's own latents of every question, kept beside the predictions: ``latents/BENCH/*.safetensors``.

The mean and other-example conditions are made of them, and diagnostics may read them. A shard holds a batch, one tensor
(K, D) per question under the question's id; it is written whole before the predictions of that batch are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from realvr.errors import UserError
from realvr.runs.files import write_atomically

LATENTS = "latents"


def _name(question: str) -> str:
    """The id as a name inside a shard: half a surrogate pair has no UTF-8."""
    return question.encode("utf-8", "backslashreplace").decode()


class LatentStore:
    """Latents under ``directory/latents``, written by process ``rank``."""

    def __init__(self, directory: str | Path, rank: int = 0) -> None:
        self.root = Path(directory) / LATENTS
        self.rank = rank
        self._index: dict[str, dict[str, Path]] = {}

    def refresh(self) -> None:
        """Forget what is known of the files: other processes may have added some."""
        self._index.clear()

    def _shards(self, bench: str) -> dict[str, Path]:
        """Question name to file. Where two hold the same question, the later name stands."""
        if bench not in self._index:
            found: dict[str, Path] = {}
            for file in sorted((self.root / bench).glob("*.safetensors")):
                try:
                    with safe_open(file, framework="pt") as shard:
                        found |= dict.fromkeys(shard.keys(), file)
                except (OSError, SafetensorError) as error:
                    raise UserError(f"{file}: damaged ({error}); delete it, and it is computed again") from None
            self._index[bench] = found
        return self._index[bench]

    def has(self, bench: str, question: str) -> bool:
        """Whether the latents of a question are there."""
        return _name(question) in self._shards(bench)

    def get(self, bench: str, question: str) -> Tensor:
        """(K, D) float32."""
        with safe_open(self._shards(bench)[_name(question)], framework="pt") as shard:
            return shard.get_tensor(_name(question)).float()

    def add(self, bench: str, latents: Mapping[str, Tensor]) -> None:
        """Write a shard of (K, D) tensors by question. bfloat16 where that loses nothing."""
        if not latents:
            return
        known = self._shards(bench)
        folder = self.root / bench
        tensors = {_name(question): _compact(value) for question, value in latents.items()}
        mine = [int(file.stem.split("-")[1]) for file in folder.glob(f"r{self.rank}-*.safetensors")]
        file = folder / f"r{self.rank}-{max(mine, default=-1) + 1:06d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save(tensors))
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror or error})") from None
        known |= dict.fromkeys(tensors, file)


def _compact(value: Tensor) -> Tensor:
    half = value.to(torch.bfloat16)
    return (half if torch.equal(half.float(), value.float()) else value.float()).contiguous()
