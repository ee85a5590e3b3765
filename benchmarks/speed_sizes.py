"""Workloads of `speed.py`: what is measured, at which size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memory import Case


@dataclass(frozen=True)
class Sizes:
    """One workload. The defaults are those of the results in docs/speed.md."""

    grid: tuple[int, int] = (40, 64)  # visual tokens: rows and columns
    group: int = 8
    latents: int = 8
    text: int = 150  # tokens of a prompt beside the picture, about
    answer: int = 64
    long_answer: int = 192  # the paper's limit
    prompts: int = 8
    microbatch: int | None = None  # the largest that is tried; None: `STEP_MICROBATCH` in a whole step, else all
    lora_microbatch: int | None = None  # the same of a whole step with adapters; None: all
    memory: str | None = None  # mode of whole steps, perhaps with a share (`memory_mode`); None: as the package has it
    row: int = 4000  # tokens of a packed row of Stage 1
    rank: int = 16  # of LoRA
    questions: int = 800  # of an evaluation
    picture: tuple[int, int] = (4032, 3024)  # of HR-Bench
    matrix: int = 8192  # side of the matrices that the ceiling is measured with
    copied: int = 2**32  # bytes that are copied for it

    @property
    def visual(self) -> int:
        return self.grid[0] * self.grid[1]

    def microbatches(self, largest: int | None) -> list[int]:
        """Sizes of microbatches to try, the largest first; all prompts fit into a number of them."""
        most = min(largest or self.prompts, self.prompts)
        return [size for size in range(most, 0, -1) if self.prompts % size == 0]

    def workload(self) -> dict[str, Any]:
        """What is the same for all entries of a file; the others say it themselves."""
        return {name: value for name, value in asdict(self).items() if name not in PER_ENTRY}

    def case(self, **changes: Any) -> Case:
        """The workload as `memory.py` calls it."""
        named = {"grid": self.grid, "group": self.group, "answer": self.answer, "latents": self.latents}
        return Case("speed", "", **{**named, **changes})


PER_ENTRY = ("microbatch", "lora_microbatch", "memory", "questions")
STEP_MICROBATCH = 4
"""Of a whole step with full parameters where none is asked for: with 8, one at the 7B shape does not fit in 139 GiB."""
MODES = ("cached", "checkpointed-prefill", "checkpointed")
FULL = Sizes()
SMALL = Sizes(
    grid=(3, 4),  # Stage 1 takes eight of them as targets
    group=2,
    latents=2,
    text=90,  # options and instruction of a whole step take 75
    answer=3,
    long_answer=4,
    prompts=2,
    row=48,
    rank=2,
    questions=4,
    picture=(96, 64),
    matrix=128,
    copied=2**20,
)
"""For a CPU: the whole script in seconds."""


def memory_mode(text: str) -> dict[str, Any]:
    """``MODE``, or ``MODE SHARE`` with the share of the layers that are recomputed, as settings of Stage 2."""
    mode, _, share = text.partition(" ")
    try:
        recompute = float(share or 1)
    except ValueError:
        recompute = 0.0
    if mode not in MODES or not 0 < recompute <= 1 or (share and mode == "cached"):
        also = "'checkpointed-prefill 0.5': a share of the layers, above 0 and at most 1, for all but cached"
        raise ValueError(f"{text!r}: write {', '.join(MODES)}, or {also}")
    return {"memory": mode, "recompute": recompute}
