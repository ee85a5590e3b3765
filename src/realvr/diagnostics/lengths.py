"""How many latents a question gets: K of the run, or as many as it has evidence tokens (``--latents evidence``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from realvr.data.sample import Sample
from realvr.diagnostics.parts import DiagnosticSettings, Skip

EVIDENCE = "evidence"


class LengthSettings(DiagnosticSettings):
    """Settings of a diagnostic whose trajectories may be as long as the evidence."""

    length: Literal["latents", "evidence"] = Field(
        default="latents",
        description="Length of the trajectory: K of the run, or the number of visual tokens in the evidence boxes of "
        "each question (also: --latents evidence).",
    )


def measured(settings: LengthSettings, items: Sequence[Sample], data: Path) -> list[Sample]:
    """The samples that have a length."""
    if settings.length != EVIDENCE:
        return list(items)
    found = [sample for sample in items if sample.boxes]
    if not found:
        raise Skip(f"{data}: no sample has evidence boxes, so there is no number of evidence tokens; give --latents K")
    return found
