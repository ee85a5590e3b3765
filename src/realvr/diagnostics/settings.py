"""How a diagnostic is run, whichever it is: model, data, folder, device. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from realvr.errors import UserError
from realvr.runs.launching import check_sharded


@dataclass(frozen=True)
class DiagnoseSettings:
    """Model, data and folder of a run.

    Args:
        model: Directory of a checkpoint, a hub id, or a packaged model: mini, mini-base, mini-direct, mini-short.
        data: File or folder with samples; for a diagnostic on pairs, samples that share "pair", with tags view and
            edit.
        out: Folder for records and tables.
        limit: At most so many samples; of pairs, so many of each edit.
        latents: Number of latent slots K; by default the checkpoint's, and 0 for a model never trained with a span.
        second_model: The other model, for a diagnostic that compares two.
        batch: Samples (or pairs) read together; by default what suits the diagnostic.
        processes: Processes that share the samples; process r uses GPU r.
        max_new: At most this many new tokens per answer.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        sharded: Spread the model over all GPUs of this machine, in one process: for models that no GPU holds.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        take_over: Take OUT from a run on another machine that is gone for certain.
    """

    model: str
    data: str | Path
    out: str | Path
    limit: int | None = None
    latents: int | None = None
    second_model: str | None = None
    batch: int | None = None
    processes: int = 1
    max_new: int = 192
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    sharded: bool = False
    dtype: str | None = None
    take_over: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong without reading data or weights."""
        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch is {self.batch}: it must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit is {self.limit}: at least one sample is needed")
        if self.latents is not None and self.latents < 0:
            raise UserError(f"--latents is {self.latents}: the number of latent slots cannot be negative")
        check_sharded(self.sharded, self.processes, self.device)

    def to_json(self) -> str:
        """For a process that does a share of the work."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return json.dumps({name: values[name] for name in self.names()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the settings that every diagnostic has."""
        return tuple(field.name for field in fields(DiagnoseSettings))


def settings_of(of: DiagnoseSettings) -> DiagnoseSettings:
    """The settings of a run, of a verb's options that may be more."""
    return DiagnoseSettings(**{name: getattr(of, name) for name in DiagnoseSettings.names()})
